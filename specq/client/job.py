"""What the sync and the async client share: how a request is sent, and how events become pieces and results."""

from __future__ import annotations

import contextlib
from pathlib import Path

from specq.client.cache import TokenizerCache
from specq.client.core import TOKENIZER, ClientCore
from specq.client.events import Event, JobDone, NewTokens, RequestFailed, TokenizerReady
from specq.client.link import Action, Link, Sink
from specq.client.request import Request, Served
from specq.client.result import Piece, PieceMaker, Result, failed_result, make_result
from specq.protocol import BROKER_GONE, JobError, Submit
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
        self.served: Served | None = None

    def fetch_tokenizer(self, sink: Sink) -> None:
        """Ask for the tokenizer; `sink` gets one event for `take_tokenizer`, before it perhaps some `Waiting`."""
        self.link.request(TOKENIZER, sink, lambda core, now: core.fetch_tokenizer(self.model, now, self.wait_s))

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

    def submit(self, request: Request, sink: Sink) -> None:
        """Send the jobs of a request; `sink` gets their events."""
        for job in request.submits:
            self.link.request(job.job_id, sink, _submission(job))

    def cancel(self, request: Request) -> None:
        """Stop the jobs of a request; they end with what they have."""

        def each(core: ClientCore, now: float) -> None:
            for job in request.submits:
                core.cancel(job.job_id, now)

        with contextlib.suppress(JobError):  # closed, so that they are stopped already
            self.link.call(each)

    def abandon(self, request: Request) -> None:
        """Stop the jobs of a request that nobody waits for any more."""
        self.link.abandon([job.job_id for job in request.submits])


def _submission(job: Submit) -> Action:
    return lambda core, now: core.submit(job, now)


class Completions:
    """Turns the events of a request's jobs into pieces, and into results in order.

    Rule: a completion that fails harms no other. In a list its result has `error`; a single one raises JobError, and so do
    all if the broker is gone.
    """

    def __init__(self, request: Request, served: Served) -> None:
        self._request, self._codec = request, served.codec
        self._positions: dict[int | str, int] = {job.job_id: i for i, job in enumerate(request.submits)}
        self._makers = [PieceMaker(served.codec, job.params, i) for i, job in enumerate(request.submits)]
        self._ends: dict[int, JobDone | RequestFailed] = {}

    def take(self, event: Event) -> None:
        """Take in an event; only those that end a completion matter."""
        if isinstance(event, (JobDone, RequestFailed)):
            self._ends[self._positions[event.key]] = event

    @property
    def ended(self) -> bool:
        return len(self._ends) == len(self._makers)

    def piece(self, event: Event) -> Piece:
        """Take in an event and return the piece that it makes; raises JobError if a single completion failed."""
        self.take(event)
        position = self._positions[event.key]
        if isinstance(event, NewTokens):
            return self._makers[position].piece(event)
        return self._makers[position].last(self._result(position))

    def results(self) -> list[Result]:
        """Return the results in order, when all have ended; raises JobError if a single completion failed."""
        return [self._result(position) for position in range(len(self._makers))]

    def _result(self, position: int) -> Result:
        end = self._ends[position]
        if isinstance(end, JobDone):
            return make_result(self._request, position, end.transcript, self._codec)
        if (self._request.listed or self._request.in_batch) and end.error.code not in BROKER_GONE:
            return failed_result(self._request, position, str(end.error))
        raise end.error
