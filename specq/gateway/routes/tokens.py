"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specq.gateway import token_call
from specq.gateway.endpoint import Parts, endpoint
from specq.gateway.replies import json_response, read_json
from specq.text import TextCodec


def routes(parts: Parts) -> list[Route]:
    """Return the routes."""
    return [
        Route("/tokenize", endpoint(parts, _tokenize), methods=["POST"]),
        Route("/detokenize", endpoint(parts, _detokenize), methods=["POST"]),
    ]


async def _tokenize(parts: Parts, request: Request) -> Response:
    body, _ = await read_json(request, parts.limits)
    call = token_call.read_tokenize(body)
    _, served = await parts.upstream.get(call.model)
    answer = await asyncio.to_thread(_tokens, call, served.codec)
    return json_response(answer | {"max_model_len": served.info.max_length})


def _tokens(call: token_call.Tokenize, codec: TextCodec) -> dict[str, Any]:
    token_ids = token_call.encode(call, codec)
    texts = [codec.tokens[token_id].spelling for token_id in token_ids] if call.with_texts else None
    return {"count": len(token_ids), "tokens": token_ids, "token_strs": texts}


async def _detokenize(parts: Parts, request: Request) -> Response:
    body, _ = await read_json(request, parts.limits)
    model, token_ids = token_call.read_detokenize(body)
    _, served = await parts.upstream.get(model)
    token_call.check_vocabulary(token_ids, served.info)
    return json_response({"prompt": await asyncio.to_thread(served.codec.decode, token_ids, skip_special=False)})
