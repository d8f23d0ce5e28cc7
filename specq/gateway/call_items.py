"""Items of `/v1/responses` that are calls of tools and their results, as messages of a chat; pure.

Rule: a conversation reaches the chat template in the form of `/v1/chat/completions`, whichever endpoint it came by.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specq.gateway.errors import ApiError
from specq.gateway.fields import read_content

_PARTS = ("input_text", "text")


def read_call_item(name: str, item: Any) -> dict[str, Any] | None:
    """Return a call or a result as a message, None for any other item; `name` is what errors call it."""
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "function_call":
        call_id, function, arguments = (_text(name, item, field) for field in ("call_id", "name", "arguments"))
        call = {"id": call_id, "type": "function", "function": {"name": function, "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        said = {"role": "tool", "content": item.get("output")}
        call_id = _text(name, item, "call_id")
        return {"role": "tool", "tool_call_id": call_id, "content": read_content("input", name, said, _PARTS)}
    return None


def _text(name: str, item: dict[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise ApiError(f"{name}.{field} must be a string", param="input", code="invalid_type")
    return value


def join_calls(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, each call in the assistant's message that it follows: parallel calls are one message."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls and joined and joined[-1]["role"] == "assistant":
            joined[-1] = {**joined[-1], "tool_calls": [*joined[-1].get("tool_calls", []), *calls]}
        else:
            joined.append(message)
    return joined
