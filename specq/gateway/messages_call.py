"""The body of Anthropic's `/v1/messages` and `/v1/messages/count_tokens` as a `Call`; pure.

Tools, in the form of `/v1/chat/completions`:

    name, description, input_schema, strict     a function and its parameters
    tool_choice auto, any, tool, none           auto, required, the function, none
    disable_parallel_tool_use                   parallel_tool_calls: false

Tools that Anthropic runs, or whose schema only its models know (`web_search_...`, `bash_...`), are refused by name.

Rule: a conversation reaches the chat template in the form of `/v1/chat/completions`, from every endpoint.

    system         the first message; a list of blocks is one text
    text           the content; the blocks of a message are joined, one line each
    thinking       the assistant's reasoning; `redacted_thinking` has no text and is left out
    tool_use       a call of the assistant
    tool_result    a message of the role `tool`

Consecutive messages of `user`, or of `assistant`, are one message, as in Anthropic's API. All other blocks are refused
by name. Further fields of blocks (`cache_control`, `citations`, `is_error`, ...) have no effect.

Rule: names and meanings are Anthropic's. What the job does not know, such as tools and thinking, becomes a field of
`/v1/chat/completions` and is read there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any

from specq.gateway.chat_call import BUDGET, MAX_LENGTH, read_variables
from specq.gateway.completion_call import Call, job_arguments, read_count, read_model
from specq.gateway.errors import ApiError
from specq.gateway.fields import (
    SAMPLING,
    SPECULATION,
    Check,
    Part,
    check,
    check_known,
    check_role,
    given,
    is_count,
    is_flag,
    is_object,
    is_text,
    need,
)
from specq.gateway.grammar_fields import VLLM, Grammar, Read, choose_grammar
from specq.gateway.tool_fields import check_together, read_flat_tool_use

_FUNCTION: dict[str, tuple[str, Check]] = {  # the fields of a tool -> those of a function
    "name": ("name", is_text),
    "description": ("description", is_text),
    "input_schema": ("parameters", is_object),
    "strict": ("strict", is_flag),
}
_NO_EFFECT = ("cache_control", "input_examples", "eager_input_streaming", "defer_loading", "allowed_callers")
_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": ""}


def read_tools(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat with these tools.

    Raises ApiError that names the wrong tool.
    """
    tools = [_tool(tool) for tool in Part("tools", fields.get("tools", [])).entries()]
    choice = Part("tool_choice", fields.get("tool_choice", {"type": "auto"}))
    chosen = _choice(choice)
    if not tools and "tool_choice" in fields and chosen["tool_choice"] != "none":
        raise ApiError("tool_choice is given without tools", param="tool_choice")
    parser = {name: fields[name] for name in ("tool_call_parser",) if name in fields}
    return {"tools": tools, **chosen, **parser} if tools else parser


def _tool(tool: Part) -> dict[str, Any]:
    kind = tool.of(is_object).get("type")
    if kind not in (None, "custom"):
        message = f"{tool.name} is of type {kind!r:.60}: specq has no tools of its own; give name and input_schema"
        raise ApiError(message, param="tools", code="unsupported_parameter")
    parts = tool.parts("type", *_FUNCTION, *_NO_EFFECT)
    for name in ("name", "input_schema"):
        need(parts, name, tool)
    function = {own: parts[name].of(check) for name, (own, check) in _FUNCTION.items() if name in parts}
    return {"type": "function", "function": function}


def _choice(choice: Part) -> dict[str, Any]:
    kind = choice.among(_CHOICES)
    parts = choice.parts("type", "name", "disable_parallel_tool_use")
    wanted: Any = _CHOICES[kind]
    if kind == "tool":
        wanted = {"type": "function", "function": {"name": need(parts, "name", choice).of(is_text)}}
    alone = "disable_parallel_tool_use" in parts and parts["disable_parallel_tool_use"].of(is_flag)
    return {"tool_choice": wanted} | ({"parallel_tool_calls": False} if alone else {})


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
            return said | {"tool_calls": [_call_of(block)]}
    return said | {"content": _text(block, "text", "thinking", "redacted_thinking", "tool_use")}


def _call_of(block: Part) -> Message:
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


KNOWN = (
    *("model", "messages", "system", "max_tokens", "stop_sequences", "stream", "tools", "tool_choice", "thinking"),
    "tool_call_parser",
    *("output_config", "output_format", "context_management", "thread"),
    *(name for name in SAMPLING if name not in ("n", "stop")),
    *SPECULATION,
)
IGNORED: dict[str, Check] = {
    "metadata": is_object,
    "service_tier": is_text,
    "cache_control": is_object,
    "diagnostics": is_object,
    "user_profile_id": is_text,
    "workspace_id": is_text,
    "billing_policy": is_object,
    "fallback_credit_token": is_text,
}
_ONLY: dict[str, tuple[Any, ...]] = {
    "speed": ("standard",),
    "mcp_servers": ([],),
    "fallbacks": ([], "default"),
}
_REFUSED = {
    "container": "specq runs no code",
    "compaction": "specq summarises nothing by itself; ask for it in a message",
    "inference_geo": "the model runs where its verifiers are",
    "max_completion_tokens": "its name is max_tokens here",
    "stop": "its name is stop_sequences here",
    "prompt": "its name is messages here",
    "max_tokens_to_sample": "its name is max_tokens here",
    "n": "use /v1/chat/completions for it",
    "logprobs": "use /v1/chat/completions for them",
    "top_logprobs": "use /v1/chat/completions for them",
}
_NAMES = {"stop": "stop_sequences", "chat_template_kwargs": "tools", BUDGET: "thinking"}
_SWITCHES, _TEMPLATES_BUDGET = ("enable_thinking", "thinking"), "thinking_budget"  # of chat templates


