"""What the steps of a service take: the profile of their rows, and what it leaves out, learned from each step.

    seconds = profile(rows) * (1 + scale + what each source slows it) + first * (as such + launched early + nodes
              + unread + prompts) + what sources are waited for;  first = profile(1)

All weights but the last are learned by one regression, relative to the profile. A source slows a step by the cache,
bandwidth and cores that it takes; what it is waited for is measured. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from specq.protocol import Float64Array, IntpArray
from specq.verifier.models.ridge import Ridge
from specq.verifier.models.step_curve import StepCurve

# Weights, and how far from 0 they may be. Those of prompts: of a step that has some, a row, a token that a row attends
# to.
SCALE, AS_SUCH, EARLY, UNREAD, NODE, PROMPTS, PROMPT_ROW, ATTENDED, NUM_COMMON = range(9)
PRIOR = 0.15, 0.3, 0.3, 0.15, 0.01, 0.5, 0.003, 2e-5
SLOWS = 0.15
MEMORY, USUAL, CUT, LEAST_NOISE = 80.0, 0.05, 3.0, 0.01  # steps; parts of a step
LEAST_PART = 0.2  # of the profile, that a step takes at least
# Of what a source is waited for, as such, for each session, and for what is foreseen, in parts of `first` and of that:
# of one of which nothing is foreseen, and of one that was measured at the start.
UNFORESEEN, FORESEEN = (1.0, 0.1, 0.01), (0.2, 0.02, 0.15)
WAIT_MEMORY, WAIT_USUAL, WAIT_CUT, WAIT_NOISE = 60.0, 0.02, 10.0, 0.1
JOIN_FADE = 0.3


class StepKind(NamedTuple):
    """What a step is like, but for its rows: the sources that draft for it, and whether it is launched before the last
    one has ended, before its drafts are read, and with help from other cores."""

    sources: frozenset[str] = frozenset()
    is_early: bool = False
    is_unread: bool = False
    is_helped: bool = True


class StepRows(NamedTuple):
    """StepRows of a step: in all, drafted nodes, those of prompts; and the tokens that these attend to."""

    total: int
    nodes: int = 0
    prompts: int = 0
    attended: int = 0


NO_ROWS = StepRows(0)


class StepTime:
    """`curves`: of steps without help from other cores, and with it."""

    def __init__(self, sources: Mapping[str, bool], curves: tuple[StepCurve, StepCurve]) -> None:
        """`sources`: whether their drafts were measured at the start."""
        self._places = {name: NUM_COMMON + i for i, name in enumerate(sources)}
        self._curves = curves
        self._ridge = Ridge([*PRIOR, *[SLOWS] * len(sources)], memory=MEMORY, usual=USUAL, cut=CUT)
        first_s = curves[-1].profiled(1)
        self._waits = {name: SourceWait(first_s, is_foreseen=known) for name, known in sources.items()}

    def profile(self, kind: StepKind) -> StepCurve:
        """Return the curve that was measured of such steps."""
        return self._curves[kind.is_helped]

    def wait(self, source: str) -> SourceWait:
        """Return what a source is waited for."""
        return self._waits[source]

    def learn(self, kind: StepKind, rows: StepRows, seconds: float) -> None:
        """Take in the seconds of a step up to the end, without those in which sources were waited for."""
        profile = self.profile(kind)
        profiled = profile.profiled(rows.total)
        self._ridge.learn(self._features(kind, rows), seconds / profiled - 1.0, LEAST_NOISE)
        if not kind.is_early:
            beyond = self._beyond(kind, rows)
            profile.learn_slope(rows.total, (seconds - beyond) / self._scale(kind))

    def _features(self, kind: StepKind, rows: StepRows) -> Float64Array:
        profile = self.profile(kind)
        part = profile.profiled(1) / profile.profiled(rows.total)
        x = np.zeros(len(self._ridge.weights))
        x[:NUM_COMMON] = (
            *(1.0, part, part * kind.is_early, part * kind.is_unread, part * rows.nodes),
            *(part * (rows.prompts > 0), part * rows.prompts, part * rows.attended),
        )
        x[[self._places[name] for name in kind.sources]] = 1.0
        return x

    def _scale(self, kind: StepKind) -> float:
        weights = self._ridge.weights
        slows = sum(max(float(weights[self._places[one]]), 0.0) for one in kind.sources)
        return max(1.0 + float(weights[SCALE]) + slows, LEAST_PART)

    def _node_s(self, kind: StepKind) -> float:
        """Return the seconds of a node beyond its row."""
        return max(float(self._ridge.weights[NODE]), 0.0) * self.profile(kind).profiled(1)

    def _beyond(self, kind: StepKind, rows: StepRows) -> float:
        """Return the seconds beyond those of rows."""
        w = self._ridge.weights
        parts = w[AS_SUCH] + min(w[EARLY], 0.0) * kind.is_early + w[UNREAD] * kind.is_unread
        if rows.prompts:
            of_prompts = np.maximum(w[[PROMPTS, PROMPT_ROW, ATTENDED]], 0.0)
            parts += of_prompts @ np.array([1.0, rows.prompts, rows.attended])
        return float(parts) * self.profile(kind).profiled(1) + self._node_s(kind) * rows.nodes

    def times(
        self, kind: StepKind, num_rows: IntpArray, num_nodes: Float64Array, rows: StepRows = NO_ROWS
    ) -> Float64Array:
        """Return f64[n]: the expected seconds of steps with so many rows, so many of them nodes, and besides
        `rows`."""
        profiled = self.profile(kind).profiled_at(num_rows + rows.total)
        beyond = self._beyond(kind, rows) + self._node_s(kind) * num_nodes
        found: Float64Array = profiled * self._scale(kind) + beyond
        np.maximum(found, LEAST_PART * profiled, out=found)
        return found

    def deviation(self, kind: StepKind, num_rows: int) -> float:
        """Return the standard deviation of what is expected of a step, as a part of it."""
        return self._ridge.deviation(self._features(kind, StepRows(num_rows)))

    def curve(self, kind: StepKind) -> StepCurve:
        """Return what steps take by their rows and nodes, as it is now, for whoever plans one."""
        first_s = self.profile(kind).profiled(1)
        scale = self._scale(kind)
        extra_s = max(self._beyond(kind, NO_ROWS), (LEAST_PART - scale) * first_s)
        return self.profile(kind).corrected(scale, extra_s, self._node_s(kind))

    @property
    def saved_s(self) -> float:
        """The seconds that a step saves which is launched before the last one has ended."""
        return max(-float(self._ridge.weights[EARLY]), 0.0) * self._curves[-1].profiled(1)


class SourceWait:
    """The seconds in which the verifier waits for a source in a step, by the sessions that it drafts for, and by what
    is foreseen of it.

    num_seen    steps that were learned from
    join_s      what the first step takes more, for each session: contexts that the source has not computed
    """

    def __init__(self, first_s: float, *, is_foreseen: bool) -> None:
        """`is_foreseen`: drafts were measured at the start."""
        self._first_s = first_s
        self._ridge = Ridge(FORESEEN if is_foreseen else UNFORESEEN, memory=WAIT_MEMORY, usual=WAIT_USUAL, cut=WAIT_CUT)
        self.num_seen, self.join_s = 0, 0.0

    def learn(self, num_sessions: int, seconds: float, foreseen_s: float, *, joins: bool) -> None:
        """Take in a step; `joins`: it was silent in the step before."""
        if joins:
            more = max(seconds - float(self.of(num_sessions, np.array([foreseen_s]))[0]), 0.0) / num_sessions
            self.join_s += JOIN_FADE * (more - self.join_s)
            return
        self.num_seen += 1
        x = np.array([1.0, num_sessions, foreseen_s / self._first_s])
        self._ridge.learn(x, (seconds - foreseen_s) / self._first_s, WAIT_NOISE * max(seconds / self._first_s, 0.02))

    def of(self, num_sessions: int, foreseen_s: Float64Array) -> Float64Array:
        """Return f64[n]: what is expected, given what was foreseen."""
        as_such, of_session, of_foreseen = self._ridge.weights
        found: Float64Array = foreseen_s * (1.0 + of_foreseen) + self._first_s * (as_such + of_session * num_sessions)
        np.maximum(found, LEAST_PART * foreseen_s, out=found)
        return found
