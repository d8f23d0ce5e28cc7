"""Calls of tools in the text of an answer, in each form that models write; pure.

Calls begin behind a mark of their form anywhere in the text. A form may also have a bare beginning, which counts only
at the start of the text. Its `read` is a coroutine. It takes the text behind a mark, a character at a time, and
reports calls to a `CallSink`. It raises NotACallError where the text is not a call.

To add a form: a coroutine here, its line in `CALL_FORMS`, and how the form is chosen and enforced in `tool_forms`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

Reading = Generator[None, str, None]
ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "id", "type", *ARGUMENTS)  # of a call
_MOST_NAME = 256  # characters


class NotACallError(Exception):
    """The text is not a call."""


class CallSink(Protocol):
    """Receives calls while they are read."""

    names: frozenset[str]

    def begin(self, name: str) -> None: ...
    def add(self, arguments: str) -> None: ...
    def end(self) -> None: ...


class Chars:
    """The characters of a text for coroutines, which may give some back. "" is the end of the text."""

    def __init__(self) -> None:
        self._given_back: deque[str] = deque()
        self._is_ended = False
        self.is_at_end = False  # the last character was the end
        self.taken: list[str] = []  # since the last `forget`

    def next(self) -> Generator[None, str, str]:
        """Return the next character."""
        if self._given_back:
            char = self._given_back.popleft()
        elif self._is_ended:
            char = ""
        else:
            char = yield
        self.is_at_end = not char
        self._is_ended = self._is_ended or not char
        if char:
            self.taken.append(char)
        return char

    def forget(self) -> None:
        """Begin anew to note what is taken."""
        self.taken = []

    def back(self, text: str) -> None:
        """Give characters back, the last ones that were taken."""
        del self.taken[len(self.taken) - len(text) :]
        self._given_back.extendleft(reversed(text))

    def solid(self) -> Generator[None, str, str]:
        """Return the next character that is not white space."""
        while True:
            char = yield from self.next()
            if not char.isspace():
                return char

    def skip(self, text: str, *, may_be_cut: bool = False) -> Generator[None, str, bool]:
        """Skip white space and a text behind it, or nothing; return whether the text was there.

        may_be_cut  whether the beginning of the text counts, if nothing follows it.
        """
        got, wanted = "", 0
        while wanted < len(text):
            char = yield from self.next()
            got += char
            if char == text[wanted]:
                wanted += 1
            elif may_be_cut and wanted and not char:
                return True
            elif wanted or not char.isspace():
                self.back(got)
                return False
        return True


# --- JSON of calls ----------------------------------------------------------------------------------------------------


def _expect(char: str, allowed: str) -> str:
    if not char or char not in allowed:
        raise NotACallError
    return char


def _read_string(chars: Chars) -> Generator[None, str, str]:
    """Return the value of a string, behind its first quote."""
    raw = ['"']
    while True:
        char = yield from chars.next()
        raw.append(char)
        if char == "\\":
            raw.append((yield from chars.next()))
        elif not char:
            raise NotACallError
        elif char == '"':
            return str(_value("".join(raw), str))


def _read_braces(chars: Chars, say: Callable[[str], None]) -> Generator[None, str, None]:
    """Read an object behind its first brace; `say` receives each character at once."""
    raw, depth, in_string, is_escaped = ["{"], 1, False, False
    say("{")
    while depth:
        char = yield from chars.next()
        if not char:
            raise NotACallError
        raw.append(char)
        if is_escaped:
            is_escaped = False
        elif in_string:
            in_string, is_escaped = char != '"', char == "\\"
        elif char == '"':
            in_string = True
        else:
            depth += (char in "{[") - (char in "}]")
        if not depth:
            _value("".join(raw), dict)
        say(char)


def _value(raw: str, kind: type) -> Any:
    try:
        value = json.loads(raw, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise NotACallError from None
    if not isinstance(value, kind):
        raise NotACallError
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _read_object(chars: Chars, sink: CallSink) -> Reading:
    """Read a call that is an object, behind its first brace. Its arguments may come before its name."""
    name, arguments, seen = "", list[str](), set[str]()
    has_begun, char = False, ","
    while char == ",":
        _expect((yield from chars.solid()), '"')
        key = yield from _read_string(chars)
        if key not in _KEYS or key in seen or (seen & {*ARGUMENTS} and key in ARGUMENTS):
            raise NotACallError
        seen.add(key)
        _expect((yield from chars.solid()), ":")
        char = _expect((yield from chars.solid()), '"{' if key in ARGUMENTS else '"')
        if char == "{":
            if name:
                sink.begin(name)
                has_begun = True
            yield from _read_braces(chars, sink.add if has_begun else arguments.append)
        else:
            text = yield from _read_string(chars)
            name = _known(text, sink) if key == "name" else name
            if key in ARGUMENTS:
                _value(text, dict)
                arguments.append(text)
        char = _expect((yield from chars.solid()), ",}")
    if not has_begun:
        sink.begin(_known(name, sink))
        sink.add("".join(arguments) or "{}")
    sink.end()


def _known(name: str, sink: CallSink) -> str:
    if name not in sink.names:
        raise NotACallError
    return name


# --- forms ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls of one form are found and read.

    marks  texts with which calls begin anywhere.
    bare   texts with which they begin at the start of the text; they are parts of the call.
    inner  further fixed texts, which a tokenizer may have as special tokens.
    """

    marks: tuple[str, ...]
    read: Callable[[Chars, CallSink], Reading]
    bare: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()


