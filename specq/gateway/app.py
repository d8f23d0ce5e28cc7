"""The application: all routes behind one guard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from specq.gateway.endpoint import Parts, of_http
from specq.gateway.guard import ApiKeys, Guard, with_cors
from specq.gateway.routes.batches import batch_routes
from specq.gateway.routes.files import file_routes
from specq.gateway.routes.service import health_routes, metrics_routes, page_routes
from specq.gateway.routes.text import text_routes
from specq.gateway.routes.tokens import model_routes, token_routes


def make_app(
    parts: Parts,
    *,
    hosts: Collection[str] = (),
    keys: ApiKeys | None = None,
    most: int = 1024,
    header_bytes: int = 32_768,
    most_in_all: int = 4096,
) -> ASGIApp:
    """Return the gateway as an ASGI application; its shutdown closes the clients of its broker.

    hosts         names that clients may use for it, besides localhost and addresses.
    keys          the allowed callers; None: all.
    most          most requests of one key in progress at a time.
    header_bytes  most bytes of all headers of a request.
    most_in_all   most requests in progress at a time, of all callers.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        running = asyncio.create_task(parts.batches.runner.run()) if parts.batches else None
        yield
        if parts.batches and running:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await asyncio.to_thread(parts.batches.store.close)
        await parts.upstream.close()

    routes = [
        route
        for group in (
            *(text_routes, file_routes, batch_routes, model_routes, token_routes),
            *(health_routes, metrics_routes, page_routes),
        )
        for route in group(parts)
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: of_http})
    guarded = Guard(app, frozenset(name.lower() for name in hosts), keys, most, header_bytes, most_in_all)
    return parts.metrics.around(with_cors(guarded, parts.origins))
