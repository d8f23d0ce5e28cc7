"""The endpoints of files: `/v1/files`.

Rule: a form of a foreign page can send an upload without asking (CORS), so its `Origin` is checked here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from specq.batches import CHUNK_BYTES, BatchStore, BatchStoreError, StoredFile
from specq.gateway.batch_forms import file_form, listed, of_store, read_limit
from specq.gateway.endpoint import Handler, Parts, endpoint
from specq.gateway.errors import ApiError
from specq.gateway.guard import CALLER
from specq.gateway.replies import BodyLimits, ClientGoneError, json_response
from specq.gateway.uploads import UploadForm

MOST_LISTED = 10_000
SPARE = 1 << 16  # bytes of a form beside its file
PURPOSES = ("batch", "batch_output")


def file_routes(parts: Parts) -> list[Route]:
    """Return the routes."""
    one = "/v1/files/{file}"
    return [
        Route("/v1/files", endpoint(parts, stored(_create)), methods=["POST"]),
        Route("/v1/files", endpoint(parts, stored(_list)), methods=["GET"]),
        Route(one, endpoint(parts, stored(_retrieve)), methods=["GET"]),
        Route(one, endpoint(parts, stored(_delete)), methods=["DELETE"]),
        Route(f"{one}/content", endpoint(parts, stored(_content)), methods=["GET"]),
    ]


def stored(handler: Handler) -> Handler:
    """Return a handler whose errors of the store have a status."""

    async def call(parts: Parts, request: Request) -> Response:
        try:
            return await handler(parts, request)
        except BatchStoreError as error:
            raise of_store(error) from None

    return call


def store_of(parts: Parts) -> BatchStore:
    """Return the store; raise ApiError if there is none."""
    if parts.batches is None:
        raise ApiError('batches are off here (serve.batches is "none")', 404, code="batches_off")
    return parts.batches.store


async def find_file(parts: Parts, request: Request, file_id: str, param: str | None = None) -> StoredFile:
    """Return a file of the caller; raise ApiError if there is none."""
    store, owner = store_of(parts), request.scope[CALLER].name
    file = await store.read(lambda tables: tables.find_file(owner, file_id)) if store.exists else None
    if file is None:
        raise ApiError(f"no such file: {file_id[:80]}", 404, param, "file_not_found")
    return file


# --- uploads ----------------------------------------------------------------------------------------------------------


async def _create(parts: Parts, request: Request) -> Response:
    store, limits = store_of(parts), parts.limits
    _check_origin(request, parts.origins)
    form = UploadForm()
    form.begin(request.headers.get("content-type", ""))
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > store.limits.file_bytes + SPARE:
        raise ApiError(f"the file is larger than {store.limits.file_bytes} bytes (serve.upload_mb)", 413)
    owner = request.scope[CALLER].name
    number = await store.write(lambda tables: tables.new_file(owner, "", limits.total_s))
    try:
        async with asyncio.timeout(limits.total_s):
            await _receive(request, form, store, number, limits)
        form.check_end()
        keep_s, name = form.keep_s(store.limits.keep_s), form.file_name or ""
        file = await store.write(lambda tables: tables.finish_file(number, name, keep_s))
    except TimeoutError:
        await store.drop(number)
        raise ApiError(f"the upload took longer than {limits.total_s:g} s", 408) from None
    except BaseException:
        await asyncio.shield(store.drop(number))
        raise
    return json_response(file_form(file))


def _check_origin(request: Request, origins: tuple[str, ...]) -> None:
    """Raise ApiError for an upload by a page of another site that may not send requests here."""
    origin = request.headers.get("origin")
    if origin is None or "*" in origins or origin in origins:
        return
    if urlsplit(origin).netloc != request.headers.get("host"):
        raise ApiError("pages of this origin may not send files (serve.cors_origins)", 403, "Origin", "unknown_origin")


async def _receive(request: Request, form: UploadForm, store: BatchStore, number: int, limits: BodyLimits) -> None:
    """Write the file of a form to the store as it comes, in chunks of CHUNK_BYTES."""
    place = 0
    async for data in _pieces(request, limits.body_s):
        form.feed(data)
        if form.num_taken() >= CHUNK_BYTES:
            place = await _write(store, number, place, form)
    await _write(store, number, place, form)


async def _write(store: BatchStore, number: int, place: int, form: UploadForm) -> int:
    """Write what came; return the place of the next chunk."""
    if not (data := form.take()):
        return place
    await store.write(lambda tables: tables.append(number, place, data))
    return place + 1


async def _pieces(request: Request, pause_s: float) -> AsyncIterator[bytes]:
    """Yield the body; raise ApiError if nothing comes for `pause_s` seconds."""
    stream = request.stream()
    try:
        while True:
            async with asyncio.timeout(pause_s):
                data = await anext(stream, None)
            if data is None:
                return
            yield data
    except TimeoutError:
        raise ApiError(f"no more of the body arrived within {pause_s:g} s", 408) from None
    except ClientDisconnect:
        raise ClientGoneError from None


# --- the others -------------------------------------------------------------------------------------------------------


async def _list(parts: Parts, request: Request) -> Response:
    store, owner, query = store_of(parts), request.scope[CALLER].name, request.query_params
    limit, order, purpose = (
        read_limit(query, MOST_LISTED, MOST_LISTED),
        query.get("order", "desc"),
        query.get("purpose"),
    )
    if order not in ("asc", "desc"):
        raise ApiError("order must be asc or desc", param="order")
    if purpose is not None and purpose not in PURPOSES:
        return json_response(listed([], has_more=False))
    after = (await find_file(parts, request, query["after"], "after")).number if "after" in query else 0
    if not store.exists:
        return json_response(listed([], has_more=False))
    newest_first = order == "desc"
    found = await store.read(
        lambda tables: tables.list_files(owner, limit + 1, after, purpose, newest_first=newest_first)  # type: ignore[arg-type]
    )
    return json_response(listed([file_form(file) for file in found[:limit]], has_more=len(found) > limit))


async def _retrieve(parts: Parts, request: Request) -> Response:
    return json_response(file_form(await find_file(parts, request, request.path_params["file"])))


async def _delete(parts: Parts, request: Request) -> Response:
    file, store = await find_file(parts, request, request.path_params["file"]), store_of(parts)
    if not await store.write(lambda tables: tables.hide(file.number)):
        headers = {"x-should-retry": "false"}
        raise ApiError("a batch that has not ended reads this file; cancel it first", 409, None, "file_in_use", headers)
    await store.drop(file.number)
    return json_response({"id": file.id, "object": "file", "deleted": True})


async def _content(parts: Parts, request: Request) -> Response:
    file = await find_file(parts, request, request.path_params["file"])
    headers = {
        "content-type": "application/octet-stream",
        "content-length": str(file.num_bytes),
        "content-disposition": "attachment",
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(store_of(parts).chunks(file.number), headers=headers)
