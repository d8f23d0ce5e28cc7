"""The body of `/v1/chat/completions` as a `Call`; pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specq.gateway.completion_call import (
    Call,
    job_arguments,
    read_choices,
    read_count,
    read_explain,
    read_model,
    read_stream,
)
from specq.gateway.errors import ApiError
from specq.gateway.evaluation_fields import COMMON, read_evaluation
from specq.gateway.fields import (
    IGNORED,
    ONLY,
    REFUSED,
    SAMPLING,
    SPECULATION,
    check,
    check_known,
    check_role,
    given,
    is_count,
    is_flag,
    is_list,
    is_object,
    is_text,
    read_content,
    read_top,
)
from specq.gateway.grammar_fields import COMPLETIONS, choose_grammar
from specq.gateway.tool_fields import FIELDS as TOOLS
from specq.gateway.tool_fields import check_together, read_tool_use

MAX_LENGTH = 2**31 - 1
BUDGET = "thinking_token_budget"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # of a message, as in OpenAI's API
_TEMPLATE = ("documents", "chat_template_kwargs", "add_generation_prompt", "reasoning_effort")
_OWN = ("model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "logprobs", "explain")
_ANSWER = ("top_logprobs", "include_reasoning", BUDGET, "continue_final_message")
KNOWN = (*_OWN, *_ANSWER, *COMPLETIONS, *TOOLS, *_TEMPLATE, *COMMON, *SAMPLING, *SPECULATION)
_ONLY = {
    **ONLY,
    "echo": (False,),
    "best_of": (1,),
    "verbosity": ("medium",),
    "add_special_tokens": (False,),
    "modalities": (["text"],),
}
_REFUSED = {
    **REFUSED,
    "functions": "its newer name is tools",
    "function_call": "its newer name is tool_choice",
    "audio": "specq writes text only",
    "web_search_options": "specq searches nothing",
    "chat_template": "requests bring no code; the model's own template is used",
    "moderation": "specq moderates nothing",
}


def read(body: Any) -> Call:
    """Return the call; raise ApiError that names the wrong field."""
    fields = given(body)
    check_known(fields, KNOWN, IGNORED, _ONLY, _REFUSED)
    streaming = read_stream(fields)
    n = read_choices(fields, 1)
    num_top = _read_top(fields)
    arguments = job_arguments(fields) | {"messages": read_messages(fields), "n": n}
    arguments["chat_template_kwargs"] = read_variables(fields)
    chosen, tools = choose_grammar(fields, COMPLETIONS), read_tool_use(fields)
    check_together(tools, chosen.grammar, chosen.field)
    arguments["grammar"] = chosen.grammar
    limit = _read_limit(fields)
    arguments["max_tokens"] = limit or MAX_LENGTH  # the client reduces it to the room in the model
    explain = arguments["explain"] = read_explain(fields)
    if num_top >= 0:
        arguments["logprobs"] = num_top
    evaluation = read_evaluation(fields)
    arguments |= evaluation.arguments
    if check("continue_final_message", fields.get("continue_final_message", False), is_flag):
        arguments["continue_final_message"] = True
        if "add_generation_prompt" not in fields:
            arguments["chat_template_kwargs"]["add_generation_prompt"] = False
    common = arguments, read_model(fields), *streaming, num_top, 1, n, explain
    reasoning = check("include_reasoning", fields.get("include_reasoning", True), is_flag)
    call = Call(*common, evaluation=evaluation)
    call = replace(call, chosen=chosen, tools=tools, with_reasoning=reasoning)
    return replace(call, thinking_budget=read_budget(fields))


def read_budget(fields: dict[str, Any]) -> int:
    """Return the most tokens of the reasoning; -1: not limited."""
    budget = fields.get(BUDGET)
    return -1 if budget is None else int(check(BUDGET, budget, is_count))


def _read_limit(fields: dict[str, Any]) -> int:
    """Return the most tokens to generate; 0 means as many as there is room for. The newer name has priority."""
    for name in ("max_completion_tokens", "max_tokens"):
        if name in fields:
            return read_count(name, fields[name], MAX_LENGTH)
    return 0


def _read_top(fields: dict[str, Any]) -> int:
    wanted = check("logprobs", fields.get("logprobs", False), is_flag)
    num_top = read_top("top_logprobs", fields)
    if num_top and not wanted:
        raise ApiError("top_logprobs is given without logprobs", param="top_logprobs")
    return num_top if wanted else -1


# --- input of the chat template ---------------------------------------------------------------------------------------


def read_variables(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template."""
    variables = dict(check("chat_template_kwargs", fields.get("chat_template_kwargs", {}), is_object))
    variables["add_generation_prompt"] = check(
        "add_generation_prompt", fields.get("add_generation_prompt", True), is_flag
    )
    if "documents" in fields:
        variables["documents"] = check("documents", fields["documents"], is_list)
    if "reasoning_effort" in fields:
        variables["reasoning_effort"] = check("reasoning_effort", fields["reasoning_effort"], is_text)
    if fields.get("tools"):
        variables["tools"] = check("tools", fields["tools"], is_list)
    return variables


def read_messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages; content in several parts becomes one text."""
    if "messages" not in fields:
        raise ApiError("messages is missing", param="messages", code="missing_parameter")
    messages = check("messages", fields["messages"], is_list)
    if not messages:
        raise ApiError("messages is empty, but must have at least one message", param="messages")
    return [_read_message(place, message) for place, message in enumerate(messages)]


def _read_message(place: int, message: Any) -> dict[str, Any]:
    name = f"messages[{place}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(f'{name} must be an object with "role" and "content"', param="messages", code="invalid_type")
    check_role("messages", name, message["role"], ROLES)
    content = read_content("messages", name, message)
    return {**message, "content": content} if isinstance(message.get("content"), list) else message
