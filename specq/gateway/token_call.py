"""The bodies of `/tokenize` and `/detokenize`; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specq.gateway.calls import read_model
from specq.gateway.chat_call import read_messages, read_variables
from specq.gateway.errors import ApiError, of_job
from specq.gateway.fields import check, check_known, given, is_flag, is_list, is_text
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
    """What is to be cut into tokens: a prompt, or a chat with the variables of its template."""

    model: str
    prompt: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    variables: Mapping[str, Any] = field(default_factory=dict)
    with_special: bool = True
    with_texts: bool = False


def read_tokenize(body: Any) -> Tokenize:
    """Return what is asked for; raises ApiError that names the field at fault."""
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
    if fields.get("tools"):
        fields = {"tool_choice": "none", **fields}  # no tool is called here
    return Tokenize(model, None, read_messages(fields), read_variables(fields), special, with_texts)


def encode(call: Tokenize, codec: TextCodec) -> list[int]:
    """Return the token ids; raises ApiError for what cannot be cut, as messages that the chat template refuses."""
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
