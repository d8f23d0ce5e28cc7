"""The body of Anthropic's `/v1/messages` and `/v1/messages/count_tokens` as a `Call`; pure.

Rule: names and meanings are Anthropic's. What the job does not know, such as tools and thinking, becomes a field of
`/v1/chat/completions` and is read there.
"""

from __future__ import annotations

from dataclasses import replace
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
    given,
    is_count,
    is_flag,
    is_object,
    is_text,
    need,
)
from specq.gateway.grammar_fields import VLLM, Grammar, Read, choose_grammar
from specq.gateway.messages_input import read_conversation
from specq.gateway.messages_tools import read_tools
from specq.gateway.tool_fields import check_together, read_flat_tool_use

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
