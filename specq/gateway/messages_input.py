"""The conversation of Anthropic's `/v1/messages` as messages of a chat; pure.

Rule: a conversation reaches the chat template in the form of `/v1/chat/completions`, from every endpoint.

    system         the first message; a list of blocks is one text
    text           the content; the blocks of a message are joined, one line each
    thinking       the assistant's reasoning; `redacted_thinking` has no text and is left out
    tool_use       a call of the assistant
    tool_result    a message of the role `tool`

Consecutive messages of `user`, or of `assistant`, are one message, as in Anthropic's API. All other blocks are refused
by name. Further fields of blocks (`cache_control`, `citations`, `is_error`, ...) have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from specq.gateway.errors import ApiError
from specq.gateway.fields import Part, check_role, is_object, is_text, need

_BILLING = "x-anthropic-billing-header:"  # a line of Claude Code that differs in each request, so no KV would be shared

Message = dict[str, Any]
ReadBlock = Callable[[Part], Message]


def read_conversation(fields: dict[str, Any]) -> list[Message]:
    """Return the messages for the chat template; raise ApiError that names the wrong block."""
    if "messages" not in fields:
        raise ApiError("messages is missing", param="messages", code="missing_parameter")
    given = Part("messages", fields["messages"]).entries()
    if not given:
        raise ApiError("messages is empty, but must have at least one message", param="messages")
    read = [one for message in given for one in _read_message(message)]
    return [*_read_system(Part("system", fields.get("system", ""))), *_joined(read)]


def _read_system(system: Part) -> list[Message]:
    """Return the system's message, if it has text."""
    lines = [line for text in _texts(system) if (line := _without_billing(text))]
    return [{"role": "system", "content": "\n".join(lines)}] if lines else []


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def _texts(content: Part) -> list[str]:
    """Return the texts of a text, or of a list of text blocks."""
    return [content.value] if isinstance(content.value, str) else [_text(block, "text") for block in content.entries()]


def _text(block: Part, *kinds: str) -> str:
    """Return the text of a text block; any other is refused, as not among the `kinds`."""
    kind = _kind(block)
    if kind != "text":
        message = f"{block.name} is of type {kind!r:.40}; supported here: {', '.join(kinds)}"
        raise ApiError(message, param=block.field, code="unsupported_parameter")
    text = block.value.get("text")
    return text if isinstance(text, str) else _string(block, "text")


def _kind(block: Part) -> Any:
    return block.of(is_object).get("type")


def _string(block: Part, name: str) -> str:
    return str(_value(block, name).of(is_text))


def _value(block: Part, name: str) -> Part:
    value = block.of(is_object).get(name)
    return need({}, name, block) if value is None else Part(f"{block.name}.{name}", value)


# --- messages ---------------------------------------------------------------------------------------------------------


def _read_message(message: Part) -> list[Message]:
    """Return a message as messages of a chat, one for each block."""
    given = message.of(is_object)
    role, content = given.get("role"), given.get("content")
    if isinstance(content, str) and role in _ROLES:
        return [{"role": role, "content": content}]
    role = check_role(message.field, message.name, _string(message, "role"), _ROLES)
    blocks = _value(message, "content").entries()
    return [_READERS[role](block) for block in blocks] or [{"role": role, "content": ""}]


def _of_user(block: Part) -> Message:
    if _kind(block) != "tool_result":
        return {"role": "user", "content": _text(block, "text", "tool_result")}
    texts = _texts(Part(f"{block.name}.content", block.value.get("content") or ""))
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id"), "content": "\n".join(texts)}


def _of_assistant(block: Part) -> Message:
    said: Message = {"role": "assistant", "content": ""}
    match _kind(block):
        case "redacted_thinking":
            return said
        case "thinking":
            thought = _string(block, "thinking")
            return said | ({"reasoning_content": thought} if thought else {})
        case "tool_use":
            return said | {"tool_calls": [_call(block)]}
    return said | {"content": _text(block, "text", "thinking", "redacted_thinking", "tool_use")}


def _call(block: Part) -> Message:
    arguments = json.dumps(_value(block, "input").of(is_object), ensure_ascii=False)
    function = {"name": _string(block, "name"), "arguments": arguments}
    return {"id": _string(block, "id"), "type": "function", "function": function}


def _of_system(block: Part) -> Message:
    return {"role": "system", "content": _text(block, "text")}


_READERS: dict[str, ReadBlock] = {"user": _of_user, "assistant": _of_assistant, "system": _of_system}
_ROLES = tuple(_READERS)


def _joined(messages: Iterable[Message]) -> list[Message]:
    """Return the messages, with consecutive ones of the same role as one; a result of a tool stays on its own."""
    groups = groupby(enumerate(messages), key=lambda one: (one[1]["role"], one[0] if one[1]["role"] == "tool" else -1))
    return [_merged([message for _, message in group]) for _, group in groups]


def _merged(messages: list[Message]) -> Message:
    """Return messages of a role as one: their texts on lines of their own, and all calls."""
    if len(messages) == 1:
        return messages[0]
    merged = messages[0] | {"content": "\n".join(text for one in messages if (text := one["content"]))}
    thoughts = [text for one in messages if (text := one.get("reasoning_content"))]
    calls = [call for one in messages for call in one.get("tool_calls", ())]
    merged |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return merged | ({"tool_calls": calls} if calls else {})
