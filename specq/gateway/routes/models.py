"""`/v1/models` and `/v1/models/NAME`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specq.client import ServedModel
from specq.gateway.endpoint import Parts, endpoint
from specq.gateway.errors import ApiError
from specq.gateway.replies import json_response


def routes(parts: Parts) -> list[Route]:
    """Return the routes."""
    return [
        Route("/v1/models", endpoint(parts, _list), methods=["GET"]),
        Route("/v1/models/", endpoint(parts, _list), methods=["GET"]),
        Route("/v1/models/{model:path}", endpoint(parts, _one), methods=["GET"]),
    ]


async def _list(parts: Parts, request: Request) -> Response:
    found = [await _describe(parts, model) for model in await parts.upstream.models()]
    return json_response({"object": "list", "data": found})


async def _one(parts: Parts, request: Request) -> Response:
    model = request.path_params["model"]
    if model not in await parts.upstream.models():
        raise ApiError(f"the model {model[:200]!r} is not served here", 404, "model", "model_not_found")
    return json_response(await _describe(parts, model))


async def _describe(parts: Parts, model: str) -> dict[str, Any]:
    _, served = await parts.upstream.get(model)
    return describe(served, parts.upstream.first_served(model))


def describe(served: ServedModel, created: int) -> dict[str, Any]:
    """Return a model as OpenAI and vLLM describe it; `created`: when it was first served."""
    info = served.info
    return {
        "id": info.name,
        "object": "model",
        "created": created,
        "owned_by": "specq",
        "root": info.name,
        "parent": None,
        "max_model_len": info.max_length,
    }
