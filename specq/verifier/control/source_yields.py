"""What each source of drafts takes by itself, and what it brings: guesses of what an arm would bring, before it is
tried.

A source takes its own seconds, in which the verifier waits for it, and those of the rows that it adds to steps; it
brings the tokens of which it is the origin. That leaves much out: what a drafter takes from the verifier elsewhere,
what several sources cost together, and that others may find the same tokens. So a guess says only what is tried first,
what is tried late, and what a trial may cost; what is used is measured.

Rules: a source that is left out is believed to take its tokens along, and one that is added to bring the most that it
can. So a guess errs on the side of drafts. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

Arm = frozenset[str]

UNKNOWN = 0.25  # of all tokens: what a source is believed to bring of which nothing is known
LEAST_PART = 0.02  # of the seconds of a step: what is left at least of it without some sources


class Yield(NamedTuple):
    """Seconds and tokens: of one source, or of all that a step does."""

    seconds: float
    tokens: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else math.inf

    def plus(self, other: Yield) -> Yield:
        return Yield(self.seconds + other.seconds, self.tokens + other.tokens)

    def over(self, count: float) -> Yield:
        return Yield(self.seconds / count, self.tokens / count)

    def without(self, other: Yield) -> Yield:
        return Yield(max(self.seconds - other.seconds, LEAST_PART * self.seconds), max(self.tokens - other.tokens, 0.0))


NOTHING = Yield(0.0, 0.0)
Yields = Mapping[str, Yield]


def leanest(step: Yield, yields: Yields) -> tuple[Arm, float]:
    """Return the sources without which a step would bring most tokens a second, and the gain, as a logarithm: while the
    worst of them brings less in its own seconds than all do, it is left out."""
    dropped, left = set[str](), step
    for source in sorted(yields, key=lambda source: yields[source].rate):
        if yields[source].rate >= left.rate:
            break
        dropped.add(source)
        left = left.without(yields[source])
    gain = math.log(left.rate / step.rate) if dropped and left.tokens else 0.0
    return frozenset(dropped), gain


def promise(step: Yield, yields: Yields, added: Arm, dropped: Arm) -> float:
    """Return how much a step may gain at best, as a logarithm, by some sources more and some less; `yields`: at best of
    those that are added (`specq.verifier.control.source_bounds`). What is not known costs nothing, and others find all
    that those which are left out brought."""
    found = step
    for source in dropped & yields.keys():
        found = found.without(yields[source]._replace(tokens=0.0))
    for source in added:
        found = found.plus(yields.get(source, Yield(0.0, UNKNOWN * step.tokens)))
    return math.log(found.rate / step.rate)
