"""Windows of service: what was measured of one set of sources without a break for another. No clock: seconds are
given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from specq.verifier.control.source_yields import NOTHING, Arm, Yield

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
