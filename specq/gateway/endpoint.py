"""The common part of all endpoints: shared objects, and errors in the format of the path's API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
from starlette.requests import Request
from starlette.responses import Response

from specq.batches import BatchRunner, BatchStore
from specq.gateway.errors import OUR_FAULT, ApiError, of_job
from specq.gateway.metrics import Metrics
from specq.gateway.replies import BodyLimits, ClientGoneError, error_response
from specq.gateway.serving import Upstream
from specq.protocol import JobError
from specq.runtime import traced

log = structlog.get_logger(__name__)

CLIENT_GONE = 499  # no client sees it; logs of web servers use this status
_NOT_SERVED = {  # paths of OpenAI's API, and below, that have no route here
    "/v1/embeddings": "embeddings",
    "/v1/moderations": "moderations",
    "/v1/images": "images",
    "/v1/audio": "audio",
    "/v1/fine_tuning": "fine-tuning over HTTP; `specq train` trains what drafts",
    "/v1/assistants": "assistants",
    "/v1/threads": "threads",
}


@dataclass(frozen=True, slots=True)
class Batching:
    """The store of files and batches, and the loop that runs them."""

    store: BatchStore
    runner: BatchRunner


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects that the endpoints use.

    batches  None: batches are off.
    origins  the pages that a browser lets through to the gateway; `*`: all.
    """

    upstream: Upstream
    limits: BodyLimits
    metrics: Metrics = field(default_factory=Metrics)
    batches: Batching | None = None
    origins: tuple[str, ...] = ()


Handler = Callable[[Parts, Request], Awaitable[Response]]


def endpoint(parts: Parts, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler in Starlette's form."""

    async def call(request: Request) -> Response:
        path = request.url.path
        try:
            return await handler(parts, request)
        except ApiError as error:
            return error_response(error, path)
        except JobError as error:
            return error_response(of_job(error), path)
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:  # noqa: BLE001 - one request's fault is nobody else's
            log.error(  # noqa: TRY400 - `traced`, since the message may quote what a user sent
                "request_failed", path=path, **traced(error)
            )
            return error_response(ApiError(OUR_FAULT, 500), path)

    return call


def of_http(request: Request, error: Any) -> Response:
    """Return Starlette's own refusals (unknown path, wrong method) in the format of the path's API."""
    path = request.url.path
    what = _NOT_SERVED.get("/".join(path.split("/")[:3]))
    said = f"specq has no {what}" if what else error.detail
    message = f"{said}: {request.method} {path[:200]}"
    return error_response(ApiError(message, error.status_code, headers=error.headers or {}), path)
