"""The text of an answer, piece by piece, as its parts: reasoning, content, calls of tools; pure.

A `PartSplitter` takes the text of one answer, in pieces of any size, and returns `Part`s:

    splitter = PartSplitter(form)
    for piece in pieces:
        parts = splitter.push(piece)
    parts = splitter.finish()

Rules:

- The parts depend on the text only, not on how it is cut into pieces. So a stream can go on behind any token.
- Text that looks like a call but is not one is content. A call whose arguments have begun cannot be taken back. If it
  is not completed, `CallCut` follows, with all of its text.
- White space beside reasoning and calls belongs to no part.

`split` returns a whole answer. A call that was cut is content there, as in vLLM.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Generator
from dataclasses import dataclass, replace

from specq.gateway.call_text import CALL_FORMS, Chars, NotACallError

THINK, END_OF_THINK = "<think>", "</think>"
MAY_THINK, THINKS = "may", "open"  # the text may begin with `<think>`; the prompt has ended with it
_MOST_SPACE = 64  # white space that is held back, since a call may follow


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More text of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call begins; `index` counts the calls of an answer from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More text of a call's arguments, which are the JSON text of an object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is complete and valid."""

    index: int


@dataclass(frozen=True, slots=True)
class CallCut:
    """A call that has begun is not completed. `text` is all of its text, with its mark."""

    index: int
    text: str


Part = ReasoningText | ContentText | CallBegun | CallArguments | CallEnded | CallCut


@dataclass(frozen=True, slots=True)
class PartsForm:
    """What the text of an answer may hold.

    calls   the form of calls, a name of `specq.gateway.call_text.CALL_FORMS`; "": no calls.
    names   the functions that may be called.
    thinks  MAY_THINK, THINKS, or "": no reasoning.
    key     what the ids of calls are made from. The same key gives the same ids.
    """

    calls: str = ""
    names: frozenset[str] = frozenset()
    thinks: str = ""
    key: str = ""

    def __bool__(self) -> bool:
        """Return whether the text has to be split at all."""
        return bool(self.calls or self.thinks)

    def call_id(self, choice: int, index: int) -> str:
        """Return the id of a call. Templates of Mistral require nine letters and digits."""
        digest = hashlib.sha256(f"{self.key}/{choice}/{index}".encode()).hexdigest()
        return digest[:9] if self.calls == "mistral" else f"call_{digest[:24]}"


PLAIN = PartsForm()  # all text is content


