"""Handlers of what clients and workers say and ask of traces and clocks: see `specq.broker.traces`."""

from __future__ import annotations

import numpy as np
import orjson

from specq.broker.state import BrokerState
from specq.broker.traces import MOST_TRACES, TracedJob
from specq.protocol import Clock, GetClock, GetTrace, Trace, TraceEvents, trace_events


class Tracing:
    """The broker's clock for whoever asks, events in, traces out."""

    def __init__(self, state: BrokerState) -> None:
        self.state = state

    def clock(self, identity: bytes, message: GetClock) -> None:
        """Answer with the time of the broker's clock."""
        clock_us = int(self.state.clock.now * 1e6)
        self.state.outbox.send_front(identity, Clock(echo_us=message.sent_us, clock_us=clock_us))

    def take(self, identity: bytes, message: TraceEvents) -> None:
        """Take in what another process noted of a job."""
        trace_events.check(message)
        if not self.state.traces.take(identity, message):
            self.state.counts["late_traces"] += 1

    def ask(self, client: bytes, message: GetTrace) -> None:
        """Answer with a job's trace, or why there is none."""
        job = self._find(client, message.job_id)
        if job is None:
            which = f"of job {message.job_id}" if message.job_id else "of any job of yours"
            reason = f"there is no trace {which}: this broker has those of the last {MOST_TRACES} jobs since it started"
            answer = Trace(job_id=message.job_id, reason=reason)
        else:
            data = np.frombuffer(orjson.dumps(job.report()), np.uint8)
            answer = Trace(job_id=message.job_id, reason="", data=data)
        self.state.outbox.send_front(client, answer)

    def _find(self, client: bytes, job_id: int) -> TracedJob | None:
        """Return the job that somebody may know of; without an id, the last one."""
        found = self.state.traces.find(job_id)
        jobs = self.state.traces.newest_first() if not job_id else [found] if found is not None else []
        return next((job for job in jobs if self.state.roles.sees(client, job.owner)), None)
