"""Chat templates as Hugging Face renders them: Jinja in a sandbox, with the same filters, globals and tags.

Rule: a template comes with the model and is not trusted. It runs in jinja2's immutable sandbox and sees plain JSON
values only. Imported by `specq.text.codec` when a chat is first rendered, since jinja2 takes its time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specq.protocol import JobError
from specq.text.message_parts import joined_parts


def render(template: str, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str:
    """Return the conversation as text; content that comes in parts of text is one text, a line each. Raises JobError if the template cannot be used
    or refuses the messages."""
    plain = _plain(messages)
    try:
        return _compile(template).render(messages=plain, **{"tools": None, "documents": None, **variables})
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise JobError(f"the chat template refuses the messages: {error}") from None


def _plain(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy made of JSON values only; raises JobError for what is no list of messages."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise JobError("messages must be a list of at least one message")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise JobError('each message must be an object with "role" and "content"')
    try:
        plain = list(json.loads(json.dumps(messages, allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise JobError(f"messages must be JSON values: {error}") from None
    return [
        message | {"content": _text(f"messages[{i}].content", message["content"])} for i, message in enumerate(plain)
    ]


def _text(name: str, content: Any) -> str | None:
    """Return the content of a message as one text; None, as of an assistant that called a tool, stays."""
    if isinstance(content, list):
        return joined_parts(name, content)
    if content is not None and not isinstance(content, str):
        raise JobError(f"{name} must be a text or a list of parts, not {content!r:.40}")
    return content


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().astimezone().strftime(pattern)
    return environment.from_string(template)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}..{% endgeneration %}` marks the assistant's text for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 - the base class annotates it as an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)
