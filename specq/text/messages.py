"""Normalise the messages of OpenAI clients, and render them with chat templates like transformers.

Every message becomes plain JSON values. Then these rules apply:

- null: such fields are removed, for example an answer's own `refusal`, `audio`, `annotations` and `function_call`.
- content: it is always a text. Parts of text are joined, one line each. null or missing content is an empty text. Only
  an assistant may lack content, if it called a tool, refused or reasoned. A refusal is then the text. A template that
  shows only parts receives the text as one part.
- tool_calls: they are removed if empty. `arguments` with the JSON text of an object become that object. Empty or
  missing ones become {}. Any other text does not change.
- reasoning: `reasoning_content`, `thinking` or `reasoning` becomes the first two of these names, as in transformers.

All other fields do not change: roles, `name`, `tool_call_id`, the ids of calls, the older `function_call`. specq
renders such messages exactly as transformers' `apply_chat_template`. `tests/text/test_chat_templates.py` compares the
two.

Templates are rendered as in transformers. Jinja runs in a sandbox, with the same filters, globals and tags.

Rule: a template comes with the model and is not trusted. It runs in jinja2's immutable sandbox, within the limits of
`template_limits`. It receives only plain JSON values. `specq.text.codec` imports this module when a chat is first
rendered, since importing jinja2 is slow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from specq.protocol import JobError
from specq.text.template_limits import LimitedEnvironment, limited

_REASONING = ("reasoning_content", "thinking", "reasoning")
_MAY_STAND_ALONE = ("tool_calls", "function_call", "refusal", *_REASONING)  # fields of an assistant without content


class UnsupportedPartError(JobError):
    """A part is not text."""


class MissingContentError(JobError):
    """A message has no content but needs some."""


class Arguments(dict[str, Any]):
    """The decoded arguments of a call. A template that adds them to a text receives the JSON text."""

    def __init__(self, text: str, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._text = text

    def __add__(self, other: object) -> str:
        return self._text + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + self._text if isinstance(other, str) else NotImplemented


def normalised(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return new messages by the rules above. Raises JobError that names the bad message."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise JobError("messages must be a list of at least one message")
    plain = plain_json("messages", list(messages))
    return [_normalised(f"messages[{place}]", message) for place, message in enumerate(plain)]


def plain_json(name: str, value: Any) -> Any:
    """Return a copy that has only JSON values. Raises JobError, which calls the value `name`, for any other value."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise JobError(f"{name} must be JSON values: {error}") from None


