"""The tools of Anthropic's `/v1/messages` in the form of `/v1/chat/completions`; pure.

    name, description, input_schema, strict     a function and its parameters
    tool_choice auto, any, tool, none           auto, required, the function, none
    disable_parallel_tool_use                   parallel_tool_calls: false

Tools that Anthropic runs, or whose schema only its models know (`web_search_...`, `bash_...`), are refused by name.
"""

from __future__ import annotations

from typing import Any

from specq.gateway.errors import ApiError
from specq.gateway.fields import Check, Part, is_flag, is_object, is_text, need

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
