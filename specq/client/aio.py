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
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specq.client.core import STATUS
from specq.client.events import Event, NewTokens, RequestFailed, StatusReport
from specq.client.job import Connection, Reader
from specq.client.request import Request, Served
from specq.client.result import Piece, Result
from specq.config import DEFAULT_BROKER
from specq.config import cache_dir as default_cache_dir


class _Mailbox:
    """Events from the I/O thread, for the loop in which it was made."""

    def __init__(self) -> None:
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def put(self, event: Event) -> None:
        """Take an event, from any thread; a loop that is closed needs no more."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def put_last(self, event: Event) -> None:
        """Take an event unless it is but progress."""
        if not isinstance(event, NewTokens):
            self.put(event)

    async def get(self) -> Event:
        return await self._events.get()


class AsyncJob:
    """A job that was submitted; it runs whether or not somebody waits for it."""

    def __init__(self, client: AsyncClient, connection: Connection, request: Request, served: Served) -> None:
        self.id = request.id
        self._client = client  # a client that nobody holds any more closes
        self._connection, self._request, self._reader = connection, request, Reader(request, served)
        self._mailbox = _Mailbox()
        self._last: Event | None = None
        connection.submit(request, self._mailbox.put_last)

    async def result(self) -> Result:
        """Wait for the end; raises JobError if the job failed."""
        self._last = self._last or await self._mailbox.get()
        return self._reader.result(self._last)

    def cancel(self) -> None:
        """Stop the job; its result is what it has by then, with the finish reason "cancelled"."""
        job_id = self._request.submit.job_id
        self._connection.link.call(lambda core, _: core.cancel(job_id))


class AsyncClient:
    """A connection to a broker; arguments and errors as of `specq.Client`."""

    def __init__(
        self,
        broker: str = DEFAULT_BROKER,
        *,
        model: str = "",
        timeout_s: float = 10.0,
        cache_dir: Path | None = None,
    ) -> None:
        self._connection = Connection(broker, model, timeout_s, cache_dir or default_cache_dir())
        self._close = weakref.finalize(self, self._connection.link.close)

    # --- completions ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        token_ids: list[int] | None = None,
        **params: Any,
    ) -> Result:
        """Complete a prompt, a chat or token ids; `params` are fields of SamplingParams, and `id`."""
        arguments = {"prompt": prompt, "messages": messages, "token_ids": token_ids, **params}
        request, served = await self._prepare(arguments)
        try:
            return await AsyncJob(self, self._connection, request, served).result()
        except asyncio.CancelledError:
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
        """Yield what `generate` completes as it comes; the last piece has the result. Closing early stops the job."""
        arguments = {"prompt": prompt, "messages": messages, "token_ids": token_ids, **params}
        request, served = await self._prepare(arguments)
        reader, mailbox, ended = Reader(request, served), _Mailbox(), False
        self._connection.submit(request, mailbox.put)
        try:
            while not ended:
                event = await mailbox.get()
                ended = not isinstance(event, NewTokens)
                yield reader.piece(event)
        finally:
            if not ended:
                self._connection.abandon(request)

    async def _prepare(self, arguments: dict[str, Any]) -> tuple[Request, Served]:
        served = await self.served()
        return self._connection.prepare(served, arguments), served

    # --- the broker -------------------------------------------------------------------------------------------------

    async def served(self) -> Served:
        """Return the model and its tokenizer, fetched when first needed."""
        if self._connection.served is None:
            mailbox = _Mailbox()
            self._connection.fetch_tokenizer(mailbox.put)
            return self._connection.take_tokenizer(await mailbox.get())
        return self._connection.served

    async def status(self) -> dict[str, Any]:
        """Return the broker's report: models, workers, jobs, counters."""
        mailbox = _Mailbox()
        self._connection.link.request(STATUS, mailbox.put, lambda core, now: core.get_status(now))
        event = await mailbox.get()
        if isinstance(event, RequestFailed):
            raise event.error
        assert isinstance(event, StatusReport), "only these two answer a request for the state"
        return event.report

    async def close(self) -> None:
        """Close the connection; jobs that run are not stopped, waiting calls fail."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
