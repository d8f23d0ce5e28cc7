"""Chat templates as transformers renders them: Jinja in a sandbox, with the same filters, globals and tags.

Rule: a template comes with the model and is not trusted. It runs in jinja2's immutable sandbox, within the limits of
`template_limits`, and receives plain JSON values only. `specq.text.codec` imports it when a chat is first rendered,
since jinja2 takes its time.
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

from specq.protocol import JobError
from specq.text.messages import normalised, plain_json
from specq.text.template_limits import LimitedEnvironment
from specq.text.template_meter import limited


def render(template: str, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str:
    """Return the conversation as text, by the messages that `normalised` returns.

    Raises JobError if the template cannot be used, refuses the messages, or goes beyond its limits.
    """
    given = {"tools": None, "documents": None, **plain_json("the template's variables", variables)}
    named = tuple((name, text) for name, text in given.items() if name.endswith("_token") and isinstance(text, str))
    plain = normalised(messages)
    try:
        with limited():
            plain = _in_parts(plain) if _reads_parts_only(template, named) else plain
            return _compile(template).render({**given, "messages": plain})
    except Exception as error:  # noqa: BLE001 - a template may raise whatever Python has
        raise JobError(f"the chat template refuses the messages: {str(error) or type(error).__name__}") from None


def now() -> datetime:
    """Return the time that `strftime_now` tells templates."""
    return datetime.now()  # noqa: DTZ005 - as in transformers: the local time, without the name of its zone


@lru_cache(maxsize=16)
def _reads_parts_only(template: str, named_tokens: tuple[tuple[str, str], ...]) -> bool:
    """Return whether a template shows content only if it comes in parts, as some of models that also see images do."""
    probe = "0-probe-9"
    as_text, shown = [{"role": "user", "content": probe}], []
    others = {"tools": None, "documents": None, "add_generation_prompt": True, **dict(named_tokens)}
    for messages in (as_text, _in_parts(as_text)):
        try:
            text = _compile(template).render({**others, "messages": messages})
            shown.append(probe in text)
        except Exception:  # noqa: BLE001 - it wants more than a question
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
    """Jinja's own filter escapes HTML; models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}..{% endgeneration %}` marks the assistant's text for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 - the base class annotates it as an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)
