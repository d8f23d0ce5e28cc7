"""Whether a verifier's own rounds begin with a draft: the rule of the scheduler, applied to the round as a whole.

Drafting in the verifier's process holds the next step up, host work included, so it must bring more tokens a second than
rounds without. Both kinds are measured in service, for about as many sessions as there are; the better one runs, and the
other is tried again now and then, more and more rarely while it goes on losing. No clock: times are given.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FADE = 0.1  # weight of the newest round in a rate
TRIAL = 4  # rounds in a row of the kind that is tried; the first, which has the other's leftovers, is not counted
LEAST_PATIENCE, MOST_PATIENCE = 16, 512  # rounds between trials


@dataclass(slots=True)
class _Rates:
    """Tokens a second of both kinds of rounds with about as many sessions, by whether they were drafted for."""

    rates: dict[bool, float] = field(default_factory=dict)
    patience: int = LEAST_PATIENCE
    until_trial: int = LEAST_PATIENCE
    trial_left: int = 0

    @property
    def best(self) -> bool:
        return self.rates.get(True, 1.0) >= self.rates.get(False, 0.0)


class RoundChoice:
    """Chooses the kind of each round, and learns from what came of it."""

    def __init__(self) -> None:
        self._by_size: dict[int, _Rates] = {}  # by the power of two that the number of sessions is below
        self._kinds: list[tuple[int, bool]] = []  # of the last two rounds: size and kind

    def choose(self, num_sessions: int) -> bool:
        """Return whether the next round, with so many sessions, shall be drafted for."""
        size = num_sessions.bit_length()
        own = self._by_size.setdefault(size, _Rates())
        if not own.trial_left:
            own.until_trial -= 1
            if own.until_trial <= 0:
                own.trial_left = TRIAL
        drafts = own.best
        if own.trial_left:
            drafts = not drafts
        self._kinds = [*self._kinds[-1:], (size, drafts)]
        return drafts

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Take what the last chosen round gave: tokens, and seconds until the next one could begin."""
        if not self._kinds:
            return
        size, drafts = self._kinds[-1]
        own = self._by_size[size]
        was_best = own.best
        if seconds > 0 and len(self._kinds) == 2 and self._kinds[0] == self._kinds[1]:
            rate, before = num_tokens / seconds, own.rates.get(drafts)
            own.rates[drafts] = rate if before is None else before + FADE * (rate - before)
        if own.trial_left:
            own.trial_left -= 1
            if not own.trial_left:
                lost = was_best == own.best
                own.patience = min(2 * own.patience, MOST_PATIENCE) if lost else LEAST_PATIENCE
                own.until_trial = own.patience

    def pause(self) -> None:
        """Forget the last round: what follows it did not follow at once."""
        self._kinds = []