class PartSplitter:
    """Splits the text of one answer; `choice` is its place among the answers to a request."""

    def __init__(self, form: PartsForm, choice: int = 0) -> None:
        self._form, self._calls, self._chars = form, CALL_FORMS[form.calls], Chars()
        self._out = _Output(form, choice)
        self._reader = self._read()
        next(self._reader)

    @property
    def num_calls(self) -> int:
        """The number of complete calls so far."""
        return self._out.num_ended

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain after some more text."""
        if not self._form:
            return [ContentText(text)] if text else []
        for char in text:
            self._reader.send(char)
        return self._out.take()

    def finish(self) -> list[Part]:
        """Return the last parts, when no text will follow."""
        with contextlib.suppress(StopIteration):
            self._reader.send("")
        return self._out.take()

    def _read(self) -> Generator[None, str, None]:
        has_thought = bool(self._form.thinks) and (yield from self._read_reasoning())
        yield from self._read_content(drops_space=has_thought)

    def _read_reasoning(self) -> Generator[None, str, bool]:
        """Read the reasoning and its end; return whether there is any."""
        has_mark = yield from self._chars.skip(THINK)
        if not has_mark and self._form.thinks == MAY_THINK:
            return False
        held = yield from self._chars.solid()
        while held:
            shown, held = _settled(held, (END_OF_THINK,))
            self._out.say(ReasoningText, shown)
            if held.lstrip() == END_OF_THINK:
                break
            char = yield from self._chars.next()
            held += char
            if not char:
                self._out.say(ReasoningText, held)
                break
        return True

    def _read_content(self, *, drops_space: bool) -> Generator[None, str, None]:
        """Read content and calls up to the end of the text."""
        marks, held = (*self._calls.marks, *self._calls.bare), ""
        while char := (yield from self._chars.next()):
            shown, held = _settled(held + char, marks)
            if shown:
                self._out.say(ContentText, shown.lstrip() if drops_space else shown)
                marks = self._calls.marks
                drops_space = drops_space and shown.isspace()
            if held.lstrip() in marks:
                has_call = yield from self._read_calls(held)
                marks, held = self._calls.marks, ""
                drops_space = has_call or drops_space
        self._out.say(ContentText, held.lstrip() if drops_space else held)

    def _read_calls(self, mark: str) -> Generator[None, str, bool]:
        """Read calls behind white space and their mark; return whether there is one."""
        chars, out = self._chars, self._out
        if mark.lstrip() in self._calls.bare:
            chars.back(mark.lstrip())
            mark = mark[: -len(mark.lstrip())]
        chars.forget()
        out.begin_calls(chars)
        try:
            yield from self._calls.read(chars, out)
        except NotACallError:
            return self._give_up(mark)
        return True

    def _give_up(self, mark: str) -> bool:
        """Handle text that is not a call; return whether there was a call before it, or a part of one."""
        chars, out, taken = self._chars, self._out, "".join(self._chars.taken)
        if out.is_open:
            last = "" if chars.is_at_end else taken[-1]
            out.cut(mark + taken.removesuffix(last))
            chars.back(last)
        elif out.has_ended:
            chars.back(taken)
        else:
            raw = mark + taken
            start = len(raw) - len(raw.lstrip()) + 1
            out.say(ContentText, raw[:start])
            chars.back(raw[start:])
        return out.has_ended or out.was_cut


class _Output:
    """The parts that are not taken yet. Text joins text of the same kind before it."""

    def __init__(self, form: PartsForm, choice: int) -> None:
        self._form, self._choice = form, choice
        self._chars = Chars()
        self._parts: list[Part] = []
        self._kind: type[ReasoningText | ContentText | CallArguments] | None = None
        self._texts: list[str] = []  # of this kind
        self._num_begun = self.num_ended = 0
        self.names = form.names
        self.is_open = self.has_ended = self.was_cut = False

    def say(self, kind: type[ReasoningText | ContentText | CallArguments], text: str) -> None:
        """Add text."""
        if kind is not self._kind:
            self._close()
            self._kind = kind
        self._texts.append(text)

    def _close(self) -> None:
        text, kind = "".join(self._texts), self._kind
        self._kind, self._texts = None, []
        if kind is CallArguments:
            self._parts += [CallArguments(self._num_begun - 1, text)] if text else []
        elif kind is ReasoningText or kind is ContentText:
            self._parts += [kind(text)] if text else []

    def take(self) -> list[Part]:
        """Return the parts since the last call."""
        self._close()
        parts, self._parts = self._parts, []
        return parts

    # --- calls ---

    def begin_calls(self, chars: Chars) -> None:
        """Expect calls; each complete one makes `chars` forget what it has taken."""
        self._chars = chars
        self.is_open = self.has_ended = self.was_cut = False

    def begin(self, name: str) -> None:
        self._close()
        self._parts.append(CallBegun(self._num_begun, self._form.call_id(self._choice, self._num_begun), name))
        self._num_begun += 1
        self.is_open = True

    def add(self, arguments: str) -> None:
        self.say(CallArguments, arguments)

    def end(self) -> None:
        self._close()
        self._parts.append(CallEnded(self._num_begun - 1))
        self.num_ended += 1
        self.is_open, self.has_ended = False, True
        self._chars.forget()

    def cut(self, text: str) -> None:
        """End the open call, whose text this is."""
        self._close()
        self._parts.append(CallCut(self._num_begun - 1, text))
        self.is_open, self.was_cut = False, True


def _settled(held: str, marks: tuple[str, ...]) -> tuple[str, str]:
    """Divide text into what is certain, and an end that may be white space and the beginning of a mark."""
    if not (held[0].isspace() or any(mark[0] == held[0] for mark in marks)) and len(held) == 1:
        return held, ""
    most = _MOST_SPACE + max((len(mark) for mark in marks), default=0)
    for start in range(max(0, len(held) - most), len(held)):
        body = held[start:].lstrip()
        if any(mark.startswith(body) for mark in marks):
            return held[:start], held[start:]
    return held, ""


# --- whole answers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call; `arguments` is the JSON text of an object."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


def split(form: PartsForm, text: str, choice: int = 0) -> Answer:
    """Return the parts of a whole text."""
    splitter = PartSplitter(form, choice)
    reasoning, content, calls = list[str](), list[str](), dict[int, ToolCall]()
    for part in [*splitter.push(text), *splitter.finish()]:
        match part:
            case ReasoningText(more):
                reasoning.append(more)
            case ContentText(more):
                content.append(more)
            case CallBegun(index, call_id, name):
                calls[index] = ToolCall(call_id, name, "")
            case CallArguments(index, more):
                calls[index] = replace(calls[index], arguments=calls[index].arguments + more)
            case CallCut(index, taken):
                del calls[index]
                content.append(taken)
    return Answer("".join(reasoning), "".join(content), tuple(calls.values()))
