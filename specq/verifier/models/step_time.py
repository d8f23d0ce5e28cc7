"""The expected seconds of the steps of a service: the engine's profile of rows, and corrections learned in service.

    seconds = profile(rows) * (1 + scale + what each source slows it) + first * (as such + launched early + nodes
              + unread + prompts) + what sources are waited for;  first = profile(1)

One regression learns all weights but the last, relative to the profile. A source slows a step by the cache, bandwidth
and cores that it uses. The wait for it is measured, and a regression of its own learns it (`SourceWait`). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from specq.protocol import Float64Array, IntpArray
from specq.verifier.models.ridge import Ridge
from specq.verifier.models.step_curve import StepCurve

# The weights, and their standard deviations around 0 at first. PROMPTS: of a step with prompts. PROMPT_ROW: of each of
# their rows. ATTENDED: of each token that such a row attends to.
SCALE, AS_SUCH, EARLY, UNREAD, NODE, PROMPTS, PROMPT_ROW, ATTENDED, NUM_COMMON = range(9)
PRIOR = 0.15, 0.3, 0.3, 0.6, 0.01, 0.5, 0.003, 2e-5
SLOWS = 0.15  # likewise, of how much each source slows a step
MEMORY, USUAL, CUT, LEAST_NOISE = 80.0, 0.05, 3.0, 0.01  # as in `Ridge`: in steps; relative; in deviations; relative
LEAST_PART = 0.2  # part of the profile that a step takes at least
# Standard deviations at first of the weights of a wait: fixed, of each session, and of the seconds foreseen. The first
# two are parts of `first`, the third is relative. UNFORESEEN: no drafts were measured at start-up. FORESEEN: they were.
UNFORESEEN, FORESEEN = (1.0, 0.1, 0.01), (0.2, 0.003, 0.15)
WAIT_MEMORY, WAIT_USUAL, WAIT_CUT, WAIT_NOISE = 60.0, 0.02, 10.0, 0.1
JOIN_FADE = 0.3


class StepKind(NamedTuple):
    """The properties of a step that change its seconds, apart from its rows.

    sources     the sources that draft for it.
    is_early    whether it is launched before the last step has ended.
    is_unread   whether it is launched before its drafts are read.
    is_helped   whether threads on other cores help.
    """

    sources: frozenset[str] = frozenset()
    is_early: bool = False
    is_unread: bool = False
    is_helped: bool = True


class StepRows(NamedTuple):
    """The rows of a step: all, drafted nodes, rows of prompts, and the tokens that rows of prompts attend to."""

    total: int
    nodes: int = 0
    prompts: int = 0
    attended: int = 0


NO_ROWS = StepRows(0)


class StepTime:
    """The expected seconds of steps and of the waits for sources, learned from each step."""

    def __init__(self, sources: Mapping[str, bool], curves: tuple[StepCurve, StepCurve]) -> None:
        """Begin with the curves that the engine expects.

        sources   by name: whether the drafts of the source were measured at start-up.
        curves    the curve of steps without help from other cores, and with it.
        """
        self._places = {name: NUM_COMMON + i for i, name in enumerate(sources)}
        self._curves = curves
        self._ridge = Ridge([*PRIOR, *[SLOWS] * len(sources)], memory=MEMORY, usual=USUAL, cut=CUT)
        first_s = curves[-1].profiled(1)
        self._num_learned = [0, 0]  # steps without help from other cores, and with it
        self._waits = {name: SourceWait(first_s, is_foreseen=known) for name, known in sources.items()}

    def profile(self, kind: StepKind) -> StepCurve:
        """Return the measured curve of such steps."""
        return self._curves[kind.is_helped]

    def wait(self, source: str) -> SourceWait:
        """Return the wait for a source."""
        return self._waits[source]

    def learn(self, kind: StepKind, rows: StepRows, seconds: float) -> None:
        """Learn from the seconds of a step up to its end, without the waits for sources."""
        profile = self.profile(kind)
        profiled = profile.profiled(rows.total)
        self._num_learned[kind.is_helped] += 1
        self._ridge.learn(self._features(kind, rows, profiled), seconds / profiled - 1.0, LEAST_NOISE)
        if not kind.is_early and rows.total > profile.num_measured:
            beyond = self._beyond(kind, rows)
            profile.learn_slope(rows.total, (seconds - beyond) / self._scale(kind))

    def _features(self, kind: StepKind, rows: StepRows, profiled: float) -> Float64Array:
        part = self.profile(kind).profiled(1) / profiled
        common = 1.0, part, part * kind.is_early, part * kind.is_unread, part * rows.nodes
        of_prompts = part * (rows.prompts > 0), part * rows.prompts, part * rows.attended
        return np.array([*common, *of_prompts, *(float(name in kind.sources) for name in self._places)])

    def _scale(self, kind: StepKind) -> float:
        weights: list[float] = self._ridge.weights.tolist()
        slows = sum(max(weights[self._places[one]], 0.0) for one in kind.sources)
        return max(1.0 + weights[SCALE] + slows, LEAST_PART)

    def _node_s(self, kind: StepKind) -> float:
        """Return the seconds of a node beyond its row."""
        return max(float(self._ridge.weights[NODE]), 0.0) * self.profile(kind).profiled(1)

    def _beyond(self, kind: StepKind, rows: StepRows) -> float:
        """Return the seconds beyond the scaled profile of the rows."""
        w: list[float] = self._ridge.weights.tolist()
        parts = w[AS_SUCH] + min(w[EARLY], 0.0) * kind.is_early + w[UNREAD] * kind.is_unread
        if rows.prompts:
            of_prompts = np.maximum(self._ridge.weights[[PROMPTS, PROMPT_ROW, ATTENDED]], 0.0)
            parts += float(of_prompts @ np.array([1.0, rows.prompts, rows.attended]))
        return parts * self.profile(kind).profiled(1) + self._node_s(kind) * rows.nodes

    def times(
        self, kind: StepKind, num_rows: IntpArray, num_nodes: Float64Array, rows: StepRows = NO_ROWS
    ) -> Float64Array:
        """Return f64[n]: the expected seconds of steps, without the waits for sources.

        num_rows    i64[n]: rows of decoding sessions, with their nodes.
        num_nodes   f64[n]: the nodes among them.
        rows        more rows that each step has besides, such as those of prompts.
        """
        profiled = self.profile(kind).profiled_at(num_rows + rows.total)
        beyond = self._beyond(kind, rows) + self._node_s(kind) * num_nodes
        found: Float64Array = profiled * self._scale(kind) + beyond
        np.maximum(found, LEAST_PART * profiled, out=found)
        return found

    def deviation(self, kind: StepKind, num_rows: int) -> float:
        """Return the standard deviation of a step's expected seconds, relative to its profile."""
        profiled = self.profile(kind).profiled(num_rows)
        return self._ridge.deviation(self._features(kind, StepRows(num_rows), profiled))

    def curve(self, kind: StepKind) -> StepCurve:
        """Return the expected seconds by rows and nodes as they are now, to plan steps with."""
        first_s = self.profile(kind).profiled(1)
        scale = self._scale(kind)
        extra_s = max(self._beyond(kind, NO_ROWS), (LEAST_PART - scale) * first_s)
        return self.profile(kind).corrected(scale, extra_s, self._node_s(kind))

    def learned_curves(self) -> dict[bool, StepCurve]:
        """Return the curves of steps without drafts that enough steps have shown, by whether other cores help."""
        kinds = [StepKind(is_helped=mode) for mode in (False, True) if self._num_learned[mode] >= MEMORY]
        return {kind.is_helped: self.curve(kind) for kind in kinds}

    @property
    def saved_s(self) -> float:
        """The seconds that a step saves if it is launched before the last one has ended."""
        return max(-float(self._ridge.weights[EARLY]), 0.0) * self._curves[-1].profiled(1)


