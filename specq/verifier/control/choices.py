"""The values of the controller: choices, traits of sources, results of steps, and decisions. Values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from specq.protocol import DRAFT_WORKER, ORIGIN_CODES, REMOTE, Float64Array, trace_events
from specq.verifier.models.step_time import StepKind, StepRows
from specq.verifier.models.token_yield import NUM_LEVELS, Judged

Sources = frozenset[str]

DECISIONS = trace_events.DECISIONS  # the reasons of decisions


class Choice(NamedTuple):
    """How the next steps draft.

    sources     the sources that draft. None: plain decoding.
    is_unread   whether drafts are verified before the host has read them.
    is_early    whether steps are launched before the last ended although draft workers draft. Their drafts
                then come too late (only with `--drafts always`).
    """

    sources: Sources = frozenset()
    is_unread: bool = False
    is_early: bool = False

    @property
    def code(self) -> int:
        """The choice as an integer, as in traces: one bit for each source, and UNREAD."""
        names = (DRAFT_WORKER if one == REMOTE else one for one in self.sources)
        return sum(1 << ORIGIN_CODES[one] for one in names) + self.is_unread * trace_events.UNREAD

    def __str__(self) -> str:
        flags = [name for name, is_set in (("unread", self.is_unread), ("early", self.is_early)) if is_set]
        return " ".join(["+".join(sorted(self.sources)) or "none", *flags])


class SourceTraits(NamedTuple):
    """What is known of a source before it drafts.

    levels_s       (sessions, levels) -> seconds of a draft, for a source that drafts as many levels as the controller
                   asks for. None: unknown.
    most_levels    the most levels that it drafts.
    may_be_unread  whether its drafts can be verified unread, and the controller chooses that.
    level_size     sessions -> most nodes of a level, for a source that may be unread. None: unknown.
    """

    name: str
    levels_s: Callable[[int, int], float] | None = None
    most_levels: int = NUM_LEVELS
    may_be_unread: bool = False
    level_size: Callable[[int], int] | None = None

    def draft_s(self, num_sessions: int, depth: int) -> float:
        """Return the expected seconds of a draft with `depth` levels; 0 if unknown."""
        return self.levels_s(num_sessions, min(depth, self.most_levels)) if self.levels_s is not None else 0.0

    def drafts_s(self, num_sessions: int) -> Float64Array:
        """Return f64[NUM_LEVELS + 1]: the expected seconds of drafts with 0, 1, ... levels."""
        if self.levels_s is None:
            return np.zeros(NUM_LEVELS + 1)
        return np.array([0.0, *(self.draft_s(num_sessions, depth) for depth in range(1, NUM_LEVELS + 1))])


class Drafting(NamedTuple):
    """How a step drafts, as decided when its drafts were begun.

    sources      the sources that may draft.
    looked_at    the part of `sources` that drafts for one session only.
    asleep       sources that need not follow the texts.
    depth, promised, is_unread   see `Budget`.
    num_changes  how often the policy had changed its choice or the kind of its probe.
    """

    sources: Sources
    looked_at: Sources
    asleep: Sources
    depth: int
    promised: float
    is_unread: bool
    num_changes: int


class Step(NamedTuple):
    """A step, and its results.

    kind, rows     its kind, with the sources in use for it, and its rows.
    looked_at      the sources that drafted for one session only.
    depth          levels that a draft model drafted.
    num_sessions   sessions that decode.
    num_tokens     tokens that these sessions received.
    seconds        from the end of the step before to its own end.
    waits          for each source: the seconds that the step waited for it.
    judged         for each source: the results of its drafts.
    is_told        whether it can show if drafts pay: no session is synchronous, some accept drafts.
    num_changes    as in its `Drafting`. None: it followed the last change.
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
    num_changes: int | None = None


class DraftDecision(NamedTuple):
    """A decision of the policy.

    step, sessions      the step's number, and the sessions of the decision.
    reason              one of DECISIONS.
    used, rate          the choice in use from then on, and its forecast tokens a second.
    other, other_rate   the choice compared with it, and its forecast tokens a second.
    """

    step: int
    sessions: int
    reason: str
    used: Choice
    rate: float
    other: Choice
    other_rate: float

    def numbers(self) -> list[int]:
        """Return the decision as the values of `trace_events.DECIDED`."""
        rate, other_rate = (min(round(1000 * one), trace_events.MOST) for one in (self.rate, self.other_rate))
        return [DECISIONS.index(self.reason), self.sessions, self.used.code, rate, self.other.code, other_rate]

    def shown(self) -> dict[str, Any]:
        """Return the decision in words and rounded numbers, as log fields."""
        return {
            "step": self.step,
            "sessions": self.sessions,
            "reason": self.reason,
            "used": str(self.used),
            "tokens_per_s": round(self.rate, 1),
            "other": str(self.other),
            "other_tokens_per_s": round(self.other_rate, 1),
        }
