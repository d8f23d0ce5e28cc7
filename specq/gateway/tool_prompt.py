"""The conversation of a request with tools, as the chat template of its form takes it; pure.

general: the template knows no tools. So the system's message lists the tools and explains how to call them. Calls in
the conversation become text of the assistant, and their results become messages of the user.

mistral: ids of calls have nine letters and digits, which its templates require. Others are cut, as in vLLM.

hermes, llama3_json: the template receives tools and messages as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from specq.protocol import JobError
from specq.text import TextCodec

Message = dict[str, Any]
_ID_LENGTH = 9
_SEEN = "seen-0"
_EXPLAINED = """You can call functions. These are their signatures:
<tools>
{tools}
</tools>
For each call write a JSON object with the name of the function and its arguments, in this form:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


def general_messages(messages: Sequence[Message], tools: Sequence[Any], codec: TextCodec) -> list[Message]:
    """Return a conversation for a template without tools. Without `tools`, nothing is explained."""
    told = [_without_calls(message) for message in messages]
    joined: list[Message] = []
    is_result = False  # the last message has results
    for message in told:
        was_result, is_result = is_result, message["role"] == "tool"
        if was_result and message["role"] in ("tool", "user"):
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n{message['content']}"}
        else:
            joined.append({"role": "user", "content": message["content"]} if is_result else message)
    return _explained(joined, tools, codec) if tools else joined


def _without_calls(message: Message) -> Message:
    """Return a message whose calls or results are text."""
    if message["role"] in ("tool", "function"):
        return {"role": "tool", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    texts = [*([message["content"]] if message.get("content") else []), *map(_call_text, calls)]
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": "\n".join(texts)}


def _call_text(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else {}
    function = function if isinstance(function, dict) else {}
    name, arguments = json.dumps(function.get("name"), ensure_ascii=False), function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {text.strip() or "{}"}}}\n</tool_call>'


def _explained(messages: list[Message], tools: Sequence[Any], codec: TextCodec) -> list[Message]:
    """Return a conversation that explains the tools first: to the system, or to the user if there can be no system."""
    text = _EXPLAINED.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first = messages[0]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first.get('content') or ''}\n\n{text}".lstrip()}, *messages[1:]]
    if _shows_system(codec):
        return [{"role": "system", "content": text}, *messages]
    place = next((place for place, message in enumerate(messages) if message["role"] == "user"), 0)
    asked = {**messages[place], "content": f"{text}\n\n{messages[place].get('content') or ''}"}
    return [*messages[:place], asked, *messages[place + 1 :]]


def _shows_system(codec: TextCodec) -> bool:
    """Return whether the template shows a system's message."""
    try:
        return _SEEN in codec.render_chat([{"role": "system", "content": _SEEN}, {"role": "user", "content": "?"}])
    except JobError:
        return False


def mistral_messages(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation whose ids of calls have nine letters and digits."""
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: Message) -> Message:
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message = {**message, "tool_calls": [_with_short_id(call, "id") for call in calls]}
    return _with_short_id(message, "tool_call_id")


def _with_short_id(value: Message, name: str) -> Message:
    found = value.get(name) if isinstance(value, dict) else None
    return {**value, name: _short(found)} if isinstance(found, str) else value


def _short(call_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", call_id)[-_ID_LENGTH:].rjust(_ID_LENGTH, "0")
