"""What can be chosen of drafts, what is known of each source before, what a step says of it, and how it is told that
something was decided. Values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from specq.protocol import DRAFT_WORKER, ORIGIN_CODES, REMOTE, Float64Array, trace_events
from specq.verifier.models.step_time import StepKind, StepRows
from specq.verifier.models.token_yield import NUM_LEVELS, Judged

Sources = frozenset[str]

DECISIONS = trace_events.DECISIONS  # why something was decided


class Choice(NamedTuple):
    """How the next steps draft: by which sources, whether the drafts are verified before they are read, and whether
    steps are launched early all the same, so that what draft workers send comes too late (`--drafts always`)."""

    sources: Sources = frozenset()
    is_unread: bool = False
    is_early: bool = False

    def without(self, source: str) -> Choice:
        """Return the same without a source."""
        return self._replace(sources=self.sources - {source}) if source in self.sources else self

    @property
    def code(self) -> int:
        """Return it as traces carry it."""
        names = (DRAFT_WORKER if one == REMOTE else one for one in self.sources)
        return sum(1 << ORIGIN_CODES[one] for one in names) + self.is_unread * trace_events.UNREAD

    def __str__(self) -> str:
        flags = [name for name, is_set in (("unread", self.is_unread), ("early", self.is_early)) if is_set]
        return " ".join(["+".join(sorted(self.sources)) or "none", *flags])


class SourceTraits(NamedTuple):
    """What is known of a source before it drafts.

    levels_s      (sessions, levels) -> seconds of a draft, of a source that drafts as many levels as it is told; None:
                  nobody knows
    most_levels   that it drafts
    may_be_unread whether its drafts can be verified before they are read, and it is left to choose
    level_size    sessions -> nodes of a level at most, of a source that may be unread
    """

    name: str
    levels_s: Callable[[int, int], float] | None = None
    most_levels: int = NUM_LEVELS
    may_be_unread: bool = False
    level_size: Callable[[int], int] | None = None

    def draft_s(self, num_sessions: int, depth: int) -> float:
        """Return the seconds that are foreseen of a draft with so many levels."""
        return self.levels_s(num_sessions, min(depth, self.most_levels)) if self.levels_s is not None else 0.0

    def drafts_s(self, num_sessions: int) -> Float64Array:
        """Return f64[NUM_LEVELS + 1]: the same with 0, 1, ... levels."""
        if self.levels_s is None:
            return np.zeros(NUM_LEVELS + 1)
        return np.array([0.0, *(self.draft_s(num_sessions, depth) for depth in range(1, NUM_LEVELS + 1))])


class Drafting(NamedTuple):
    """How a step drafts, as it was decided when its drafts were begun.

    sources, looked_at   that may draft; those of them that draft for one session alone
    asleep       sources that need not follow the texts
    depth, promised, is_unread   as of `Budget`
    """

    sources: Sources
    looked_at: Sources
    asleep: Sources
    depth: int
    promised: float
    is_unread: bool


class Step(NamedTuple):
    """What a step was like, and what came of it.

    kind, rows   its sources are those that drafted for it; looked_at: those that did so for one session alone
    depth        levels that a draft model drafted
    num_sessions, num_tokens    those that decode, and what they were given
    seconds      up to its end, since the end of the one before
    waits, judged   of each source: the seconds in which it was waited for, and what became of its drafts
    is_told      whether all sessions wait for nobody, and some take drafts
    """

    kind: StepKind
    rows: StepRows
    looked_at: Sources
    depth: int
    num_sessions: int
    num_tokens: int
    seconds: float
    waits: Mapping[str, float]
    judged: Mapping[str, Judged]
    is_told: bool = True


class DraftDecision(NamedTuple):
    """What was decided.

    step, sessions    the number of the step, and how many sessions it had
    reason            of DECISIONS
    used, rate        the choice that is in use from then on, and the tokens a second that are foreseen of it
    other, other_rate   the choice that it was held against, likewise
    """

    step: int
    sessions: int
    reason: str
    used: Choice
    rate: float
    other: Choice
    other_rate: float

    def numbers(self) -> list[int]:
        """Return it as the values of `trace_events.DECIDED`."""
        rate, other_rate = (min(round(1000 * one), trace_events.MOST) for one in (self.rate, self.other_rate))
        return [DECISIONS.index(self.reason), self.sessions, self.used.code, rate, self.other.code, other_rate]

    def shown(self) -> dict[str, Any]:
        """Return it in words and short numbers."""
        return {
            "step": self.step,
            "sessions": self.sessions,
            "reason": self.reason,
            "used": str(self.used),
            "tokens_per_s": round(self.rate, 1),
            "other": str(self.other),
            "other_tokens_per_s": round(self.other_rate, 1),
        }
