"""Whether chains are read before a step verifies them: by the tokens a second that rounds of either kind give.

Read, the host leaves out what promises little, and the step has fewer rows. Unread, nothing is chosen by what this
draft says of its own tokens, but the step is launched while its chains are drafted. That saves the time in which the
device would wait for the host: a millisecond where both are in one process, and several where worker processes launch
the steps.

Rounds of as many sessions, or nearly, are compared. What they take is found soon; how many tokens they give differs so
much from round to round that it is taken to be the same until many have said otherwise. The kind that loses is tried
now and then, and more rarely each time it loses again. A load that was never met goes by the nearest that was: the
first rounds there decide whether drafts are used at all. No clock: seconds are given.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from specq.verifier.sources import Patience

REMEMBERED = 9  # rounds of each kind, of whose seconds the median counts
FIRST = 3  # rounds of each kind before they are compared; of the other one, in the first trial
FADE = 0.02  # of the tokens of earlier rounds, with each one
PRIOR_ROUNDS = 30.0  # of each kind, which give what both give together
MARGIN = 0.01  # by which the other kind must be better
LEAST_PATIENCE, MOST_PATIENCE = 32, 512  # rounds between trials of the kind that loses


class _Kind:
    """Rounds that were read, or that were not: the seconds of the last ones beyond their drafts, and about how many
    gave how many tokens a session."""

    def __init__(self) -> None:
        self.seconds = deque[float](maxlen=REMEMBERED)
        self.num_rounds = self.num_tokens = 0.0

    def learn(self, seconds: float, num_tokens: float) -> None:
        self.seconds.append(seconds)
        self.num_rounds += 1 - FADE * self.num_rounds
        self.num_tokens += num_tokens - FADE * self.num_tokens

    def rate(self, draft_s: float, usual_tokens: float) -> float:
        """Return the tokens a second of a session in rounds whose draft takes so long, given what rounds of both kinds
        give."""
        tokens = (self.num_tokens + PRIOR_ROUNDS * usual_tokens) / (self.num_rounds + PRIOR_ROUNDS)
        return tokens / max(draft_s + median(self.seconds), 1e-6)


class _Load:
    """Rounds of about as many sessions, by kind: read, unread. `best` is the kind in use, a guess until rounds of both
    are known."""

    def __init__(self, *, best: bool) -> None:
        self.kinds, self.best = (_Kind(), _Kind()), best
        self._patience = Patience(LEAST_PATIENCE, MOST_PATIENCE)

    def choose(self, draft_s: float) -> bool:
        """See `ReadingChoice.choose`."""
        used, other = self.kinds[self.best], self.kinds[not self.best]
        if len(used.seconds) < FIRST:
            return self.best
        self._patience.pass_round()
        if len(other.seconds) < FIRST:
            return self.best is not self._patience.is_over
        self._compare(draft_s)
        if not self._patience.is_over:
            return self.best
        self._patience.lengthen()
        return not self.best

    def _compare(self, draft_s: float) -> None:
        used, other = self.kinds[self.best], self.kinds[not self.best]
        usual = (used.num_tokens + other.num_tokens) / (used.num_rounds + other.num_rounds)
        if other.rate(draft_s, usual) > (1 + MARGIN) * used.rate(draft_s, usual):
            self.best = not self.best
            self._patience.reset()


class ReadingChoice:
    """Chooses for each round, and learns from it."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}  # by the number of sessions, in powers of two

    def choose(self, num_sessions: int, draft_s: float) -> bool:
        """Return whether the chains of a round of so many sessions, which are drafted in so many seconds, are verified
        unread."""
        return self._load(num_sessions).choose(draft_s)

    def learn(self, num_sessions: int, seconds: float, num_tokens: int, *, is_unread: bool) -> None:
        """Take in what a round of so many sessions has taken beyond its draft, and how many tokens it gave all of
        them."""
        self._load(num_sessions).kinds[is_unread].learn(seconds, num_tokens / num_sessions)

    def _load(self, num_sessions: int) -> _Load:
        number = num_sessions.bit_length()
        if number not in self._loads:
            nearest = min(self._loads, key=lambda known: abs(known - number), default=None)
            self._loads[number] = _Load(best=nearest is None or self._loads[nearest].best)
        return self._loads[number]
