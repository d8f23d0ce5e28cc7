"""The body of `/v1/responses` as a `Call`; pure. It takes text only and stores no data.

The module also turns tool calls and their results into messages of a chat; pure.

Rule: a conversation reaches the chat template in the form of `/v1/chat/completions`, from every endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from specq.gateway.chat_call import BUDGET, MAX_LENGTH, read_budget
from specq.gateway.completion_call import Call, job_arguments, read_count, read_model, read_stream
from specq.gateway.errors import ApiError
from specq.gateway.fields import (
    IGNORED,
    REFUSED,
    SAMPLING,
    SPECULATION,
    check,
    check_known,
    check_role,
    given,
    is_list,
    is_object,
    is_text,
    read_content,
    read_top,
)
from specq.gateway.grammar_fields import RESPONSES, choose_grammar
from specq.gateway.tool_fields import FIELDS as TOOLS
from specq.gateway.tool_fields import check_together, read_flat_tool_use

_CALL_PARTS = ("input_text", "text")


def read_call_item(name: str, item: Any) -> dict[str, Any] | None:
    """Return a call or a result as a message, None for any other item.

    Errors use `name` for the item.
    """
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "function_call":
        call_id, function, arguments = (_text(name, item, field) for field in ("call_id", "name", "arguments"))
        call = {"id": call_id, "type": "function", "function": {"name": function, "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        said = {"role": "tool", "content": item.get("output")}
        call_id = _text(name, item, "call_id")
        return {"role": "tool", "tool_call_id": call_id, "content": read_content("input", name, said, _CALL_PARTS)}
    return None


def _text(name: str, item: dict[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise ApiError(f"{name}.{field} must be a string", param="input", code="invalid_type")
    return value


def join_calls(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, each call in the preceding assistant's message. Parallel calls are one message."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls and joined and joined[-1]["role"] == "assistant":
            joined[-1] = {**joined[-1], "tool_calls": [*joined[-1].get("tool_calls", []), *calls]}
        else:
            joined.append(message)
    return joined


_CHAT = "use /v1/chat/completions for them"
_OWN = (
    "model",
    "input",
    "instructions",
    "max_output_tokens",
    "stream",
    "stream_options",
    "reasoning",
    "truncation",
    "include",
    "top_logprobs",
    BUDGET,
)
KNOWN = (*_OWN, *RESPONSES, *TOOLS, *(name for name in SAMPLING if name != "n"), *SPECULATION)
_ONLY: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "background": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "enable_response_messages": (False,),
}
_REFUSED = {
    **REFUSED,
    "previous_response_id": "specq stores no responses; send the conversation as input",
    "conversation": "specq stores no conversations; send it as input",
    "prompt": "specq stores no prompts; send input",
    "max_tokens": "its name is max_output_tokens here",
    "max_completion_tokens": "its name is max_output_tokens here",
    "messages": "its name is input here",
    "response_format": "its name is text.format here",
    "max_tool_calls": "specq calls no tools itself; parallel_tool_calls false allows one call",
    "n": _CHAT,
    "logprobs": _CHAT,
    "chat_template_kwargs": _CHAT,
    "moderation": "specq moderates nothing",
    "context_management": "specq stores no conversations; send it as input",
    "previous_input_messages": "specq stores no conversations; send it as input",
    "background_options": "specq stores no responses",
    "access_programs": "specq calls nothing",
    "image": "specq writes text only",
}
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (  # all but the first belong to items that specq never answers with
    _LOGPROBS,
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
)
_NAMES = {"messages": "input", "chat_template_kwargs": "reasoning"}
_ROLES = ("system", "developer", "user", "assistant")
_PARTS = ("input_text", "output_text", "text")


def read(body: Any) -> Call:
    """Return the call; raise ApiError that names the wrong field."""
    fields = given(body)
    check_known(fields, KNOWN, IGNORED, _ONLY, _REFUSED)
    stream, num_top = read_stream(fields)[0], _read_logprobs(fields)
    limit = fields.get("max_output_tokens")
    most = MAX_LENGTH if limit is None else read_count("max_output_tokens", limit, MAX_LENGTH)
    arguments = job_arguments(fields) | {"messages": _messages(fields), "max_tokens": most, "n": 1}
    chat = _chat_fields(fields)
    arguments["chat_template_kwargs"] = _variables(fields) | ({"tools": chat["tools"]} if chat.get("tools") else {})
    chosen, tools = choose_grammar(fields, RESPONSES), read_flat_tool_use(chat)
    check_together(tools, chosen.grammar, chosen.field)
    arguments["grammar"] = chosen.grammar
    if num_top >= 0:
        arguments["logprobs"] = num_top
    if fields.get("truncation", "disabled") != "disabled":
        raise ApiError(
            "truncation is not supported; shorten the input", param="truncation", code="unsupported_parameter"
        )
    call = Call(arguments, read_model(fields), stream, num_top=num_top, repeated=_repeated(fields), names=_NAMES)
    return replace(call, chosen=chosen, tools=tools, thinking_budget=read_budget(fields))


def _chat_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of tools in the form of `/v1/chat/completions`, where a function is a level deeper."""
    found = {name: fields[name] for name in TOOLS if name in fields}
    if isinstance(found.get("tools"), list):
        found["tools"] = [_nested(tool) for tool in found["tools"]]
    if "tool_choice" in found:
        found["tool_choice"] = _nested(found["tool_choice"])
    return found


