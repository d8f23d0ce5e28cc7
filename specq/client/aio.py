"""The client for asyncio: the same calls, awaited.

    async with specq.AsyncClient() as client:
        result = await client.generate("def add(a, b):", max_tokens=64)
        async for piece in client.stream("Once upon a time"):
            print(piece.text, end="")

The socket lives in the same I/O thread as the sync client's; events are handed to the loop that asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

from specq.client.core import STATUS
from specq.client.events import Event, RequestFailed, StatusReport, Waiting
from specq.client.job import Completions, Connection
from specq.client.link import Sink
from specq.client.request import Request, Served, is_batch, read_request, read_requests
from specq.client.result import Piece, Result
from specq.client.sync import POLL_S, missing_workers
from specq.config import DEFAULT_BROKER
from specq.config import cache_dir as default_cache_dir
from specq.protocol import JobError, ModelInfo
from specq.transport import CLIENT_ROLES, curve_to_broker


def _in_this_loop(callback: Sink) -> Sink:
    """Return a sink that hands events, from any thread, to a callback in this loop; one that is closed needs no more."""
    loop = asyncio.get_running_loop()

    def put(event: Event) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(callback, event)

    return put


class AsyncJob:
    """A prompt that was submitted; it is worked on whether or not somebody waits for it, until the client is closed.

    As of an asyncio.Task: cancelling who waits for it cancels it (asyncio.shield prevents that).
    """

    def __init__(self, client: AsyncClient, connection: Connection, request: Request, served: Served) -> None:
        self.id = request.id
        self._client = client  # a client that nobody holds any more closes
        self._connection, self._request = connection, request
        self._completions, self._ended = Completions(request, served), asyncio.Event()
        connection.submit(request, _in_this_loop(self._hear))

    def _hear(self, event: Event) -> None:
        self._completions.take(event)
        if self._completions.ended:
            self._ended.set()

    async def result(self) -> Result:
        """Wait for the end and return the only completion, or the first of several; errors as of `results`."""
        return (await self.results())[0]

    async def results(self) -> list[Result]:
        """Wait for the end of all completions and return them in order.

        Raises JobError if a job without `n` failed; with `n`, the result of a completion that failed has `error`.
        """
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._completions.results()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def cancel(self) -> None:
        """Stop all completions; each result is what it has by then, with the finish reason "cancelled"."""
        self._connection.cancel(self._request)


class AsyncClient:
    """A connection to a broker; arguments and errors as of `specq.Client`."""

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
        self._on_wait = on_wait or bool
        self._close = weakref.finalize(self, self._connection.link.close)

    # --- completions ------------------------------------------------------------------------------------------------

    @overload
    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        token_ids: list[int] | None = None,
        n: None = None,
        **params: Any,
    ) -> Result: ...
    @overload
    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        token_ids: list[int] | None = None,
        n: int,
        **params: Any,
    ) -> list[Result]: ...
    @overload
    async def generate(self, prompt: list[str], *, n: None = None, **params: Any) -> list[Result]: ...
    @overload
    async def generate(self, prompt: list[str], *, n: int, **params: Any) -> list[list[Result]]: ...
    @overload
    async def generate(self, prompt: Any = None, *, n: int | None = None, **params: Any) -> Any: ...

    async def generate(
        self,
        prompt: str | list[str] | None = None,
        *,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]] | None = None,
        token_ids: list[int] | list[list[int]] | None = None,
        n: int | None = None,
        **params: Any,
    ) -> Any:
        """Complete a prompt, a chat or token ids, or several; arguments and result as of `specq.Client.generate`."""
        arguments = {"prompt": prompt, "messages": messages, "token_ids": token_ids, "n": n, **params}
        if is_batch(arguments):
            return await self._generate_batch(arguments)
        job = AsyncJob(self, self._connection, *await self._prepare(arguments))
        results = await job.results()
        return results[0] if n is None else results

    async def _generate_batch(self, arguments: dict[str, Any]) -> list[Any]:
        served = await self.served()
        requests = read_requests(arguments, served, self._connection.model)
        try:
            jobs = [AsyncJob(self, self._connection, request, served) for request in requests]
            return [await job.results() if arguments["n"] is not None else await job.result() for job in jobs]
        except BaseException:
            for request in requests:
                self._connection.abandon(request)
            raise

    async def submit(
        self,
        prompt: str | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        token_ids: list[int] | None = None,
        **params: Any,
    ) -> AsyncJob:
        """Start what `generate` does and return at once."""
        arguments = {"prompt": prompt, "messages": messages, "token_ids": token_ids, **params}
        return AsyncJob(self, self._connection, *await self._prepare(arguments))

    async def stream(
        self,
        prompt: str | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        token_ids: list[int] | None = None,
        **params: Any,
    ) -> AsyncIterator[Piece]:
        """Yield what `generate` completes as it comes; the last piece of each completion has its result.

        Pieces of several completions come as they are made, each with its `index`. Closing early stops the jobs.
        """
        arguments = {"prompt": prompt, "messages": messages, "token_ids": token_ids, **params}
        request, served = await self._prepare(arguments)
        completions, events = Completions(request, served), asyncio.Queue[Event]()
        self._connection.submit(request, _in_this_loop(events.put_nowait))
        try:
            while not completions.ended:
                yield completions.piece(await events.get())
        finally:
            if not completions.ended:
                self._connection.abandon(request)

    async def _prepare(self, arguments: dict[str, Any]) -> tuple[Request, Served]:
        served = await self.served()
        return read_request(arguments, served, self._connection.model), served

    # --- the broker -------------------------------------------------------------------------------------------------

    async def served(self) -> Served:
        """Return the model and its tokenizer, fetched when first needed."""
        if self._connection.served is None:
            events = asyncio.Queue[Event]()
            self._connection.fetch_tokenizer(_in_this_loop(events.put_nowait))
            while isinstance(event := await events.get(), Waiting):
                self._on_wait(event.what)
            return self._connection.take_tokenizer(event)
        return self._connection.served

    async def model(self) -> ModelInfo:
        """Return what is known of the model that is served."""
        return (await self.served()).info

    async def status(self) -> dict[str, Any]:
        """Return the broker's report: models, workers, jobs, counters."""
        events = asyncio.Queue[Event]()
        sink = _in_this_loop(events.put_nowait)
        self._connection.link.request(STATUS, sink, lambda core, now: core.get_status(now))
        event = await events.get()
        if isinstance(event, RequestFailed):
            raise event.error
        assert isinstance(event, StatusReport), "only these two answer a request for the state"
        return event.report

    async def wait_until_ready(self, *, num_targets: int = 1, num_drafters: int = 0, timeout_s: float = 60.0) -> None:
        """Wait until so many workers are ready; raises JobError (`no_broker`, `no_verifier`) after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while missing := missing_workers(await self.status(), num_targets, num_drafters):
            if time.monotonic() > deadline:
                raise JobError(f"after {timeout_s:g} s only {missing} are ready", "no_verifier")
            await asyncio.sleep(POLL_S)

    async def leave(self) -> None:
        """Close the connection, but let jobs run on: submitted again under its id, each is the job that there is."""
        await asyncio.get_running_loop().run_in_executor(None, self._connection.link.leave)

    async def close(self) -> None:
        """Close the connection; jobs that run are stopped, waiting calls fail."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
