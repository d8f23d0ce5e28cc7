"""The endpoints for tokens of a text, and for the served models.

`/tokenize` and `/detokenize` are as in vLLM; the checks of their bodies are pure. `/v1/models` and `/v1/models/NAME`
describe models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specq.client import ServedModel
from specq.gateway.chat_call import read_messages, read_variables
from specq.gateway.completion_call import read_model
from specq.gateway.endpoint import Parts, endpoint
from specq.gateway.errors import ApiError, of_job
from specq.gateway.fields import check, check_known, given, is_flag, is_list, is_text
from specq.gateway.replies import json_response, read_json
from specq.protocol import JobError, ModelInfo
from specq.text import TextCodec

_TEXT = ("model", "prompt", "add_special_tokens", "return_token_strs")
_CHAT = (
    "messages",
    "tools",
    "documents",
    "tool_choice",
    "chat_template_kwargs",
    "add_generation_prompt",
    "reasoning_effort",
)
_ONLY: dict[str, tuple[Any, ...]] = {"continue_final_message": (False,)}
_REFUSED = {"chat_template": "requests bring no code; the model's own template is used"}


@dataclass(frozen=True, slots=True)
class Tokenize:
    """The text to tokenize: a prompt, or a chat with the variables of its template."""

    model: str
    prompt: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    variables: Mapping[str, Any] = field(default_factory=dict)
    with_special: bool = True
    with_texts: bool = False


def read_tokenize(body: Any) -> Tokenize:
    """Return the request; raise ApiError that names the wrong field."""
    fields = given(body)
    check_known(fields, (*_TEXT, *_CHAT), {}, _ONLY, _REFUSED)
    if ("prompt" in fields) == ("messages" in fields):
        raise ApiError("give either prompt or messages", param="prompt")
    is_chat = "messages" in fields
    special = check("add_special_tokens", fields.get("add_special_tokens", not is_chat), is_flag)
    with_texts = check("return_token_strs", fields.get("return_token_strs", False), is_flag)
    model = read_model(fields)
    if not is_chat:
        return Tokenize(model, check("prompt", fields["prompt"], is_text), [], {}, special, with_texts)
    return Tokenize(model, None, read_messages(fields), read_variables(fields), special, with_texts)


def encode(call: Tokenize, codec: TextCodec) -> list[int]:
    """Return the token ids.

    Raises ApiError for input that cannot be tokenized, such as messages that the chat template refuses.
    """
    try:
        text = codec.render_chat(call.messages, **call.variables) if call.prompt is None else call.prompt
        return codec.encode(text) if call.with_special else codec.encode_part(text)
    except JobError as error:
        error.field = error.field or ("messages" if call.prompt is None else "prompt")
        raise of_job(error) from None


def read_detokenize(body: Any) -> tuple[str, list[int]]:
    """Return the model's name and the token ids."""
    fields = given(body)
    check_known(fields, ("model", "tokens"), {}, {}, {})
    tokens = check("tokens", fields.get("tokens"), is_list)
    if not all(type(token) is int for token in tokens):
        raise ApiError("tokens must be a list of token ids", param="tokens", code="invalid_type")
    return read_model(fields), tokens


def check_vocabulary(token_ids: list[int], info: ModelInfo) -> None:
    """Raise ApiError for an id that the model does not have."""
    outside = [token for token in token_ids if not 0 <= token < info.num_tokens]
    if outside:
        message = f"token id {outside[0]} is outside the vocabulary of {info.name} (0 to {info.num_tokens - 1})"
        raise ApiError(message, param="tokens")


def token_routes(parts: Parts) -> list[Route]:
    """Return the routes."""
    return [
        Route("/tokenize", endpoint(parts, _tokenize), methods=["POST"]),
        Route("/detokenize", endpoint(parts, _detokenize), methods=["POST"]),
    ]


async def _tokenize(parts: Parts, request: Request) -> Response:
    body, _ = await read_json(request, parts.limits)
    call = read_tokenize(body)
    _, served = await parts.upstream.get(call.model)
    answer = await asyncio.to_thread(_tokens, call, served.codec)
    return json_response(answer | {"max_model_len": served.info.max_length})


def _tokens(call: Tokenize, codec: TextCodec) -> dict[str, Any]:
    token_ids = encode(call, codec)
    texts = [codec.tokens[token_id].spelling for token_id in token_ids] if call.with_texts else None
    return {"count": len(token_ids), "tokens": token_ids, "token_strs": texts}


async def _detokenize(parts: Parts, request: Request) -> Response:
    body, _ = await read_json(request, parts.limits)
    model, token_ids = read_detokenize(body)
    _, served = await parts.upstream.get(model)
    check_vocabulary(token_ids, served.info)
    return json_response({"prompt": await asyncio.to_thread(served.codec.decode, token_ids, skip_special=False)})


def model_routes(parts: Parts) -> list[Route]:
    """Return the routes."""
    return [
        Route("/v1/models", endpoint(parts, _list), methods=["GET"]),
        Route("/v1/models/", endpoint(parts, _list), methods=["GET"]),
        Route("/v1/models/{model:path}", endpoint(parts, _one), methods=["GET"]),
    ]


async def _list(parts: Parts, request: Request) -> Response:
    found = [await _describe(parts, request, model) for model in await parts.upstream.models()]
    return json_response({"object": "list", "data": found, "has_more": False})


async def _one(parts: Parts, request: Request) -> Response:
    model = request.path_params["model"]
    if model not in await parts.upstream.models():
        raise ApiError(f"the model {model[:200]!r} is not served here", 404, "model", "model_not_found")
    return json_response(await _describe(parts, request, model))


async def _describe(parts: Parts, request: Request, model: str) -> dict[str, Any]:
    _, served = await parts.upstream.get(model)
    described = describe(served, parts.upstream.first_served(model))
    return described | (as_at_anthropic(described) if "anthropic-version" in request.headers else {})


def describe(served: ServedModel, created: int) -> dict[str, Any]:
    """Return a model as OpenAI and vLLM describe it.

    `created` is the time when it was first served.
    """
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


def as_at_anthropic(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that Anthropic's API has for a model that `describe` returns."""
    created = datetime.fromtimestamp(described["created"], UTC).isoformat().replace("+00:00", "Z")
    limits = dict.fromkeys(("max_input_tokens", "max_tokens"), described["max_model_len"])
    return {"type": "model", "display_name": described["id"], "created_at": created, "lifecycle": "active", **limits}