def _normalised(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise JobError(f'{name} must be an object with "role" and "content"')
    given = {field: value for field, value in message.items() if value is not None}
    given["content"] = read_content(name, given)
    calls = given.pop("tool_calls", None)
    if calls:
        given["tool_calls"] = _calls(f"{name}.tool_calls", calls)
    plain = {field: given[field] for field in [*message, "content"] if field in given}  # in the order received
    reasoning = next((plain[field] for field in _REASONING if field in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


# --- content ------------------------------------------------------------------------------------------------------


def read_content(name: str, message: dict[str, Any], kinds: Sequence[str] = ("text",)) -> str:
    """Return the content of a message as one text.

    - name: what the error calls the message.
    - kinds: the types of parts that are text; in an assistant's message also `refusal`.

    Raises MissingContentError, UnsupportedPartError, or JobError if the content is neither text nor parts.
    """
    content, is_assistant = message.get("content"), message.get("role") == "assistant"
    if content is None:
        _check_may_lack_content(name, message)
        return str(message.get("refusal") or "")
    if isinstance(content, list):
        if not content and not is_assistant:
            raise JobError(f"{name}.content is an empty list, but must have at least one part")
        allowed = (*kinds, "refusal") if is_assistant else kinds
        return "\n".join(_part(f"{name}.content[{place}]", part, allowed) for place, part in enumerate(content))
    if not isinstance(content, str):
        raise JobError(f"{name}.content must be a text or a list of parts, not {content!r:.40}")
    return content


def _check_may_lack_content(name: str, message: dict[str, Any]) -> None:
    if message.get("role") != "assistant":
        raise MissingContentError(f'{name} has no "content"')
    if not any(message.get(field) for field in _MAY_STAND_ALONE):
        raise MissingContentError(f'{name} has neither "content" nor "tool_calls"')


def _part(name: str, part: Any, kinds: Sequence[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if kind in kinds else None
    if kind is not None and kind not in kinds:
        raise UnsupportedPartError(
            f"{name} is of type {kind!r:.40}; only text is supported, of type {' or '.join(map(repr, kinds))}"
        )
    if not isinstance(text, str):
        raise JobError(f'{name} must be {{"type": "{kinds[0]}", "text": ...}}')
    return text


# --- calls --------------------------------------------------------------------------------------------------------


def _calls(name: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise JobError(
            f'{name} must be a list of {{"type": "function", "function": {{"name": ..., "arguments": ...}}}}'
        )
    return [_call(call) for call in calls]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with decoded arguments. Some users of templates omit the level `function`."""
    function = call.get("function")
    if isinstance(function, dict):
        return call | {"function": function | {"arguments": _arguments(function.get("arguments"))}}
    return call | {"arguments": _arguments(call["arguments"])} if "arguments" in call else call


def _arguments(given: Any) -> Any:
    """Decode arguments with the JSON text of an object. Empty ones become {}, any others do not change."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if not isinstance(given, str):
        return given
    try:
        values = json.loads(given, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return given
    return Arguments(given, values) if isinstance(values, dict) else given


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def render(template: str, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str:
    """Return the conversation as text, from the messages that `normalised` returns.

    Raises JobError if the template cannot be used, refuses the messages, or exceeds its limits.
    """
    given = {"tools": None, "documents": None, **plain_json("the template's variables", variables)}
    named = tuple((name, text) for name, text in given.items() if name.endswith("_token") and isinstance(text, str))
    plain = normalised(messages)
    try:
        with limited():
            plain = _in_parts(plain) if _reads_parts_only(template, named) else plain
            return _compile(template).render({**given, "messages": plain})
    except Exception as error:  # noqa: BLE001 - a template may raise any error
        raise JobError(f"the chat template refuses the messages: {str(error) or type(error).__name__}") from None


_OPEN = "CONTINUE_FINAL_MESSAGE_TAG "


def continued(messages: Sequence[dict[str, Any]], rendered: Callable[[Sequence[dict[str, Any]]], str]) -> str:
    """Return a conversation whose last message is left open, so that the model continues it.

    The text is cut behind that message, as in transformers. `rendered` returns messages as text. Raises JobError if the
    message has no text, or the template does not show it.
    """
    plain_messages = plain_json("messages", list(messages) if isinstance(messages, (list, tuple)) else messages)
    last = plain_messages[-1] if isinstance(plain_messages, list) and plain_messages else None
    if not isinstance(last, dict) or not isinstance(last.get("content"), (str, list)):
        raise JobError("continue_final_message is given, but the last message has no content to continue")
    text = read_content(f"messages[{len(plain_messages) - 1}]", last)
    found = rendered([*messages[:-1], {**messages[-1], "content": text + _OPEN}])
    before, tag, after = found.rpartition(_OPEN.strip())
    if not tag or text.strip() not in before:
        raise JobError("continue_final_message is given, but the chat template does not show the last message as it is")
    return before if after.startswith(" ") else before.rstrip()


def now() -> datetime:
    """Return the time that templates receive from `strftime_now`."""
    return datetime.now()  # noqa: DTZ005 - as in transformers: the local time, without the name of its zone


@lru_cache(maxsize=16)
def _reads_parts_only(template: str, named_tokens: tuple[tuple[str, str], ...]) -> bool:
    """Return whether a template shows content only in parts, as for some models that also see images."""
    probe = "0-probe-9"
    as_text, shown = [{"role": "user", "content": probe}], []
    others = {"tools": None, "documents": None, "add_generation_prompt": True, **dict(named_tokens)}
    for messages in (as_text, _in_parts(as_text)):
        try:
            text = _compile(template).render({**others, "messages": messages})
            shown.append(probe in text)
        except Exception:  # noqa: BLE001 - it needs more than a question
            shown.append(False)
    return shown == [False, True]


def _in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment.from_text(template)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert to plain JSON, on which models were trained. Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}..{% endgeneration %}` marks the assistant's text for training. Here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 - the base class annotates it as an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)
