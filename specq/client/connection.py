"""A client's connection to a broker, without waiting: requests go out, and each gives its events to a sink.

Rule: no method waits. A sink is called in the I/O thread (`specq.client.link`).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import orjson

from specq.client.cache import TokenizerCache
from specq.client.core import STATUS, TOKENIZER, TRACE, ClientCore
from specq.client.events import Event, StatusReport, TokenizerReady, TraceReport, answered
from specq.client.link import Action, Link, Sink
from specq.client.request import Request, ServedModel
from specq.protocol import JobError, Submit
from specq.text import TextCodec
from specq.transport import Curve


class Connection:
    """A broker, a model that it serves, and the cache for its tokenizer."""

    def __init__(
        self,
        broker: str,
        model: str,
        timeout_s: float,
        cache_dir: Path | None,
        curve: Curve | None = None,
        wait_s: float | None = None,
    ) -> None:
        self.cache, self.model, self.wait_s = TokenizerCache(cache_dir), model, wait_s
        self.link = Link(ClientCore(broker, timeout_s, self.cache.recall), curve)
        self.served: ServedModel | None = None

    def fetch_tokenizer(self, sink: Sink) -> None:
        """Ask for the tokenizer; `sink` gets one event for `take_tokenizer`, before it perhaps some `Waiting`."""
        self.link.request(TOKENIZER, sink, lambda core, now: core.fetch_tokenizer(self.model, now, self.wait_s))

    def take_tokenizer(self, event: Event) -> ServedModel:
        """Return the model; raises JobError if the event is a failure."""
        ready = answered(event, TokenizerReady)
        if "tokenizer.json" not in ready.files:
            reason = "its directory, where the verifier runs, needs the tokenizer.json that belongs to its weights"
            raise JobError(f"{ready.model.name} has no tokenizer: {reason}", "engine")
        self.cache.keep(ready.files)
        self.served = ServedModel(ready.model, TextCodec(ready.files), self.model)
        return self.served

    def fetch_status(self, sink: Sink, num_sessions: int = 0) -> None:
        """Ask for the broker's report; `sink` gets one event for `take_status`."""
        self.link.request(STATUS, sink, lambda core, now: core.get_status(now, num_sessions))

    def take_status(self, event: Event) -> dict[str, Any]:
        """Return the report; raises JobError if the event is a failure."""
        return answered(event, StatusReport).report

    def fetch_trace(self, job_id: int, sink: Sink) -> None:
        """Ask what happened to a job (0: to the last one); `sink` gets one event for `take_trace`."""
        self.link.request(TRACE, sink, lambda core, now: core.get_trace(job_id, now))

    def take_trace(self, event: Event) -> dict[str, Any]:
        """Return the trace; raises JobError if the event is a failure."""
        trace: dict[str, Any] = orjson.loads(answered(event, TraceReport).data)
        return trace

    def submit(self, request: Request, sink: Sink) -> None:
        """Send the jobs of a request; `sink` gets their events."""
        for job in request.submits:
            self.link.request(job.job_id, sink, _submission(job, request))

    def cancel(self, request: Request) -> None:
        """Stop the jobs of a request; they end with what they have."""

        def each(core: ClientCore, now: float) -> None:
            for job in request.submits:
                core.cancel(job.job_id, now)

        with contextlib.suppress(JobError):  # closed, so that they are stopped already
            self.link.call(each)

    def abandon(self, request: Request, sink: Sink) -> None:
        """Send a sink nothing more of a request; its jobs stop when nobody else waits for them, unless they shall keep
        running."""
        self.link.abandon([job.job_id for job in request.submits], sink)


def _submission(job: Submit, request: Request) -> Action:
    return lambda core, now: core.submit(job, now, keep_running=request.keep_running)