def read(body: Any) -> Call:
    """Return the call; raise ApiError that names the wrong field."""
    fields = given(body)
    if "max_tokens" not in fields:
        raise ApiError("max_tokens is missing", param="max_tokens", code="missing_parameter")
    return _call(fields)


def read_counted(body: Any) -> Call:
    """Return the call whose prompt is counted; it may lack `max_tokens`."""
    return _call({"max_tokens": 1, **given(body)})


def _call(fields: dict[str, Any]) -> Call:
    check_known(fields, KNOWN, IGNORED, _ONLY, _REFUSED)
    _check_edits(fields)
    if "thread" in fields:  # Anthropic's client goes on without a thread where the refusal has this code
        message = "thread is not supported: specq stores no conversations; send it as messages"
        raise ApiError(message, param="thread", code="thread_unsupported_request")
    stream = check("stream", fields.get("stream", False), is_flag)
    limit = read_count("max_tokens", fields["max_tokens"], MAX_LENGTH)  # the client reduces it to the room in the model
    messages, chat, thinking = read_conversation(fields), read_tools(fields), _thinking(fields)
    is_open = messages[-1]["role"] == "assistant"  # the model continues this message
    variables = read_variables({**chat, **_effort(fields), "add_generation_prompt": not is_open}) | thinking
    arguments = job_arguments(fields) | {"messages": messages, "max_tokens": limit, "chat_template_kwargs": variables}
    arguments |= {"continue_final_message": True} if is_open else {}
    chosen, tools = choose_grammar(fields, _GRAMMARS), read_flat_tool_use(chat, "input_schema")
    check_together(tools, chosen.grammar, chosen.field)
    arguments["grammar"] = chosen.grammar
    if "stop_sequences" in fields:
        arguments["stop"] = [one.of(is_text) for one in Part("stop_sequences", fields["stop_sequences"]).entries()]
    call = Call(arguments, read_model(fields), stream, names=_NAMES)
    call = replace(call, chosen=chosen, tools=tools, with_reasoning=any(thinking.values()))
    return replace(call, thinking_budget=thinking.get(_TEMPLATES_BUDGET, -1))


def _check_edits(fields: dict[str, Any]) -> None:
    """Refuse edits that would change the prompt. The template decides which earlier thinking it shows."""
    asked = Part("context_management", fields.get("context_management", {})).parts("edits")
    for edit in asked["edits"].entries() if "edits" in asked else ():
        kind = edit.of(is_object).get("type")
        if not (isinstance(kind, str) and kind.startswith("clear_thinking_")):
            message = f"{edit.name} is of type {kind!r:.40}: specq shortens no conversation; shorten messages"
            raise ApiError(message, param="context_management", code="unsupported_parameter")


# --- formats ----------------------------------------------------------------------------------------------------------


def _config(part: Part) -> Grammar:
    """Return the grammar of `output_config`; {} without a format."""
    parts = _config_parts(part)
    return _format(parts["format"]) if "format" in parts else {}


def _config_parts(part: Part) -> dict[str, Part]:
    return part.parts("effort", "format")


def _format(part: Part) -> Grammar:
    part.among(("json_schema",))
    return {"json_schema": need(part.parts("type", "schema"), "schema", part).of(is_object)}


_GRAMMARS: dict[str, Read] = {"output_config": _config, "output_format": _format, "grammar": VLLM["grammar"]}


# --- what the template receives ---------------------------------------------------------------------------------------


def _effort(fields: dict[str, Any]) -> dict[str, Any]:
    config = _config_parts(Part("output_config", fields.get("output_config", {})))
    return {"reasoning_effort": config["effort"].of(is_text)} if "effort" in config else {}


def _thinking(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the variables by which templates turn thinking on and off. As at Anthropic, it is off by default."""
    thinking = Part("thinking", fields.get("thinking", {"type": "disabled"}))
    kind = thinking.among(("enabled", "adaptive", "disabled"))
    parts = thinking.parts("type", "budget_tokens", "display")
    budget = {_TEMPLATES_BUDGET: need(parts, "budget_tokens", thinking).of(is_count)} if kind == "enabled" else {}
    return dict.fromkeys(_SWITCHES, kind != "disabled") | budget


def check_thinking(call: Call) -> None:
    """Raise ApiError if thinking is enabled and the prompt does not lead to any; a model may also decide by itself."""
    if call.thinking_budget >= 0 and not call.form.thinks:
        message = 'thinking is "enabled", but the chat template of this model has no <think>; leave it out'
        raise ApiError(message, param="thinking", code="unsupported_parameter")
