"""`/metrics`, for Prometheus: the broker is asked at each scrape, so that what has ended is counted."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specq.gateway.endpoint import Parts, endpoint
from specq.gateway.upstream import READY_S
from specq.protocol import JobError

FRESH_S = 0.1  # for so long a report counts as new here
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def routes(parts: Parts) -> list[Route]:
    """Return the route."""
    return [Route("/metrics", endpoint(parts, _metrics), methods=["GET"])]


async def _metrics(parts: Parts, request: Request) -> Response:
    try:
        report = await parts.upstream.report(READY_S, FRESH_S)
    except (TimeoutError, JobError):
        report = {}
    return Response(parts.metrics.text(report), headers={"content-type": MEDIA_TYPE})
