"""Answers of `/v1/responses`: items (messages, reasoning, calls), whole or as events with a type and a number; pure.

`ItemStream` turns the parts of an answer into the events of its items, one item at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specq.client import Piece, Result
from specq.gateway import sse
from specq.gateway.answers import EventSource, Head, usage
from specq.gateway.completion_call import Call
from specq.gateway.errors import ApiError
from specq.gateway.parts import (
    Answer,
    CallArguments,
    CallBegun,
    CallCut,
    CallEnded,
    ContentText,
    Part,
    ReasoningText,
    ToolCall,
    split,
)
from specq.gateway.shapes import ChatShape, Json

MESSAGE, REASONING, CALL = "msg", "rs", "fc"
Event = tuple[str, Json]  # the type of an event and its values


def message_item(item_id: str, status: str, content: Sequence[Json]) -> Json:
    """Return a message."""
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": list(content)}


def text_part(text: str, logprobs: Sequence[Json] = ()) -> Json:
    """Return the content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _reasoning_item(item_id: str, status: str, content: Sequence[Json]) -> Json:
    return {"id": item_id, "type": "reasoning", "summary": [], "status": status, "content": list(content)}


def _reasoning_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def _call_item(item_id: str, status: str, call: ToolCall) -> Json:
    named = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments}
    return {"id": item_id, "type": "function_call", "status": status, **named}


def item_id(answer_id: str, kind: str, place: int) -> str:
    """Return the id of an item: the answer's with the item's kind and its place in the output, if that is not 0."""
    return answer_id.replace("resp", kind, 1) + (f"_{place}" if place else "")


def items(answer_id: str, status: str, answer: Answer, logprobs: Sequence[Json]) -> list[Json]:
    """Return the output of a whole answer. Without reasoning and calls it is one message, perhaps empty."""
    found: list[Json] = []
    if answer.reasoning:
        found.append(_reasoning_item(item_id(answer_id, REASONING, 0), status, [_reasoning_part(answer.reasoning)]))
    if answer.content or not (found or answer.calls):
        content = [text_part(answer.content, logprobs)]
        found.append(message_item(item_id(answer_id, MESSAGE, len(found)), status, content))
    for call in answer.calls:
        found.append(_call_item(item_id(answer_id, CALL, len(found)), "completed", call))
    return found


@dataclass(slots=True)
class _Open:
    """The item that grows."""

    kind: str
    item_id: str
    texts: list[str]
    logprobs: list[Json]
    call: ToolCall | None = None


class ItemStream:
    """The events of a response's items.

    - done: the items that are complete.
    """

    def __init__(self, answer_id: str, *, with_reasoning: bool = True) -> None:
        self._answer_id, self._with_reasoning = answer_id, with_reasoning
        self._open: _Open | None = None
        self._logprobs: list[Json] = []  # not shown yet
        self.done: list[Json] = []

    def take(self, parts: Sequence[Part], logprobs: Sequence[Json]) -> list[Event]:
        """Return the events of some parts. Log-probabilities come with the text of a message."""
        self._logprobs += logprobs
        if logprobs and not parts and (self._open is None or self._open.kind == MESSAGE):
            return self._add_text("")  # of tokens without text
        return [event for part in parts for event in self._part(part)]

    def _part(self, part: Part) -> list[Event]:
        match part:
            case ContentText(text):
                return self._add_text(text)
            case ReasoningText(text):
                return self._add_reasoning(text) if self._with_reasoning else []
            case CallBegun(_, call_id, name):
                return self._begin(CALL, ToolCall(call_id, name, ""))
            case CallArguments(_, text):
                return [self._delta("response.function_call_arguments.delta", text)]
            case CallEnded():
                return self.close("completed")
            case CallCut():
                return self.close("incomplete")

    def _add_text(self, text: str) -> list[Event]:
        events = self._begin(MESSAGE)
        assert self._open is not None, "it has begun"
        logprobs, self._logprobs = self._logprobs, []
        self._open.logprobs += logprobs
        delta = self._delta("response.output_text.delta", text, content_index=0, logprobs=logprobs)
        return [*events, delta]

    def _add_reasoning(self, text: str) -> list[Event]:
        return [*self._begin(REASONING), self._delta("response.reasoning_text.delta", text, content_index=0)]

    def _begin(self, kind: str, call: ToolCall | None = None) -> list[Event]:
        """Return the events that open an item, unless one of this kind is open. A call has ended before another."""
        if self._open is not None and self._open.kind == kind:
            return []
        events = self.close("completed")
        self._open = _Open(kind, item_id(self._answer_id, kind, len(self.done)), [], [], call)
        events.append(self._event("response.output_item.added", item=self._item("in_progress", is_begun=True)))
        if kind != CALL:
            part = text_part("") if kind == MESSAGE else _reasoning_part("")
            events.append(self._at("response.content_part.added", content_index=0, part=part))
        return events

    def close(self, status: str) -> list[Event]:
        """Return the events that end the open item."""
        if self._open is None:
            return []
        text, kind = "".join(self._open.texts), self._open.kind
        if kind == CALL:
            events = [self._at("response.function_call_arguments.done", arguments=text, name=self._named.name)]
        elif kind == MESSAGE:
            logprobs = self._open.logprobs
            events = [self._at("response.output_text.done", content_index=0, text=text, logprobs=logprobs)]
            events.append(self._at("response.content_part.done", content_index=0, part=text_part(text, logprobs)))
        else:
            events = [self._at("response.reasoning_text.done", content_index=0, text=text)]
            events.append(self._at("response.content_part.done", content_index=0, part=_reasoning_part(text)))
        item = self._item(status)
        events.append(self._event("response.output_item.done", item=item))
        self.done.append(item)
        self._open = None
        return events

    def finish(self, status: str) -> list[Event]:
        """Return the events that end the output. It has at least one item."""
        begun = [] if self.done or self._open else self._begin(MESSAGE)
        if self._open is not None and self._open.kind == MESSAGE and self._logprobs:
            begun += self._add_text("")
        return [*begun, *self.close(status)]

    # --- the open item ---

    @property
    def _named(self) -> ToolCall:
        assert self._open is not None and self._open.call is not None, "a call is open"  # noqa: PT018
        return self._open.call

    def _item(self, status: str, *, is_begun: bool = False) -> Json:
        assert self._open is not None, "an item is open"
        text, own = "".join(self._open.texts), self._open
        if own.kind == CALL:
            return _call_item(own.item_id, status, ToolCall(self._named.call_id, self._named.name, text))
        if own.kind == MESSAGE:
            return message_item(own.item_id, status, [] if is_begun else [text_part(text, own.logprobs)])
        return _reasoning_item(own.item_id, status, [] if is_begun else [_reasoning_part(text)])

    def _delta(self, kind: str, text: str, **values: Any) -> Event:
        assert self._open is not None, "an item is open"
        self._open.texts.append(text)
        return self._at(kind, delta=text, **values)

    def _at(self, kind: str, **values: Any) -> Event:
        assert self._open is not None, "an item is open"
        return self._event(kind, item_id=self._open.item_id, **values)

    def _event(self, kind: str, **values: Any) -> Event:
        return kind, {"output_index": len(self.done), **values}


