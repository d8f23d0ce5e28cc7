"""The common part of `Client` and `AsyncClient`: all calls, written once as coroutines.

`AsyncClient` awaits them. `Client` runs each to its end with `run`. Its inboxes and jobs block the thread where those
of `AsyncClient` suspend the task. So a coroutine of `Client` never suspends.

To add a call, add a coroutine here. Then add a method to `specq.client.sync` and to `specq.client.aio` that passes its
arguments on. Rule: only methods in these two modules may wait (`_inbox`, `_results`, `_sleep`).
"""

from __future__ import annotations

import contextlib
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from specq.client.completions import Completions, read_requests
from specq.client.events import AwaitedModel, Event, NewTokens
from specq.client.link import Connection
from specq.client.request import Request, ServedModel, read_request
from specq.client.result import Piece, Result
from specq.config import DEFAULT_BROKER
from specq.config import cache_dir as default_cache_dir
from specq.protocol import JobError
from specq.transport import CLIENT_ROLES, curve_to_broker

POLL_S = 0.1
T = TypeVar("T")


class EventInbox(Protocol):
    """The events of a request, in order. Any thread may call `put`."""

    def put(self, event: Event, /) -> None: ...
    async def get(self) -> Event: ...


class Flag(Protocol):
    """The end of a job. Any thread may call `set`."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...


class BaseJob:
    """A submitted prompt. It runs, awaited or not, until the client is closed."""

    def __init__(self, client: BaseClient, request: Request, served: ServedModel, ended: Flag) -> None:
        self.id = request.id
        self._client = client  # keeps the client open as long as one of its jobs is referenced
        self._connection, self._request = client._connection, request  # noqa: SLF001 - they are one thing
        self._completions, self._ended_flag = Completions(request, served), ended
        self._connection.submit(request, self._take)

    def _take(self, event: Event) -> None:
        """Handle an event, in the I/O thread."""
        self._completions.take(event)
        if self._completions.ended:
            self._ended_flag.set()

    @property
    def done(self) -> bool:
        return self._ended_flag.is_set()

    def abandon(self) -> None:
        """Stop waiting for the job. It stops if no other caller waits for it, unless `keep_running` is set."""
        self._connection.abandon(self._request, self._take)

    def _give_up(self) -> None:
        """End the job, or leave it running, when the caller stops waiting."""
        if self._request.keep_running:
            self.abandon()
        else:
            self.cancel()

    def cancel(self) -> None:
        """Stop all completions. Each result holds the tokens so far and has the finish reason "cancelled"."""
        self._connection.cancel(self._request)


class PieceStream:
    """The pieces of some requests as they arrive.

    Closing the stream early stops the jobs, unless `keep_running` is set.
    """

    def __init__(
        self,
        connection: Connection,
        requests: Sequence[Request],
        served: ServedModel,
        inbox: EventInbox,
        known: Sequence[int] = (),
    ) -> None:
        """Take the connection, the requests, and the number of tokens that the reader has already.

        known  number of tokens per completion, in order.
        """
        self._connection, self._requests, self._inbox = connection, requests, inbox
        self._last: NewTokens | None = None  # tokens held back because their job ends with the next event
        self._completions: dict[int | str, Completions] = {}  # by job
        left = list(known)
        for place, request in enumerate(requests):
            count = len(request.submits)
            completions = Completions(request, served, place, left[:count])
            self._completions |= {job.job_id: completions for job in request.submits}
            del left[:count]
        for request in requests:
            connection.submit(request, inbox.put)

    @property
    def ended(self) -> bool:
        return all(completions.ended for completions in self._completions.values())

    async def piece(self) -> Piece:
        """Wait for the next piece; raise JobError if a single completion failed."""
        if self._last is None:
            event = await self._inbox.get()
            if not (isinstance(event, NewTokens) and event.ends):
                return self._completions[event.key].piece(event)
            self._last = event
        end = await self._inbox.get()
        last, self._last = self._last, None
        return self._completions[end.key].piece(end, last)

    def close(self) -> None:
        """Stop the jobs that still run."""
        for request in self._requests:
            if not all(self._completions[job.job_id].ended for job in request.submits):
                self._connection.abandon(request, self._inbox.put)


class BaseClient(ABC):
    """A connection to a broker. The parameters and errors are those of `specq.Client`."""

    _lock_type: Callable[[], contextlib.AbstractAsyncContextManager[Any]]  # of the lock of the tokenizer's fetch

    def __init__(
        self,
        broker: str = DEFAULT_BROKER,
        *,
        model: str = "",
        timeout_s: float = 10.0,
        cache_dir: Path | None = None,
        keys: str | Path = "",
        wait_s: float | None = None,
        on_wait: Callable[[str], object] | None = None,
    ) -> None:
        curve = curve_to_broker(str(keys), *CLIENT_ROLES)
        self._connection = Connection(broker, model, timeout_s, cache_dir or default_cache_dir(), curve, wait_s)
        self._on_wait, self._lock = on_wait or bool, self._lock_type()
        self._close = weakref.finalize(self, self._connection.link.close)

    # --- defined by each kind of client -----------------------------------------------------------------------------

    @abstractmethod
    def _inbox(self) -> EventInbox: ...

    @abstractmethod
    def _job(self, request: Request, served: ServedModel) -> Any:
        """Submit a request and return the client's kind of job."""

    @abstractmethod
    async def _results(self, job: Any) -> list[Result]:
        """Wait for the end of a job of this client's kind."""

    @abstractmethod
    async def _sleep(self, seconds: float) -> None: ...

    # --- common to both ---------------------------------------------------------------------------------------------

    async def _generate(self, arguments: dict[str, Any]) -> Any:
        """Complete a prompt or a list of prompts. A failure of the whole call stops all its jobs."""
        requests, served = await self._read_all(arguments)
        found = await self._run(requests, served)
        answers = [_answer(request, results) for request, results in zip(requests, found, strict=True)]
        is_single = len(requests) == 1 and not requests[0].in_batch
        return answers[0] if is_single else answers

    async def _run(self, requests: Sequence[Request], served: ServedModel) -> list[list[Result]]:
        """Return the results of each request. A failure of a request that is not in a list stops all."""
        jobs: list[Any] = []
        try:
            jobs.extend(self._job(request, served) for request in requests)
            return [await self._results(job) for job in jobs]
        except BaseException:
            for job in jobs:
                job.abandon()
            raise

    async def _submit(self, arguments: dict[str, Any]) -> Any:
        return self._job(*await self._read(arguments))

    async def _read(self, arguments: dict[str, Any]) -> tuple[Request, ServedModel]:
        """Return the request of one prompt, and the model against which it was checked."""
        served = await self._get_served()
        return read_request(arguments, served), served

    async def _read_all(self, arguments: dict[str, Any]) -> tuple[list[Request], ServedModel]:
        """Return the requests of one or more prompts, and the model they were checked against."""
        served = await self._get_served()
        return read_requests(arguments, served), served

    def _open_stream(self, requests: Sequence[Request], served: ServedModel, known: Sequence[int]) -> PieceStream:
        return PieceStream(self._connection, requests, served, self._inbox(), known)

    async def _get_served(self) -> ServedModel:
        """Return the model and its tokenizer. The first call fetches them."""
        if (served := self._connection.served) is not None:
            return served
        async with self._lock:
            if (served := self._connection.served) is not None:  # another caller has fetched it
                return served
            inbox = self._inbox()
            self._connection.fetch_tokenizer(inbox.put)
            while isinstance(event := await inbox.get(), AwaitedModel):
                self._on_wait(event.what)
            return self._connection.take_tokenizer(event)

    async def _get_status(self, num_sessions: int = 0) -> dict[str, Any]:
        inbox = self._inbox()
        self._connection.fetch_status(inbox.put, num_sessions)
        return self._connection.take_status(await inbox.get())

    async def _get_trace(self, job_id: int) -> dict[str, Any]:
        inbox = self._inbox()
        self._connection.fetch_trace(job_id, inbox.put)
        return self._connection.take_trace(await inbox.get())

    async def _wait_until_ready(self, num_targets: int, num_drafters: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while missing := missing_workers(await self._get_status(), num_targets, num_drafters):
            if time.monotonic() > deadline:
                raise JobError(f"after {timeout_s:g} s only {missing} are ready", "no_verifier")
            await self._sleep(POLL_S)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that blocks and never suspends; return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError("a coroutine of the blocking client was suspended")


def _answer(request: Request, results: list[Result]) -> Result | list[Result]:
    return results if request.listed else results[0]


def count_ready(report: dict[str, Any]) -> tuple[int, int]:
    """Return how many targets and drafters are ready in a status report."""
    roles = [worker.get("role") for worker in report.get("workers", []) if worker.get("state") == "ready"]
    return roles.count("target"), roles.count("draft")


def missing_workers(report: dict[str, Any], num_targets: int, num_drafters: int) -> str:
    """Return "" if enough workers are ready in a status report, else their numbers as text."""
    targets, drafters = count_ready(report)
    if targets >= num_targets and drafters >= num_drafters:
        return ""
    return f"{targets} of {num_targets} targets and {drafters} of {num_drafters} drafters"
