"""The verifier's step counts for its heartbeats: times of phases, rows, accepted nodes by lane.

Rule: counting is cheap. A step appends to a few lists. Arrays of its nodes are kept and counted many at a time. Counts
that the draft trees keep anyway are read from there.

The module also records the step events of traced sessions: see `specq.runtime.Tracer`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from specq.protocol import (
    COUNTED_DEPTHS,
    PHASES,
    ROW_LIMITS,
    STEP_LIMITS_US,
    Int64Array,
    Open,
    StepOutput,
    UInt8Array,
    trace_events,
)
from specq.runtime import Tracer
from specq.verifier.control.choices import DraftDecision
from specq.verifier.control.policy import Policy
from specq.verifier.sessions.session import Session
from specq.verifier.sources import SourceSet
from specq.verifier.sources.source_clock import LANES_OF, by_lane
from specq.verifier.step.node_choice import Shares
from specq.verifier.step.rounds import Round, Rounds
from specq.verifier.trees import DraftTrees


def trace_open(tracer: Tracer, message: Open, now: float, broker: str) -> None:
    """Record that a session was opened, if it is traced. Its events are for this broker."""
    if message.trace:
        tracer.open(message.session_id, broker)
        tracer.note(message.session_id, trace_events.OPENED, now, len(message.token_ids), message.tokens_left)


def trace_step(tracer: Tracer, shares: Shares, rounds: Rounds, at: Moments, committed: float) -> None:
    """Record a step for each traced session: its computed prompt part, and its round."""
    step_us, batch = int((committed - at.began) * 1e6), shares.batch
    for i in _traced(tracer, shares.sessions):
        num_tokens = int(batch.num_tokens[i])
        if num_tokens > 1 or not batch.is_judged[i]:
            tracer.note(shares.sessions[i].session_id, trace_events.PREFILL, at.began, step_us, num_tokens)
    which = _traced(tracer, rounds.sessions)
    if which:
        for done in rounds.take(np.array(which, np.intp)):  # no objects for the other sessions' rounds
            _trace_round(tracer, done, at, committed)


def _traced(tracer: Tracer, sessions: Sequence[Session]) -> list[int]:
    return [i for i, session in enumerate(sessions) if tracer.traces(session.session_id)]


def _trace_round(tracer: Tracer, done: Round, at: Moments, committed: float) -> None:
    stages = at.began, at.drafted, at.planned, at.judged, committed
    split_us = [int((end - start) * 1e6) for start, end in pairwise(stages)]  # wait, plan, forward, commit
    session_id, num_tokens = done.session.session_id, len(done.token_ids)
    counts = (done.base_len, num_tokens, len(done.nodes), len(done.path))
    tracer.note(session_id, trace_events.ROUND, at.began, *counts, *split_us)
    lanes, flags = done.lanes.tobytes(), done.is_accepted.tobytes()  # for a few nodes faster than arrays
    for lane in sorted(set(lanes)):
        num_accepted = sum(flag for of, flag in zip(lanes, flags, strict=True) if of == lane)
        values = (lane, lanes.count(lane), num_accepted, done.base_len)
        tracer.note(session_id, trace_events.JUDGED, at.judged, *values)


def trace_decisions(
    tracer: Tracer, decisions: Sequence[DraftDecision], sessions: Sequence[Session], now: float
) -> None:
    """Record the drafting decisions for each traced session."""
    for i in _traced(tracer, sessions):
        for one in decisions:
            tracer.note(sessions[i].session_id, trace_events.DECIDED, now, *one.numbers())


def trace_close(tracer: Tracer, session_id: int, length: int) -> None:
    """Record that a session was closed."""
    tracer.note(session_id, trace_events.CLOSED, tracer.clock(), length)
    tracer.end(session_id)


KEPT_STEPS = 64  # steps whose nodes are counted later, at most


class Moments(NamedTuple):
    """When a step reached its stages, in seconds of the clock that it was given.

    last     when the forward pass of the step before ended, if more work followed at once; else None.
    began    when the step began.
    drafted  when the drafts were on the trees.
    planned, judged  when the step was planned, and judged.

    If a step began before the last ended, the host spent no time before it. Its forward pass began when the last one
    ended.
    """

    last: float | None
    began: float
    drafted: float
    planned: float
    judged: float


class Histogram:
    """The sum of the observed values, and their counts per limit (`specq.protocol.stats`).

    Each count is of the values up to its limit. The last one is of the values above all limits.
    """

    __slots__ = ("counts", "limits", "sum")

    def __init__(self, limits: Sequence[int]) -> None:
        self.limits, self.sum = limits, 0
        self.counts = [0] * (len(limits) + 1)

    def observe(self, value: int) -> None:
        self.sum += value
        self.counts[bisect_left(self.limits, value)] += 1

    def to_list(self) -> list[int]:
        return _trimmed([self.sum, *self.counts])


class StepMeter:
    """Counts the steps of one verifier."""

    def __init__(self) -> None:
        self._phases = {name: Histogram(STEP_LIMITS_US) for name in PHASES}
        self._rows, self._sessions = Histogram(ROW_LIMITS), Histogram(ROW_LIMITS)
        self._kept: list[
            tuple[UInt8Array, UInt8Array]
        ] = []  # lanes and results of nodes that are not yet counted, by step
        self._judged = np.zeros((256, 2), np.int64)  # by lane: verified and accepted nodes
        self._num_decided = 0

    def note_all(self, at: Moments, done: Sequence[tuple[Shares, StepOutput]], num_rows: int, rounds: Rounds) -> None:
        """Count a step with `num_rows` rows, from results of engine calls, if any succeeded."""
        if done:
            judge_s = sum(output.judge_s for _, output in done)
            self.note(at, judge_s, num_rows, sum(len(shares) for shares, _ in done), rounds)

    def note(self, at: Moments, judge_s: float, num_rows: int, num_sessions: int, rounds: Rounds) -> None:
        """Count a step."""
        host_s = 0.0 if at.last is None else at.began - at.last
        forward_s = at.judged - (at.planned if host_s >= 0 else max(at.planned, at.last or 0.0)) - judge_s
        seconds = (at.drafted - at.began, at.planned - at.drafted, forward_s, judge_s, host_s)
        for histogram, one in zip(self._phases.values(), seconds, strict=True):
            if one > 0:
                histogram.observe(int(one * 1e6))
        self._rows.observe(num_rows)
        self._sessions.observe(num_sessions)
        if len(rounds.nodes):
            self._kept.append((rounds.lanes, rounds.is_accepted))
        if len(self._kept) >= KEPT_STEPS:
            self._count_nodes()

    def decided(self, policy: Policy) -> list[DraftDecision]:
        """Return the drafting decisions since the last call."""
        num_before, self._num_decided = self._num_decided, sum(policy.num_decided.values())
        num_new = self._num_decided - num_before
        return list(policy.decisions)[-num_new:] if num_new else []

    def _count_nodes(self) -> None:
        """Count the nodes of the kept steps."""
        if self._kept:
            lanes, is_accepted = map(np.concatenate, zip(*self._kept, strict=True))
            self._judged += by_lane(lanes, is_accepted)
            self._kept.clear()

    def metrics(self) -> dict[str, Any]:
        """Return all counts, by their names in heartbeats."""
        self._count_nodes()
        return {
            "step_us": {name: histogram.to_list() for name, histogram in self._phases.items()},
            "step_rows": self._rows.to_list(),
            "step_sessions": self._sessions.to_list(),
            "judged": {name: self._judged[own].sum(0).tolist() for name, own in LANES_OF.items()},
        }


def verifier_metrics(meter: StepMeter, trees: DraftTrees, sources: SourceSet, policy: Policy) -> dict[str, Any]:
    """Return the counts in a verifier's heartbeat; see `specq.protocol.stats`."""
    counts, verified_at = trees.totals()
    others = {"sent": sources.num_sent, "drafts_dropped": sources.num_dropped}
    return counts | by_depth(verified_at) | meter.metrics() | others | policy.metrics()


def by_depth(verified_at: Int64Array) -> dict[str, list[int]]:
    """Return the verified and accepted nodes by depth, given i64[depths, 2].

    The lists end at the last depth with verified nodes. Deeper nodes than the array has count with its last depth.
    """
    deep = verified_at[COUNTED_DEPTHS - 1 :].sum(0)
    counted = np.concatenate([verified_at[: COUNTED_DEPTHS - 1], deep[None]])
    verified = _trimmed(counted[:, 0].tolist())
    return {"verified_at": verified, "accepted_at": counted[: len(verified), 1].tolist()}


def _trimmed(numbers: list[int]) -> list[int]:
    """Return numbers without the zeros at the end."""
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers
