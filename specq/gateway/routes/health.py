"""`/health`: the gateway runs. `/ready`: it reaches a broker with a verifier. `/version`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specq import __version__
from specq.gateway.endpoint import Parts, endpoint
from specq.gateway.errors import ApiError
from specq.gateway.replies import json_response
from specq.gateway.upstream import READY_S
from specq.protocol import JobError


def routes(parts: Parts) -> list[Route]:
    """Return the routes."""
    handlers = {"/health": _health, "/ready": _ready, "/version": _version}
    return [Route(path, endpoint(parts, handler), methods=["GET"]) for path, handler in handlers.items()]


async def _health(parts: Parts, request: Request) -> Response:
    return json_response({"status": "ok"})


async def _ready(parts: Parts, request: Request) -> Response:
    try:
        report = await parts.upstream.report(READY_S)
    except (TimeoutError, JobError):
        raise ApiError("the broker does not answer", 503, code="no_broker") from None
    if not report["models"]:
        raise ApiError("no verifier is registered with the broker", 503, code="no_verifier")
    return json_response({"status": "ready"})


async def _version(parts: Parts, request: Request) -> Response:
    return json_response({"version": __version__})