_FIXED: Json = {
    "background": False,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "truncation": "disabled",
}


class Responses:
    """The form of an answer of `/v1/responses`."""

    prefix = "resp_"

    def __init__(self, call: Call, shape: ChatShape) -> None:
        self._call, self._shape = call, shape

    def whole(self, head: Head, results: Sequence[Result]) -> Json:
        (result,) = results
        logprobs = self._shape.logprobs(result.logprobs or ())["content"]
        answer = split(self._call.form, result.text)
        shown = answer if self._call.with_reasoning else replace(answer, reasoning="")
        output = items(head.answer_id, _status(result), shown, logprobs)
        return response(self._call, head, result, output, self._shape.count(answer.reasoning))

    def events(self, head: Head, position: sse.Position, *, with_ids: bool) -> EventSource:
        if position != sse.start(1):
            raise ApiError(
                "Last-Event-ID is not supported here; omit it to receive the whole stream again", param="Last-Event-ID"
            )
        return ResponseEvents(self._call, self._shape, head)


class ResponseEvents:
    """The events of one response."""

    keep_alive = sse.KEEP_ALIVE

    def __init__(self, call: Call, shape: ChatShape, head: Head) -> None:
        self._call, self._shape, self._head, self._number = call, shape, head, 0
        self._items = ItemStream(head.answer_id, with_reasoning=call.with_reasoning)
        self.results: list[Result] = []

    def opening(self) -> bytes:
        """Return the events before the first text."""
        begun = response(self._call, self._head, None)
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, {"response": begun}) for kind in kinds)

    def take(self, piece: Piece) -> bytes:
        """Return the events of a piece."""
        self.results += [piece.result] if piece.result else []
        parts = self._shape.parts.parts(0, piece)
        logprobs = self._shape.logprobs(piece.logprobs)["content"]
        return b"".join(self._event(*event) for event in self._items.take(parts, logprobs))

    def closing(self) -> bytes:
        """Return the events after the last text."""
        (result,) = self.results
        last = self._items.finish(_status(result))
        reasoning = split(self._call.form, result.text).reasoning
        ended = response(self._call, self._head, result, self._items.done, self._shape.count(reasoning))
        events = [*last, (f"response.{ended['status']}", {"response": ended})]
        return b"".join(self._event(*event) for event in events)

    def failed(self, error: ApiError) -> bytes:
        """Return the event with the error that ends a stream early."""
        return self._event("error", {"message": error.message, "code": error.code, "param": error.param})

    def _event(self, kind: str, values: Json) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        return f"event: {kind}\n".encode() + sse.event(data)


def _status(result: Result) -> str:
    return "completed" if result.finish_reason == "stop" else "incomplete"


def response(
    call: Call, head: Head, result: Result | None, output: Sequence[Json] = (), num_reasoning: int = 0
) -> Json:
    """Return the response object, with its output and counts if it has ended.

    num_reasoning  the tokens of the reasoning.
    """
    status = "in_progress" if result is None else _status(result)
    reason = "max_output_tokens" if result is not None and result.finish_reason == "length" else "cancelled"
    return {
        "id": head.answer_id,
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": reason} if status == "incomplete" else None,
        "model": head.model,
        "output": list(output),
        **_FIXED,
        **call.repeated,
        "usage": _usage(call, result, num_reasoning) if result else None,
    }


def _usage(call: Call, result: Result, num_reasoning: int) -> Json:
    counted = usage(call, [result])
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": counted["prompt_tokens_details"],
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": counted["total_tokens"],
        "speculation": counted["speculation"],
    }
