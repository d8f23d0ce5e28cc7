"""Endpoints for operators and browsers: health, metrics, the page.

`/health`: the gateway runs. `/ready`: it reaches a broker with a verifier. `/version`.

`/metrics`, for Prometheus: each scrape fetches the broker's report, so that ended jobs are counted.

The page at `/`, and `/specq/status` with the data for its map.

Rule: the page consists of files of this package. It loads no files from other places, and its Content-Security-Policy
forbids that.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specq import __version__
from specq.gateway.endpoint import Parts, endpoint
from specq.gateway.errors import ApiError
from specq.gateway.replies import json_response
from specq.gateway.serving import READY_S
from specq.protocol import JobError


def health_routes(parts: Parts) -> list[Route]:
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


FRESH_S = 0.1  # a report counts as new here for this time
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_routes(parts: Parts) -> list[Route]:
    """Return the route."""
    return [Route("/metrics", endpoint(parts, _metrics), methods=["GET"])]


async def _metrics(parts: Parts, request: Request) -> Response:
    try:
        report = await parts.upstream.report(READY_S, FRESH_S)
    except (TimeoutError, JobError):
        report = {}
    return Response(parts.metrics.text(report), headers={"content-type": MEDIA_TYPE})


TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
FILES = {path.name: path for path in files("specq.gateway").joinpath("page").iterdir()}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes(parts: Parts) -> list[Route]:
    """Return the routes."""
    return [
        Route("/", endpoint(parts, _index), methods=["GET"]),
        Route("/page/{name}", endpoint(parts, _file), methods=["GET"]),
        Route("/specq/status", endpoint(parts, _status), methods=["GET"]),
    ]


async def _index(parts: Parts, request: Request) -> Response:
    return _reply("index.html")


async def _file(parts: Parts, request: Request) -> Response:
    return _reply(request.path_params["name"])


def _reply(name: str) -> Response:
    path = FILES.get(name)
    kind = TYPES.get(name.rpartition(".")[2])
    if path is None or kind is None:
        raise ApiError(f"the page has no file {name[:80]!r}", 404, code="not_found")
    return Response(path.read_bytes(), media_type=None, headers={**HEADERS, "content-type": kind})


async def _status(parts: Parts, request: Request) -> Response:
    """Answer with the broker's report, as `specq status` shows it, and the version of this gateway.

    The last faults are left out, because they are about other callers' jobs.
    """
    try:
        report = await parts.upstream.report(READY_S)
    except (TimeoutError, JobError):
        raise ApiError("the broker does not answer", 503, code="no_broker") from None
    return json_response({"version": __version__, **report, "faults": []})
