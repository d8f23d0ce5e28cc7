"""What a verifier notes of a step for the sessions that are traced: see `specq.runtime.Tracer`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from specq.protocol import Open, trace_events
from specq.runtime import Tracer
from specq.verifier.sessions.session import Session
from specq.verifier.step.meter import Moments
from specq.verifier.step.rounds import Round, Rounds
from specq.verifier.step.shares import Shares


def trace_open(tracer: Tracer, message: Open, now: float) -> None:
    """Note that a session was opened, if it shall be traced."""
    if message.trace:
        tracer.open(message.session_id)
        tracer.note(message.session_id, trace_events.OPENED, now, len(message.token_ids), message.tokens_left)


def trace_step(tracer: Tracer, shares: Shares, rounds: Rounds, at: Moments, committed: float) -> None:
    """Note what a step did for each traced session: the part of a prompt that it computed, and the round."""
    step_us, batch = int((committed - at.began) * 1e6), shares.batch
    for i in _traced(tracer, shares.sessions):
        num_tokens = int(batch.num_tokens[i])
        if num_tokens > 1 or not batch.is_judged[i]:
            tracer.note(shares.sessions[i].session_id, trace_events.PREFILL, at.began, step_us, num_tokens)
    which = _traced(tracer, rounds.sessions)
    if which:
        for done in rounds.take(np.array(which, np.intp)):  # no objects of the others' rounds
            _trace_round(tracer, done, at, committed)


def _traced(tracer: Tracer, sessions: Sequence[Session]) -> list[int]:
    return [i for i, session in enumerate(sessions) if tracer.traces(session.session_id)]


def _trace_round(tracer: Tracer, done: Round, at: Moments, committed: float) -> None:
    stages = at.began, at.drafted, at.planned, at.judged, committed
    split_us = [int((end - start) * 1e6) for start, end in pairwise(stages)]  # wait, plan, forward, commit
    session_id, num_tokens = done.session.session_id, len(done.token_ids)
    counts = (done.base_len, num_tokens, len(done.nodes), len(done.path))
    tracer.note(session_id, trace_events.ROUND, at.began, *counts, *split_us)
    lanes, flags = done.lanes.tobytes(), done.is_accepted.tobytes()  # for a few nodes quicker than arrays
    for lane in sorted(set(lanes)):
        num_accepted = sum(flag for of, flag in zip(lanes, flags, strict=True) if of == lane)
        values = (lane, lanes.count(lane), num_accepted, done.base_len)
        tracer.note(session_id, trace_events.JUDGED, at.judged, *values)


def trace_close(tracer: Tracer, session_id: int, length: int) -> None:
    """Note that a session was closed."""
    tracer.note(session_id, trace_events.CLOSED, tracer.clock(), length)
    tracer.end(session_id)
