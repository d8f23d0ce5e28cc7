"""Windows of service: what was measured of one set of sources without a break for another. No clock: seconds are
given.

How long what has lost is left alone before it is tried again. Pure: rounds are counted, not seconds.

Steps that took far longer than usual, since something else had the machine: of them no more counts than tells that
they were long.

A step that a busy machine keeps waiting for a second weighs as much as a hundred others, and says nothing of the arm
that it fell to. So what a step took is cut at MOST times what steps of its arm usually take. That is a median: it rises
and falls by a constant factor, so that it finds an arm whose steps do take longer, or a machine that has become slower,
within some steps, and single stalls hardly move it.

Sessions that arrive in a burst begin together.

Whoever arrives just after a step was launched waits until it has ended, and a step that computes prompts takes long as
such, few rows or many. So while sessions arrive so fast that in this time more of them would miss the step than wait
for it, it is put off: until none has arrived for some of their gaps, but no longer than it takes as such. Where as many
have just ended together, whoever sent these is expected to send others together, so the first one is waited for
already.

No clock: moments are given, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from specq.verifier.control.source_yields import NOTHING, Arm, Yield


class Patience:
    """Rounds until the next trial: `least` at first, and twice as many each time that the trial has lost, up to
    `most`."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self.reset()

    def reset(self) -> None:
        """Begin anew: what was tried is worth it, or something else is tried from now on."""
        self._num_rounds = self._num_left = self._least

    def lengthen(self) -> None:
        """Let a trial that has lost, or begins, put the next one off."""
        self._num_rounds = self._num_left = min(2 * self._num_rounds, self._most)

    def pass_round(self) -> None:
        """Take in a round without a trial."""
        self._num_left -= 1

    @property
    def is_over(self) -> bool:
        """Whether it is time for a trial."""
        return self._num_left <= 0


MOST = 3.0
MOVE = 1.15


@dataclass(slots=True)
class UsualSteps:
    """What steps of each arm usually take at one load, in seconds."""

    usual_s: dict[Arm, float] = field(default_factory=dict)
    _last_s: float = 0.0  # of the arm of the step before: what an arm starts with of which nothing is known

    def cut(self, arm: Arm, seconds: float, *, is_decoding: bool = True) -> float:
        """Return what counts of the seconds of a step of this arm. Steps that compute prompts tell nothing of what is
        usual."""
        usual_s = self.usual_s.get(arm, self._last_s) or seconds
        if is_decoding:
            self._last_s = self.usual_s[arm] = usual_s * (MOVE if seconds > usual_s else 1 / MOVE)
        return min(seconds, MOST * usual_s)


LEAST = 4  # sessions of a burst, of those that arrive and of those that end
MOST_GAP_S = 0.005  # between two sessions of a burst
GAPS = 4.0  # mean gaps without another session, after which a burst is over
PATIENCE_S = 0.001  # and at least so long: sockets are polled by the millisecond
FADE = 0.8  # of what was learned of the gaps, with each session
EXPECTED_S = 0.1  # after a burst has ended, within which another one is expected


def is_burst(num_first: int, num_sessions: int) -> bool:
    """Return whether so many of a step's sessions got their first token that others of a burst are likely to follow."""
    return num_first >= LEAST and 2 * num_first >= num_sessions


class Bursts:
    """The burst that is arriving, if one is."""

    def __init__(self) -> None:
        self._num = 0  # sessions of the burst
        self._began = self._last = self._ended = float(
            "-inf"
        )  # when the step could have begun, when a session arrived, when a burst ended
        self._gap_s = 0.0  # mean of the gaps between them, the last ones first
        self._is_step_due = False

    def arrive(self, now: float) -> None:
        """Note that a session has arrived."""
        gap_s = now - self._last
        if gap_s > MOST_GAP_S:
            self._num, self._gap_s = 0, PATIENCE_S / GAPS
        elif self._num:
            self._gap_s = FADE * self._gap_s + (1 - FADE) * gap_s
        if not self._is_step_due:
            self._is_step_due, self._began = True, now
        self._num, self._last = self._num + 1, now

    def begin_step(self) -> None:
        """Note that a step begins, with those that have arrived."""
        self._is_step_due = False

    def end(self, num_sessions: int, now: float) -> None:
        """Note that so many sessions ended with a step."""
        if num_sessions >= LEAST:
            self._ended = now

    @property
    def is_arriving(self) -> bool:
        """Whether sessions that came since the last step are a burst's."""
        least = 1 if self._last - self._ended < EXPECTED_S else LEAST
        return self._is_step_due and self._num >= least

    def wait_s(self, now: float, num_waiting: int, step_s: float) -> float:
        """Return for how many seconds a step that takes `step_s` as such, and for which so many sessions wait, is put
        off, unless another one arrives before; 0: not at all."""
        if not self.is_arriving or step_s <= num_waiting * self._gap_s:
            return 0.0
        until = min(self._last + max(GAPS * self._gap_s, PATIENCE_S), self._began + step_s)
        return max(until - now, 0.0)


# A window is the longest of: seconds; round trips, where draft workers are heard; LEAST_STEPS steps; and so many that
# they have WINDOW_VERDICTS verdicts, of all sessions, or WINDOW_STEPS.
WINDOW_S, WINDOW_ROUND_TRIPS, WINDOW_STEPS, WINDOW_VERDICTS, LEAST_STEPS = 0.25, 5, 20, 40, 8
# One that is evidently better or worse than another may be over after so many steps and seconds.
FEW_STEPS, FEW_S = 4, 0.1


@dataclass(slots=True)
class Window:
    """What was measured of one arm without a break for another; `decoded`: the tokens of those steps whose verdicts
    count, which compute no prompts."""

    tokens: int = 0
    decoded: int = 0
    seconds: float = 0.0
    steps: int = 0
    verdicts: int = 0
    senders: Arm = frozenset()  # sources that sent something
    of_sources: dict[str, Yield] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)  # seconds of each source in one step
    squares: tuple[float, float, float] = (
        0.0,
        0.0,
        0.0,
    )  # sums over steps: of tokens and seconds squared, and of their products

    def add(
        self,
        tokens: int,
        seconds: float,
        verdicts: int,
        senders: Arm = frozenset(),
        steps: int = 1,
        yields: Mapping[str, Yield] = MappingProxyType({}),
    ) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.steps += steps
        self.verdicts += verdicts
        self.decoded += tokens if verdicts else 0
        self.senders |= senders
        of_tokens, of_seconds, of_both = self.squares
        self.squares = of_tokens + tokens**2, of_seconds + seconds**2, of_both + tokens * seconds
        for source, own in yields.items():
            self.of_sources[source] = self.of_sources.get(source, NOTHING).plus(own)
            self.longest[source] = max(self.longest.get(source, 0.0), own.seconds)

    @property
    def step(self) -> Yield:
        """Return what a step took and brought."""
        return Yield(self.seconds, self.tokens).over(self.steps)

    def yields(self, sources: Arm) -> dict[str, Yield]:
        """Return what each of some sources took and brought in a step. Its longest seconds do not count: what is done
        once, as compiling is, says nothing of the next steps."""
        found = {}
        for source in sources & self.of_sources.keys():
            seconds, tokens = self.of_sources[source]
            found[source] = Yield((seconds - self.longest[source]) / max(self.steps - 1, 1), tokens / self.steps)
        return found

    @property
    def log_rate(self) -> float:
        """Return the logarithm of its tokens a second."""
        return math.log(max(self.tokens, 1) / self.seconds)

    @property
    def variance(self) -> float:
        """Return the variance of `log_rate`, as its steps show it (delta method): on a busy machine they differ by
        much."""
        if self.steps < 2 or not self.tokens:
            return 1.0
        of_tokens, of_seconds, of_both = self.squares
        spread = of_tokens / self.tokens**2 + of_seconds / self.seconds**2 - 2 * of_both / (self.tokens * self.seconds)
        return max(spread, 0.0) * self.steps / (self.steps - 1)

    @property
    def deviation_of_tokens(self) -> float:
        """Return the standard deviation of the logarithm of its tokens, as its steps show it."""
        if self.steps < 2 or not self.tokens:
            return 1.0
        spread = max(self.squares[0] / self.tokens**2 - 1 / self.steps, 0.0)
        return math.sqrt(spread * self.steps / (self.steps - 1))

    @property
    def size(self) -> float:
        """Return how much it says, as a part of what it must say, whatever seconds it has."""
        return max(self.steps / WINDOW_STEPS, min(self.steps / LEAST_STEPS, self.verdicts / WINDOW_VERDICTS))

    def part(self, round_trip_s: float) -> float:
        """Return how long it is, as a part of what it must be."""
        return min(self.size, self.seconds / max(WINDOW_S, WINDOW_ROUND_TRIPS * round_trip_s))

    def says_something(self, round_trip_s: float) -> bool:
        """Return whether it is long enough to be over where the answer is evident."""
        return self.steps >= FEW_STEPS and self.seconds >= max(FEW_S, WINDOW_ROUND_TRIPS * round_trip_s)
