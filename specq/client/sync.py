"""The client for ordinary code: calls block until there is something to return.

    with specq.Client("tcp://127.0.0.1:5750") as client:
        print(client.generate("def add(a, b):", max_tokens=64).text)
        for piece in client.stream(messages=[{"role": "user", "content": "Why is the sky blue?"}]):
            print(piece.text, end="")

A client may be used by several threads at once.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

from specq.client.core import STATUS
from specq.client.events import Event, NewTokens, RequestFailed, StatusReport
from specq.client.job import Connection, Reader
from specq.client.request import Request, Served
from specq.client.result import Piece, Result
from specq.config import DEFAULT_BROKER
from specq.config import cache_dir as default_cache_dir
from specq.errors import JobError
from specq.types import ModelInfo

_POLL_S = 0.1


class Job:
    """A job that was submitted; it runs whether or not somebody waits for it."""

    def __init__(self, client: Client, connection: Connection, request: Request) -> None:
        self.id = request.id
        self._client = client  # a client that nobody holds any more closes
        self._connection, self._request, self._reader = connection, request, Reader(request, client.served)
        self._ended: SimpleQueue[Event] = SimpleQueue()
        self._last: Event | None = None
        connection.submit(request, self._hear)

    def _hear(self, event: Event) -> None:
        if not isinstance(event, NewTokens):
            self._ended.put(event)

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the end; raises JobError if the job failed, TimeoutError if it runs on after `timeout_s`."""
        try:
            self._last = self._last or self._ended.get(timeout=timeout_s)
        except Empty:
            raise TimeoutError(f"job {self.id} runs on after {timeout_s} s") from None
        return self._reader.result(self._last)

    @property
    def done(self) -> bool:
        return self._last is not None or not self._ended.empty()

    def cancel(self) -> None:
        """Stop the job; its result is what it has by then, with the finish reason "cancelled"."""
        job_id = self._request.submit.job_id
        self._connection.link.call(lambda core, _: core.cancel(job_id))


class Client:
    """A connection to a broker.

    broker     address of the broker
    model      name of a served model; "": the only one
    timeout_s  silence of the broker after which a call fails with JobError (code `no_broker`, or `lost` if it had
               answered before)
    cache_dir  where large tokenizers are kept; None: SPECQ_CACHE, or specq in the user's cache

    Every method raises JobError; its `code` and message say why. Leaving the block by Ctrl-C stops all jobs.
    """

    def __init__(
        self,
        broker: str = DEFAULT_BROKER,
        *,
        model: str = "",
        timeout_s: float = 10.0,
        cache_dir: Path | None = None,
    ) -> None:
        self._connection = Connection(broker, model, timeout_s, cache_dir or default_cache_dir())
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, self._connection.link.close)

    # --- completions ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        token_ids: list[int] | None = None,
        **params: Any,
    ) -> Result:
        """Complete a prompt, a chat or token ids; `params` are fields of SamplingParams, and `id`."""
        request = self._prepare(prompt=prompt, messages=messages, token_ids=token_ids, **params)
        try:
            return Job(self, self._connection, request).result()
        except KeyboardInterrupt:
            self._connection.abandon(request)
            raise

    def submit(
        self,
        prompt: str | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        token_ids: list[int] | None = None,
        **params: Any,
    ) -> Job:
        """Start what `generate` does and return at once."""
        request = self._prepare(prompt=prompt, messages=messages, token_ids=token_ids, **params)
        return Job(self, self._connection, request)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        token_ids: list[int] | None = None,
        **params: Any,
    ) -> Iterator[Piece]:
        """Yield what `generate` completes as it comes; the last piece has the result. Closing early stops the job."""
        request = self._prepare(prompt=prompt, messages=messages, token_ids=token_ids, **params)
        return self._pieces(request)

    def _pieces(self, request: Request) -> Iterator[Piece]:
        reader, events = Reader(request, self.served), SimpleQueue[Event]()
        self._connection.submit(request, events.put)
        ended = False
        try:
            while not ended:
                event = events.get()
                ended = not isinstance(event, NewTokens)
                yield reader.piece(event)
        finally:
            if not ended:
                self._connection.abandon(request)

    def _prepare(self, **arguments: Any) -> Request:
        return self._connection.prepare(self.served, arguments)

    # --- the broker -------------------------------------------------------------------------------------------------

    @property
    def served(self) -> Served:
        """The model and its tokenizer, fetched when first needed."""
        with self._lock:
            if self._connection.served is None:
                events: SimpleQueue[Event] = SimpleQueue()
                self._connection.fetch_tokenizer(events.put)
                self._connection.take_tokenizer(events.get())
            assert self._connection.served is not None
            return self._connection.served

    @property
    def model(self) -> ModelInfo:
        """What is known of the model that is served."""
        return self.served.info

    def status(self) -> dict[str, Any]:
        """Return the broker's report: models, workers, jobs, counters."""
        events: SimpleQueue[Event] = SimpleQueue()
        self._connection.link.request(STATUS, events.put, lambda core, now: core.get_status(now))
        event = events.get()
        if isinstance(event, RequestFailed):
            raise event.error
        assert isinstance(event, StatusReport)
        return event.report

    def wait_until_ready(self, *, num_targets: int = 1, num_drafters: int = 0, timeout_s: float = 60.0) -> None:
        """Wait until so many workers are ready; raises JobError (`no_broker`, `no_verifier`) after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            targets, drafters = count_ready(self.status())
            if targets >= num_targets and drafters >= num_drafters:
                return
            if time.monotonic() > deadline:
                found = f"{targets} of {num_targets} targets and {drafters} of {num_drafters} drafters"
                raise JobError(f"after {timeout_s:g} s only {found} are ready", "no_verifier")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Close the connection; jobs that run are not stopped, waiting calls fail."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is KeyboardInterrupt:
            self._connection.link.call(lambda core, _: core.abandon_all())
        self.close()


def count_ready(report: dict[str, Any]) -> tuple[int, int]:
    """Return how many targets and drafters a status report calls ready."""
    roles = [worker.get("role") for worker in report.get("workers", []) if worker.get("state") == "ready"]
    return roles.count("target"), roles.count("draft")
