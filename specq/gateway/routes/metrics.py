"""`/metrics`, for Prometheus."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specq.gateway.endpoint import Parts, endpoint

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def routes(parts: Parts) -> list[Route]:
    """Return the route."""
    return [Route("/metrics", endpoint(parts, _metrics), methods=["GET"])]


async def _metrics(parts: Parts, request: Request) -> Response:
    return Response(parts.metrics.text(), headers={"content-type": MEDIA_TYPE})
