"""The client for asyncio: the same calls, awaited.

    async with specq.AsyncClient() as client:
        result = await client.generate("def add(a, b):", max_tokens=64)
        async for piece in client.stream("Once upon a time"):
            print(piece.text, end="")

What the calls do is in `specq.client.base`. The socket lives in the same I/O thread as that of `Client`; events go from
there to the loop of the caller.

The client for asyncio in two steps, for whoever serves others: requests are read first, and sent later.

Rule: `read_requests` may run in a thread, so that a long prompt holds up nobody; what is sent here is sent at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, overload

from specq.client.base import BaseClient, BaseJob, PieceStream
from specq.client.events import Event
from specq.client.request import Request, ServedModel
from specq.client.result import Piece, Result
from specq.protocol import ModelInfo


class _InLoop:
    """Calls functions in the loop that it was made in, from any thread; a loop that is closed needs no more calls."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


class _Inbox:
    """Events of a request, whose reader is a task."""

    def __init__(self) -> None:
        self._in_loop, self._events = _InLoop(), asyncio.Queue[Event]()

    def put(self, event: Event, /) -> None:
        self._in_loop.call(self._events.put_nowait, event)

    async def get(self) -> Event:
        return await self._events.get()


class _Flag:
    """The end of a job, for which tasks wait."""

    def __init__(self) -> None:
        self._in_loop, self._event = _InLoop(), asyncio.Event()
        self.is_set, self.wait = self._event.is_set, self._event.wait

    def set(self) -> None:
        self._in_loop.call(self._event.set)


class _TaskLock:
    """A lock of the tasks of a loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a lock belongs to the loop in which somebody has waited for it
            self._loop, self._lock = loop, asyncio.Lock()
        await self._lock.acquire()

    async def __aexit__(self, *error: object) -> None:
        self._lock.release()


class AsyncJob(BaseJob):
    """A prompt that was submitted. It runs whether or not the caller waits for it, until the client is closed.

    As with an asyncio.Task, cancelling the task that waits for it cancels it (asyncio.shield prevents that).
    """

    def __init__(self, client: AsyncClient, request: Request, served: ServedModel) -> None:
        self._ended = _Flag()
        super().__init__(client, request, served, self._ended)

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
            self._give_up()
            raise
        return self._completions.results()


class AsyncClient(BaseClient):
    """A connection to a broker; arguments and errors as of `specq.Client`."""

    _lock_type = _TaskLock  # of several tasks one fetches the tokenizer

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
        return await self._generate(arguments)

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
        job: AsyncJob = await self._submit(arguments)
        return job

    async def stream(
        self,
        prompt: str | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        token_ids: list[int] | None = None,
        resume_from: Sequence[int] = (),
        **params: Any,
    ) -> AsyncIterator[Piece]:
        """Yield what `generate` completes as it comes; as of `specq.Client.stream`."""
        arguments = {"prompt": prompt, "messages": messages, "token_ids": token_ids, **params}
        stream = self._open_stream(*await self._read_all(arguments), resume_from)
        try:
            while not stream.ended:
                yield await stream.piece()
        finally:
            stream.close()

    # --- the broker -------------------------------------------------------------------------------------------------

    async def served(self) -> ServedModel:
        """Return the model and its tokenizer, fetched when first needed."""
        return await self._get_served()

    async def model(self) -> ModelInfo:
        """Return the model that is served: its name and limits."""
        return (await self.served()).info

    async def status(self, *, sessions: int = 0) -> dict[str, Any]:
        """Return the broker's report: models, workers, jobs, counters, and so many of the busiest sessions."""
        return await self._get_status(sessions)

    async def trace(self, job_id: int = 0) -> dict[str, Any]:
        """Return what happened to a job (0: to the last one), through all processes: see docs/live_view.md."""
        return await self._get_trace(job_id)

    async def wait_until_ready(self, *, num_targets: int = 1, num_drafters: int = 0, timeout_s: float = 60.0) -> None:
        """Wait until this many workers are ready; raises JobError (`no_broker`, `no_verifier`) after `timeout_s`."""
        await self._wait_until_ready(num_targets, num_drafters, timeout_s)

    async def leave(self) -> None:
        """Close the connection, but let jobs run; a job that is submitted again under its id is the job that there
        is."""
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

    # --- how it waits -----------------------------------------------------------------------------------------------

    def _inbox(self) -> _Inbox:
        return _Inbox()

    def _job(self, request: Request, served: ServedModel) -> AsyncJob:
        return AsyncJob(self, request, served)

    async def _results(self, job: AsyncJob) -> list[Result]:
        return await job.results()

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class PreparedClient(AsyncClient):
    """A connection to a broker; arguments and errors as of `specq.Client`."""

    async def run(self, requests: Sequence[Request], served: ServedModel) -> list[list[Result]]:
        """Return the results of each request; errors as of `generate`."""
        return await self._run(requests, served)

    def open_stream(self, requests: Sequence[Request], served: ServedModel, known: Sequence[int] = ()) -> PieceStream:
        """Start requests and return their pieces; `known` as `resume_from` of `stream`. The caller closes it."""
        return self._open_stream(requests, served, known)
