"""What the tests of both clients have in common: a chat, and calls that block, whichever client it is."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from specq.client.aio import AsyncJob

CHAT = [{"role": "user", "content": "Hi"}]
PATIENCE_S = 60


def run_async(scenario):
    return asyncio.run(asyncio.wait_for(scenario, PATIENCE_S))


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE_S)
    loop.close()


class Blocking:
    """An `AsyncClient`, or a job of one, whose calls block as those of `Client`: they run to their end in a loop."""

    def __init__(self, awaited, loop):
        self._awaited, self._loop = awaited, loop

    def __getattr__(self, name):
        found = getattr(self._awaited, name)
        return (lambda *given, **named: self._settled(found(*given, **named))) if callable(found) else found

    def _wait(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def _settled(self, value):
        if inspect.isasyncgen(value):
            return self._pieces(value)
        found = self._wait(value) if inspect.iscoroutine(value) else value
        return Blocking(found, self._loop) if isinstance(found, AsyncJob) else found

    def _pieces(self, pieces):
        async def following():
            return await anext(pieces, None)

        try:
            while (piece := self._wait(following())) is not None:
                yield piece
        finally:
            self._wait(pieces.aclose())

    @property
    def model(self):
        return self._wait(self._awaited.model())

    def results(self, timeout_s=None):
        return self._within(self._awaited.results, timeout_s)

    def result(self, timeout_s=None):
        return self._within(self._awaited.result, timeout_s)

    def _within(self, wait, timeout_s):
        """Wait for a job so long, and leave it running where that is too short."""

        async def within():
            return await asyncio.wait_for(asyncio.shield(wait()), None if self._awaited.done else timeout_s)

        return self._wait(within())
