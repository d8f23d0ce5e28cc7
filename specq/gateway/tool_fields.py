"""The fields `tools`, `tool_choice`, `parallel_tool_calls` and `tool_call_parser` as a `ToolUse`; pure.

Every endpoint with tools brings them into the form of `/v1/chat/completions` and reads them here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specq.gateway.call_text import CALL_FORMS
from specq.gateway.errors import ApiError
from specq.gateway.fields import Part, is_flag, is_object, is_text, need

FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "tool_call_parser")
MOST_TOOLS = 128  # as in OpenAI's API
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_LEVEL = re.compile(r"^(tools\[\d+\]|tool_choice)\.function(\.\w+|\b)")
_FUNCTION = ("name", "description", "parameters", "strict")
# No effect: `return` is what transformers makes of a Python function, the others are of `/v1/responses`.
_NO_EFFECT = ("return", "output_schema", "defer_loading", "allowed_callers")
_CHOICES = ("auto", "required", "none")


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call.

    parameters  the JSON schema of its arguments; {}: it has none.
    place       the name of `parameters` in errors.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False
    place: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request.

    tools        as the chat template receives them.
    functions    the functions that may be called. Empty with tool_choice `none`.
    is_required  whether the answer is at least one call.
    is_named     whether tool_choice names the function.
    is_parallel  whether an answer may have several calls.
    form         the form of calls that the request names; "": the template decides.
    """

    tools: tuple[dict[str, Any], ...] = ()
    functions: tuple[Function, ...] = ()
    is_required: bool = False
    is_named: bool = False
    is_parallel: bool = True
    form: str = ""


NO_TOOLS = ToolUse()


def read_flat_tool_use(fields: Mapping[str, Any], schema: str = "parameters") -> ToolUse:
    """Return the tools of an endpoint where a function has no level of its own; see `read_tool_use`.

    schema  its name for `parameters`.
    """

    def flat(text: str) -> str:
        return _LEVEL.sub(lambda found: found[1] + found[2].replace("parameters", schema), text)

    try:
        use = read_tool_use(fields)
    except ApiError as error:
        raise ApiError(flat(str(error)), error.status, error.param, error.code) from None
    return replace(use, functions=tuple(replace(one, place=flat(one.place)) for one in use.functions))


def read_tool_use(fields: Mapping[str, Any]) -> ToolUse:
    """Return the tools of a request; raise ApiError that names the wrong field."""
    tools = Part("tools", fields.get("tools", [])).entries()
    choice = Part("tool_choice", fields.get("tool_choice", "auto"))
    parallel = Part("parallel_tool_calls", fields.get("parallel_tool_calls", True)).of(is_flag)
    form = _read_form(Part("tool_call_parser", fields.get("tool_call_parser", "")))
    if not tools:
        if choice.value not in ("auto", "none"):
            raise ApiError("tool_choice is given without tools", param="tool_choice")
        return NO_TOOLS
    given = tuple(tool.of(is_object) for tool in tools)
    if choice.value == "none":  # the template may know tools of any form
        return ToolUse(given, form=form)
    if len(tools) > MOST_TOOLS:
        raise ApiError(f"tools has {len(tools)} tools, but must have at most {MOST_TOOLS}", param="tools")
    functions = _read_functions(tools)
    name = _read_choice(choice, functions)
    if name:
        functions = {name: functions[name]}
    is_required = bool(name) or choice.value == "required"
    return ToolUse(given, tuple(functions.values()), is_required, bool(name), parallel and not name, form)


def check_together(use: ToolUse, grammar: Any, field: str) -> None:
    """Raise ApiError if tools that may be called come with a grammar, except one of JSON."""
    is_json = isinstance(grammar, dict) and ("json_schema" in grammar or "json_object" in grammar)
    if use.functions and grammar and not is_json:
        message = f"{field} is not supported together with tools that may be called, unless it asks for JSON"
        raise ApiError(message, param=field, code="unsupported_parameter")


def _read_form(parser: Part) -> str:
    if parser.value != "" and parser.of(is_text) not in CALL_FORMS:
        known = ", ".join(name for name in CALL_FORMS if name)
        raise parser.wrong(f"is {parser.value[:40]!r}, but must be one of {known}")
    return str(parser.value)


def _read_functions(tools: list[Part]) -> dict[str, Function]:
    functions: dict[str, Function] = {}
    for tool in tools:
        function = _read_function(tool)
        if function.name in functions:
            raise tool.wrong(f"has the name {function.name!r}, which another tool has")
        functions[function.name] = function
    return functions


def _read_function(tool: Part) -> Function:
    tool.among(("function",))
    inner = need(tool.parts("type", "function"), "function", tool)
    parts = inner.parts(*_FUNCTION, *_NO_EFFECT)
    name = need(parts, "name", inner)
    if not _NAME.fullmatch(name.of(is_text)):
        raise name.wrong(f"is {name.value[:80]!r}, but must be 1 to 128 letters, digits, or signs of _.:/-")
    parameters = parts.get("parameters", Part(f"{inner.name}.parameters", {}))
    if parameters.of(is_object).get("type", "object") != "object":
        raise parameters.wrong("must be the schema of an object")
    is_strict = parts["strict"].of(is_flag) if "strict" in parts else False
    return Function(name.value, parameters.value, is_strict, parameters.name)


def _read_choice(choice: Part, functions: Mapping[str, Function]) -> str:
    """Return the name of the function that must be called, "" for no certain one."""
    if isinstance(choice.value, str):
        if choice.value not in _CHOICES:
            raise choice.wrong(f"is {choice.value[:40]!r}, but must be one of {', '.join(_CHOICES)}, or an object")
        return ""
    choice.among(("function",))
    function = need(choice.parts("type", "function"), "function", choice)
    name = need(function.parts("name"), "name", function)
    if name.of(is_text) not in functions:
        raise name.wrong(f"is {name.value[:80]!r}, which is not among tools: {', '.join(functions)}")
    return str(name.value)
