"""The endpoints of batches: `/v1/batches`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specq.batches import StoredBatch
from specq.gateway.batch_forms import batch_form, listed, read_batch, read_limit
from specq.gateway.endpoint import Parts, endpoint
from specq.gateway.errors import ApiError
from specq.gateway.guard import CALLER
from specq.gateway.replies import json_response, read_json
from specq.gateway.routes.files import find_file, store_of, stored
from specq.gateway.routes.text import ENDPOINTS
from specq.gateway.serving import read_key

DEFAULT_LISTED, MOST_LISTED = 20, 100
BATCHED = tuple(path for path in ENDPOINTS if path != "/v1/messages")


def batch_routes(parts: Parts) -> list[Route]:
    """Return the routes."""
    one = "/v1/batches/{batch}"
    return [
        Route("/v1/batches", endpoint(parts, stored(_create)), methods=["POST"]),
        Route("/v1/batches", endpoint(parts, stored(_list)), methods=["GET"]),
        Route(one, endpoint(parts, stored(_retrieve)), methods=["GET"]),
        Route(f"{one}/cancel", endpoint(parts, stored(_cancel)), methods=["POST"]),
    ]


async def _create(parts: Parts, request: Request) -> Response:
    store = store_of(parts)
    body, _ = await read_json(request, parts.limits)
    new = read_batch(body, request.scope[CALLER], BATCHED, store.limits.keep_s)
    file = await find_file(parts, request, new.input_id, "input_file_id")
    if file.purpose != "batch":
        raise ApiError(f"purpose of {file.id} is {file.purpose}, but must be batch", param="input_file_id")
    key = read_key(request.headers)
    batch = await store.write(lambda tables: tables.new_batch(new, file, key))
    _wake(parts)
    return json_response(batch_form(batch))


def _wake(parts: Parts) -> None:
    if parts.batches is not None:
        parts.batches.runner.wake()


async def _list(parts: Parts, request: Request) -> Response:
    store, owner, query = store_of(parts), request.scope[CALLER].name, request.query_params
    limit = read_limit(query, DEFAULT_LISTED, MOST_LISTED)
    after = (await _find(parts, request, query["after"], "after")).number if "after" in query else 0
    found = await store.read(lambda tables: tables.list_batches(owner, limit + 1, after)) if store.exists else []
    return json_response(listed([batch_form(batch) for batch in found[:limit]], has_more=len(found) > limit))


async def _find(parts: Parts, request: Request, batch_id: str, param: str | None = None) -> StoredBatch:
    store, owner = store_of(parts), request.scope[CALLER].name
    batch = await store.read(lambda tables: tables.find_batch(owner, batch_id)) if store.exists else None
    if batch is None:
        raise _unknown(batch_id, param)
    return batch


def _unknown(batch_id: str, param: str | None = None) -> ApiError:
    return ApiError(f"no such batch: {batch_id[:80]}", 404, param, "batch_not_found")


async def _retrieve(parts: Parts, request: Request) -> Response:
    return json_response(batch_form(await _find(parts, request, request.path_params["batch"])))


async def _cancel(parts: Parts, request: Request) -> Response:
    batch_id = (await _find(parts, request, request.path_params["batch"])).id
    owner = request.scope[CALLER].name
    batch = await store_of(parts).write(lambda tables: tables.cancel_batch(owner, batch_id))
    if batch is None:
        raise _unknown(batch_id)
    if batch.status not in ("cancelling", "cancelled"):
        raise ApiError(f"the batch is {batch.status}, and cannot be cancelled any more", code="batch_not_cancellable")
    _wake(parts)
    return json_response(batch_form(batch))
