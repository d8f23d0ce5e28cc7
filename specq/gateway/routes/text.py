"""The endpoints that generate text: `/v1/completions`, `/v1/chat/completions`, `/v1/responses`, `/v1/messages`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specq.client import ServedModel
from specq.gateway import chat_call, completion_call, messages_call, responses_call, serving
from specq.gateway.answer_form import read_chat
from specq.gateway.answers import Answering
from specq.gateway.chat_call import MAX_LENGTH
from specq.gateway.completion_call import Call
from specq.gateway.endpoint import Parts, endpoint
from specq.gateway.evaluation_answer import EvaluatedChoices, shown_codec
from specq.gateway.guard import CALLER
from specq.gateway.messages_answer import Messages
from specq.gateway.replies import EventStream, json_response, read_json, unless_gone
from specq.gateway.responses_answer import Responses
from specq.gateway.serving import AnswerStream, MakeAnswering, Prepared, complete, prepare
from specq.gateway.shapes import ChatShape, CompletionShape, Details
from specq.protocol import JobError
from specq.text import TextCodec

Read = Callable[[Any], Call]


def text_routes(parts: Parts) -> list[Route]:
    """Return the routes."""
    handlers = {path: partial(answer, *how) for path, how in ENDPOINTS.items()} | {"/v1/messages/count_tokens": _count}
    return [Route(path, endpoint(parts, handler), methods=["POST"]) for path, handler in handlers.items()]


def _chat(codec: TextCodec, call: Call) -> Answering:
    shape = ChatShape(shown_codec(codec, call), call.num_top, call)
    return EvaluatedChoices(call, shape, codec, _details(codec, call))


def _plain(codec: TextCodec, call: Call) -> Answering:
    shape = CompletionShape(shown_codec(codec, call), call.num_top)
    return EvaluatedChoices(call, shape, codec, _details(codec, call))


def _details(codec: TextCodec, call: Call) -> Details | None:
    return Details(codec) if call.explain else None


async def answer(read: Read, make_answering: MakeAnswering, parts: Parts, request: Request) -> Response:
    """Answer a request for text, whole or as a stream."""
    body, size = await read_json(request, parts.limits)
    call = read(body)
    repeatable = serving.read(request.headers, request.url.path, body, call)
    try:
        prepared = await prepare(parts.upstream, call, make_answering, request.scope[CALLER], repeatable, size)
        if call.stream:
            return await _stream(prepared, parts, request)
        completing = complete(prepared, parts.limits.total_s, parts.metrics)
        return json_response(await unless_gone(request.receive, completing))
    except JobError as error:
        raise call.refused(error) from None


async def _stream(prepared: Prepared, parts: Parts, request: Request) -> Response:
    stream = AnswerStream(prepared, parts.limits.total_s, parts.metrics)
    try:
        await unless_gone(request.receive, stream.begin())
    except BaseException:
        stream.close()
        raise
    return EventStream(stream.events(), stream.close, parts.limits.total_s)


def _responses(codec: TextCodec, call: Call) -> Answering:
    return Responses(call, ChatShape(codec, call.num_top, call))


def _messages(_: TextCodec, call: Call) -> Answering:
    messages_call.check_thinking(call)
    return Messages(call)


ENDPOINTS: dict[str, tuple[Read, MakeAnswering]] = {
    "/v1/chat/completions": (chat_call.read, _chat),
    "/v1/completions": (completion_call.read, _plain),
    "/v1/responses": (responses_call.read, _responses),
    "/v1/messages": (messages_call.read, _messages),
}


async def _count(parts: Parts, request: Request) -> Response:
    body, _ = await read_json(request, parts.limits)
    call = messages_call.read_counted(body)
    _, served = await parts.upstream.get(call.model)
    return json_response({"input_tokens": await asyncio.to_thread(_num_tokens, call, served)})


def _num_tokens(call: Call, served: ServedModel) -> int:
    """Return the tokens of a prompt, which may be longer than the model's room."""
    roomy = replace(served, info=replace(served.info, max_length=MAX_LENGTH, kv_slots=0))
    requests, _ = read_chat(call.arguments, roomy, call.tools)
    return len(requests[0].submits[0].prompt_ids)