def _nested(value: Any) -> Any:
    if not isinstance(value, dict) or value.get("type") != "function":
        return value
    return {"type": "function", "function": {name: one for name, one in value.items() if name != "type"}}


def _read_logprobs(fields: dict[str, Any]) -> int:
    """Return the number of most likely tokens to list for each token.

    The number is -1 if `include` requests no log-probabilities.
    """
    include = check("include", fields.get("include", []), is_list)
    unknown = [one for one in include if one not in _INCLUDABLE]
    if unknown:
        reason = f"include has {unknown[0]!r:.80}; it may have {', '.join(_INCLUDABLE)}"
        raise ApiError(reason, param="include", code="invalid_value")
    num_top, wanted = read_top("top_logprobs", fields), _LOGPROBS in include
    if num_top and not wanted:
        raise ApiError(f'top_logprobs is given without "{_LOGPROBS}" in include', param="top_logprobs")
    return num_top if wanted else -1


def _repeated(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "metadata": fields.get("metadata", {}),
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "text": {"format": {"type": "text"}} | given(fields.get("text", {})),
        "temperature": fields.get("temperature", 1.0),
        "top_logprobs": fields.get("top_logprobs", 0),
        "top_p": fields.get("top_p", 1.0),
        "tools": fields.get("tools", []),
        "tool_choice": fields.get("tool_choice", "auto" if fields.get("tools") else "none"),
        "user": fields.get("user"),
    }


def _variables(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template."""
    reasoning = check("reasoning", fields.get("reasoning", {}), is_object)
    unknown = [name for name, value in reasoning.items() if name not in ("effort", "summary") and value is not None]
    if unknown:
        raise ApiError(f"unknown field {unknown[0][:64]!r} of reasoning", param="reasoning", code="unknown_parameter")
    effort = reasoning.get("effort")
    return {} if effort is None else {"reasoning_effort": check("reasoning", effort, is_text)}


# --- input ------------------------------------------------------------------------------------------------------------


def _messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation: the instructions as the system's message, then the input."""
    if "input" not in fields:
        raise ApiError("input is missing", param="input", code="missing_parameter")
    instructions = check("instructions", fields.get("instructions", ""), is_text)
    first = [{"role": "system", "content": instructions}] if instructions else []
    asked = fields["input"]
    if isinstance(asked, str):
        return [*first, {"role": "user", "content": asked}]
    if not isinstance(asked, list):
        raise ApiError("input must be a string or a list of messages", param="input", code="invalid_type")
    named = [(f"input[{place}]", item) for place, item in enumerate(asked) if not _is_reasoning(item)]
    messages = join_calls(read_call_item(name, item) or _message(name, item) for name, item in named)
    if not messages:
        raise ApiError("input is empty, but must have at least one message", param="input")
    return first + messages


def _is_reasoning(item: Any) -> bool:
    """Whether an item is a model's reasoning.

    Clients send such items back, and no chat template receives them.
    """
    return isinstance(item, dict) and item.get("type") == "reasoning"


def _message(name: str, item: Any) -> dict[str, Any]:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str) or item.get("type", "message") != "message":
        raise ApiError(f'{name} must be a message with "role" and "content"', param="input", code="invalid_type")
    role = check_role("input", name, item["role"], _ROLES)
    return {"role": role, "content": read_content("input", name, item, _PARTS)}
