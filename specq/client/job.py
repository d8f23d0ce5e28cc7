"""What the sync and the async client share: how a request is prepared, and how events become pieces and results."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from specq.client.cache import TokenizerCache
from specq.client.core import TOKENIZER, ClientCore
from specq.client.events import Event, JobDone, NewTokens, RequestFailed, TokenizerReady
from specq.client.link import Link, Sink
from specq.client.request import SOURCES, Request, Served, build_request
from specq.client.result import Piece, PieceMaker, Result, make_result
from specq.errors import JobError
from specq.text import TextCodec

_SOURCE_KEYS = (*SOURCES, "id")


class Connection:
    """A broker, a model that it serves, and the cache for its tokenizer."""

    def __init__(self, broker: str, model: str, timeout_s: float, cache_dir: Path | None) -> None:
        self.cache, self.model = TokenizerCache(cache_dir), model
        self.link = Link(ClientCore(broker, timeout_s, self.cache.recall))
        self.served: Served | None = None

    def fetch_tokenizer(self, sink: Sink) -> None:
        """Ask for the tokenizer; `sink` gets one event, for `take_tokenizer`."""
        self.link.request(TOKENIZER, sink, lambda core, now: core.fetch_tokenizer(self.model, now))

    def take_tokenizer(self, event: Event) -> Served:
        """Return the model; raises JobError if the event is a failure."""
        if isinstance(event, RequestFailed):
            raise event.error
        assert isinstance(event, TokenizerReady), "only these two answer a request for a tokenizer"
        if "tokenizer.json" not in event.files:
            raise JobError(f"{event.model.name} has no tokenizer that it could hand out", "engine")
        self.cache.keep(event.files)
        self.served = Served(event.model, TextCodec(event.files))
        return self.served

    def prepare(self, served: Served, arguments: dict[str, Any]) -> Request:
        """Build a request of a user's arguments: one source, optionally an id, sampling parameters."""
        source = {name: value for name, value in arguments.items() if name in _SOURCE_KEYS and value is not None}
        values = {name: value for name, value in arguments.items() if name not in _SOURCE_KEYS}
        return build_request(source, values, served, self.model)

    def submit(self, request: Request, sink: Sink) -> None:
        """Send a job; `sink` gets its events."""
        job = request.submit
        self.link.request(job.job_id, sink, lambda core, now: core.submit(job, now))

    def abandon(self, request: Request) -> None:
        """Stop a job that nobody waits for any more."""
        with contextlib.suppress(JobError):  # closed: nothing is left to stop
            self.link.call(lambda core, _: core.abandon(request.submit.job_id))


class Reader:
    """Turns the events of one job into pieces, the last with the result."""

    def __init__(self, request: Request, served: Served) -> None:
        self._request, self._served = request, served
        self._maker = PieceMaker(served.codec, request.submit.params.stop)

    def piece(self, event: Event) -> Piece:
        """Return the piece that an event makes; raises JobError if the job failed."""
        if isinstance(event, NewTokens):
            return self._maker.piece(event)
        return self._maker.last(self.result(event))

    def result(self, event: Event) -> Result:
        """Return the result of the event that ended the job; raises JobError if the job failed."""
        if isinstance(event, RequestFailed):
            raise event.error
        assert isinstance(event, JobDone), "a job ends in these two ways"
        return make_result(self._request, event.transcript, self._served.codec)
