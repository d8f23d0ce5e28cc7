"""The client for asyncio in two steps, for whoever serves others: requests are read first, and sent later.

Rule: `read_requests` may run in a thread, so that a long prompt holds up nobody; what is sent here is sent at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from specq.client.aio import AsyncClient
from specq.client.base import PieceStream
from specq.client.request import Request, ServedModel
from specq.client.result import Result


class PreparedClient(AsyncClient):
    """A connection to a broker; arguments and errors as of `specq.Client`."""

    async def run(self, requests: Sequence[Request], served: ServedModel) -> list[list[Result]]:
        """Return the results of each request; errors as of `generate`."""
        return await self._run(requests, served)

    def open_stream(self, requests: Sequence[Request], served: ServedModel, known: Sequence[int] = ()) -> PieceStream:
        """Start requests and return their pieces; `known` as `resume_from` of `stream`. The caller closes it."""
        return self._open_stream(requests, served, known)
