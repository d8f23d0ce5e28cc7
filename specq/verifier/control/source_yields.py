"""What each source of drafts takes by itself, and what it brings: guesses of what an arm would bring, before it is
tried.

A source takes its own seconds, in which the verifier waits for it, and those of the rows that it adds to steps; it
brings the tokens of which it is the origin. That leaves much out: what a drafter takes from the verifier elsewhere,
what several sources cost together, and that others may find the same tokens. So a guess says only what is tried first,
what is tried late, and what a trial may cost; what is used is measured.

Rules: a source that is left out is believed to take its tokens along, and one that is added to bring the most that it
can. So a guess errs on the side of drafts. Pure.

What each source of drafts can do at best, by what it was seen to take and to bring: what cannot pay need not be
tried.

A source takes at least so many seconds of a step, and brings at most so many tokens to each session. What was seen at
one load holds at others: with more sessions a draft takes no less time, and with half as many no less than half. Tokens
are the mean of what was accepted of it, and so much more as few rounds leave open. So a bound errs on the side of
drafts: it says what is tried late and when a trial may end, never what is used.

No clock: seconds are given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
    those that are added (`specq.verifier.control.source_yields`). What is not known costs nothing, and others find all
    that those which are left out brought."""
    found = step
    for source in dropped & yields.keys():
        found = found.without(yields[source]._replace(tokens=0.0))
    for source in added:
        found = found.plus(yields.get(source, Yield(0.0, UNKNOWN * step.tokens)))
    return math.log(found.rate / step.rate)


ROUNDS = 2  # at a load, before anything is known of its seconds: what is done once, as compiling is, is in the first
# of the difference, where a source takes more than the least that it took: what it does may have become dearer
RISE = 0.05
MEMORY = 64.0  # verdicts after which one has faded to 1/e
DEVIATIONS, PRIOR_VARIANCE = (
    2.0,
    1.0,
)  # of the mean of tokens: how much more than what was seen is possible; and how much tokens differ at least


@dataclass(slots=True)
class _Least:
    """The least seconds that a source took in a step of a load, and in how many steps."""

    seconds: float = math.inf
    num_rounds: int = 0

    def learn(self, seconds: float) -> None:
        self.num_rounds += 1
        self.seconds = min(seconds, self.seconds + RISE * (seconds - self.seconds)) if self.num_rounds > 1 else seconds


@dataclass(slots=True)
class _Seen:
    """What was seen of one source: its least seconds by the number of sessions, a power of two; tokens of a session's
    round."""

    least: dict[int, _Least] = field(default_factory=dict)
    weight: float = 0.0  # verdicts
    tokens: float = 0.0  # the mean
    variance: float = PRIOR_VARIANCE

    def learn(self, num_sessions: int, taken: Yield) -> None:
        self.least.setdefault(load_of(num_sessions), _Least()).learn(taken.seconds)
        tokens = taken.tokens / num_sessions
        self.weight = num_sessions + self.weight * math.exp(-num_sessions / MEMORY)
        off, part = tokens - self.tokens, num_sessions / self.weight
        self.tokens += part * off
        self.variance += part * (off * (tokens - self.tokens) * num_sessions - self.variance)
        self.variance = max(self.variance, PRIOR_VARIANCE)

    @property
    def most_tokens(self) -> float:
        return self.tokens + DEVIATIONS * math.sqrt(self.variance / self.weight)


class SourceBounds:
    """The bounds of all sources, at all loads."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def learn(self, num_sessions: int, seconds: float, senders: Iterable[str], yields: Yields) -> None:
        """Take in a step of so many sessions, all of which decode, and of so many seconds: what each source that sent
        something took and brought. None takes longer than the whole step."""
        for source in yields.keys() & set(senders):
            taken = yields[source]
            taken = taken._replace(seconds=min(taken.seconds, seconds))
            self._seen.setdefault(source, _Seen()).learn(num_sessions, taken)

    def best(self, source: str, num_sessions: float) -> Yield | None:
        """Return the least seconds and the most tokens of a source in a step of so many sessions; None where too little
        is known."""
        seen = self._seen.get(source)
        known = {} if seen is None else {load: one for load, one in seen.least.items() if one.num_rounds >= ROUNDS}
        if seen is None or not known:
            return None
        least_s = max(one.seconds * min(num_sessions / load, 1.0) for load, one in known.items())
        return Yield(least_s, num_sessions * seen.most_tokens)


def load_of(num_sessions: float) -> int:
    """Return the load as a number of sessions: the power of two that is nearest."""
    return int(2 ** round(math.log2(max(num_sessions, 1.0))))