class SourceWait:
    """The seconds that a step waits for a source.

    They depend on the sessions that it drafts for, and on the seconds foreseen: those of a draft measured at start-up.

    num_seen   the number of steps learned from.
    join_s     additional seconds for each session in the first step, in which the source computes the contexts.
    """

    def __init__(self, first_s: float, *, is_foreseen: bool) -> None:
        """`first_s`: seconds of a step with one row. `is_foreseen`: whether drafts were measured at start-up."""
        self._first_s = first_s
        self._ridge = Ridge(FORESEEN if is_foreseen else UNFORESEEN, memory=WAIT_MEMORY, usual=WAIT_USUAL, cut=WAIT_CUT)
        self.num_seen, self.join_s = 0, 0.0

    def learn(self, num_sessions: int, seconds: float, foreseen_s: float, *, joins: bool) -> None:
        """Learn from a step. `joins`: in the step before the source was silent, or drafted for one session only."""
        if joins:
            more = max(seconds - float(self.of(num_sessions, np.array([foreseen_s]))[0]), 0.0) / num_sessions
            self.join_s += JOIN_FADE * (more - self.join_s)
            return
        self.num_seen += 1
        x = np.array([1.0, num_sessions, foreseen_s / self._first_s])
        self._ridge.learn(x, (seconds - foreseen_s) / self._first_s, WAIT_NOISE * max(seconds / self._first_s, 0.02))

    def of(self, num_sessions: int, foreseen_s: Float64Array) -> Float64Array:
        """Return f64[n]: the expected wait for each of the seconds foreseen, f64[n]."""
        as_such, of_session, of_foreseen = self._ridge.weights
        found: Float64Array = foreseen_s * (1.0 + of_foreseen) + self._first_s * (as_such + of_session * num_sessions)
        np.maximum(found, LEAST_PART * foreseen_s, out=found)
        return found
