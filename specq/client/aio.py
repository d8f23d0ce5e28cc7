"""The client for asyncio: the same calls, awaited.

    async with specq.AsyncClient() as client:
        result = await client.generate("def add(a, b):", max_tokens=64)
        async for piece in client.stream("Once upon a time"):
            print(piece.text, end="")

`specq.client.base` implements the calls. The socket belongs to an I/O thread, as it does for `Client`. This thread
passes events to the caller's loop.

`PreparedClient` is for a gateway. It splits a call into two steps: read the requests first, send them later.

Rule: `read_requests` may run in a thread. So a long prompt does not block the loop. The methods here send at once.
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
    """Calls functions in the loop in which it was created, from any thread. It drops calls when the loop is closed."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


class _Inbox:
    """The events of a request, read by a task."""

    def __init__(self) -> None:
        self._in_loop, self._events = _InLoop(), asyncio.Queue[Event]()

    def put(self, event: Event, /) -> None:
        self._in_loop.call(self._events.put_nowait, event)

    async def get(self) -> Event:
        return await self._events.get()


class _Flag:
    """The end of a job, awaited by tasks."""

    def __init__(self) -> None:
        self._in_loop, self._event = _InLoop(), asyncio.Event()
        self.is_set, self.wait = self._event.is_set, self._event.wait

    def set(self) -> None:
        self._in_loop.call(self._event.set)


class _TaskLock:
    """A lock for the tasks of a loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a lock belongs to the first loop in which a task waited for it
            self._loop, self._lock = loop, asyncio.Lock()
        await self._lock.acquire()

    async def __aexit__(self, *error: object) -> None:
        self._lock.release()


class AsyncJob(BaseJob):
    """A submitted prompt. It runs, awaited or not, until the client is closed.

    As with an asyncio.Task, cancelling the task that awaits the job cancels the job. `asyncio.shield` prevents that.
    """

    def __init__(self, client: AsyncClient, request: Request, served: ServedModel) -> None:
        self._ended = _Flag()
        super().__init__(client, request, served, self._ended)

    async def result(self) -> Result:
        """Wait for the end and return the only completion, or the first of several.

        Raises the errors of `results`.
        """
        return (await self.results())[0]

    async def results(self) -> list[Result]:
        """Wait for the end of all completions and return them in order.

        Raises JobError if a job without `n` failed. With `n`, the result of a failed completion has `error`.
        """
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            self._give_up()
            raise
        return self._completions.results()


class AsyncClient(BaseClient):
    """A connection to a broker, for asyncio.

        async with specq.AsyncClient("tcp://127.0.0.1:5750") as client:
            result = await client.generate("def add(a, b):", max_tokens=64)

    The parameters and errors are those of `specq.Client`.
    """

    _lock_type = _TaskLock  # one of several tasks fetches the tokenizer, the others wait

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
        """Complete a prompt, a chat or token ids, or a list.

        The arguments, the result and the errors are those of `specq.Client.generate`.
        """
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
        """Start the work of `generate` and return at once."""
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
        """Yield the completion piece by piece, as `specq.Client.stream` does."""
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
        """Return the name and the limits of the served model."""
        return (await self.served()).info

    async def status(self, *, sessions: int = 0) -> dict[str, Any]:
        """Return the broker's report: models, workers, jobs, counters, and the `sessions` busiest sessions."""
        return await self._get_status(sessions)

    async def trace(self, job_id: int = 0) -> dict[str, Any]:
        """Return the events of a job in all processes; 0 means the last job. See docs/live_view.md."""
        return await self._get_trace(job_id)

    async def wait_until_ready(self, *, num_targets: int = 1, num_drafters: int = 0, timeout_s: float = 60.0) -> None:
        """Wait until this many workers are ready.

        Raises JobError (`no_broker`, `no_verifier`) after `timeout_s` seconds.
        """
        await self._wait_until_ready(num_targets, num_drafters, timeout_s)

    async def leave(self) -> None:
        """Close the connection, but let jobs run.

        A later submission with the same job id joins the running job.
        """
        await asyncio.get_running_loop().run_in_executor(None, self._connection.link.leave)

    async def close(self) -> None:
        """Close the connection. Running jobs stop and waiting calls fail."""
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
    """A connection to a broker for gateways, in two steps.

    The parameters and errors are those of `specq.Client`.
    """

    async def run(self, requests: Sequence[Request], served: ServedModel) -> list[list[Result]]:
        """Return the results of each request, with the errors of `generate`."""
        return await self._run(requests, served)

    def stop(self, requests: Sequence[Request]) -> None:
        """Stop the jobs of running requests, also those with `keep_running`."""
        for request in requests:
            self._connection.cancel(request)

    def open_stream(self, requests: Sequence[Request], served: ServedModel, known: Sequence[int] = ()) -> PieceStream:
        """Start requests and return their pieces.

        known  as `resume_from` of `stream`.

        The caller closes the stream.
        """
        return self._open_stream(requests, served, known)