def _read_hermes(chars: Chars, sink: CallSink) -> Reading:
    """Read `<tool_call>{"name": ..., "arguments": ...}</tool_call>`. The end may be missing."""
    _expect((yield from chars.solid()), "{")
    yield from _read_object(chars, sink)
    yield from chars.skip("</tool_call>", may_be_cut=True)


def _read_llama(chars: Chars, sink: CallSink) -> Reading:
    """Read `{"name": ..., "parameters": ...}`, several with `;` between them."""
    is_next = True
    while is_next:
        _expect((yield from chars.solid()), "{")
        yield from _read_object(chars, sink)
        is_next = yield from chars.skip(";")


def _read_mistral(chars: Chars, sink: CallSink) -> Reading:
    """Read `[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}`."""
    first = yield from chars.solid()
    if first == "[":
        char = ","
        while char == ",":
            _expect((yield from chars.solid()), "{")
            yield from _read_object(chars, sink)
            char = _expect((yield from chars.solid()), ",]")
        chars.forget()
    elif first == "{":
        yield from _read_object(chars, sink)
    else:
        yield from _read_named(chars, first, sink)


def _read_named(chars: Chars, first: str, sink: CallSink) -> Reading:
    """Read `name[ARGS]{...}`, also with `[CALL_ID]id` behind the name, or without `[ARGS]`."""
    head, char = "", first
    while char != "{":
        if not char or len(head) > _MOST_NAME:
            raise NotACallError
        head += char
        char = yield from chars.next()
    name = head.partition("[CALL_ID]")[0].removesuffix("[ARGS]").strip()
    sink.begin(_known(name, sink))
    yield from _read_braces(chars, sink.add)
    sink.end()


CALL_FORMS: Mapping[str, CallForm] = {
    "": CallForm((), _read_hermes),
    "hermes": CallForm(("<tool_call>",), _read_hermes, inner=("</tool_call>",)),
    "llama3_json": CallForm(("<|python_tag|>",), _read_llama, bare=("{",)),
    "mistral": CallForm(("[TOOL_CALLS]",), _read_mistral, inner=("[ARGS]", "[CALL_ID]")),
    "general": CallForm(("<tool_call>",), _read_hermes, inner=("</tool_call>",)),
}
