"""Answers of `/v1/responses`: one message, whole or as events with a type and a number; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specq.client import Piece, Result
from specq.gateway import sse
from specq.gateway.answers import EventSource, Head, usage
from specq.gateway.completion_call import Call
from specq.gateway.errors import ApiError
from specq.gateway.shapes import ChatShape, Json

_FIXED: Json = {
    "background": False,
    "parallel_tool_calls": False,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "tool_choice": "none",
    "tools": [],
    "truncation": "disabled",
}


class Responses:
    """The form of an answer of `/v1/responses`."""

    prefix = "resp_"

    def __init__(self, call: Call, shape: ChatShape) -> None:
        self._call, self._shape = call, shape

    def whole(self, head: Head, results: Sequence[Result]) -> Json:
        logprobs = self._shape.logprobs(results[0].logprobs or ())["content"]
        return response(self._call, head, results[0], logprobs)

    def events(self, head: Head, position: sse.Position, *, with_ids: bool) -> EventSource:
        if position != sse.start(1):
            raise ApiError(
                "Last-Event-ID is not supported here; omit it to receive the whole stream again", param="Last-Event-ID"
            )
        return ResponseEvents(self._call, self._shape, head)


class ResponseEvents:
    """The events of one response."""

    def __init__(self, call: Call, shape: ChatShape, head: Head) -> None:
        self._call, self._shape, self._head, self._number = call, shape, head, 0
        self._item_id = _item_id(head)
        self._text: list[str] = []
        self._logprobs: list[Json] = []
        self.results: list[Result] = []

    def opening(self) -> bytes:
        """Return the events before the first text."""
        begun = response(self._call, self._head, None)
        return b"".join(
            [
                self._event("response.created", response=begun),
                self._event("response.in_progress", response=begun),
                self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
                self._at_part("response.content_part.added", part=_part("")),
            ]
        )

    def take(self, piece: Piece) -> bytes:
        """Return the events of a piece."""
        logprobs = self._shape.logprobs(piece.logprobs)["content"]
        self._text.append(piece.text)
        self._logprobs += logprobs
        self.results += [piece.result] if piece.result else []
        if not (piece.text or logprobs):
            return b""
        return self._at_part("response.output_text.delta", delta=piece.text, logprobs=logprobs)

    def closing(self) -> bytes:
        """Return the events after the last text."""
        text, logprobs, (result,) = "".join(self._text), self._logprobs, self.results
        ended = response(self._call, self._head, result, logprobs)
        return b"".join(
            [
                self._at_part("response.output_text.done", text=text, logprobs=logprobs),
                self._at_part("response.content_part.done", part=_part(text, logprobs)),
                self._event("response.output_item.done", output_index=0, item=ended["output"][0]),
                self._event(f"response.{ended['status']}", response=ended),
            ]
        )

    def failed(self, error: ApiError) -> bytes:
        """Return the event with the error that ends a stream early."""
        return self._event("error", message=error.message, code=error.code, param=error.param)

    def _at_part(self, kind: str, **values: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **values)

    def _event(self, kind: str, **values: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        return f"event: {kind}\n".encode() + sse.event(data)

    def _item(self, status: str, content: list[Json]) -> Json:
        return item(self._item_id, status, content)


def response(call: Call, head: Head, result: Result | None, logprobs: Sequence[Json] = ()) -> Json:
    """Return the response object, with its end if it has ended."""
    cut = result is not None and result.finish_reason != "stop"
    status = "in_progress" if result is None else "incomplete" if cut else "completed"
    reason = "max_output_tokens" if result is not None and result.finish_reason == "length" else "cancelled"
    return {
        "id": head.answer_id,
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": reason} if cut else None,
        "model": head.model,
        "output": [item(_item_id(head), status, [_part(result.text, logprobs)])] if result else [],
        **_FIXED,
        **call.repeated,
        "usage": _usage(call, result) if result else None,
    }


def item(item_id: str, status: str, content: list[Json]) -> Json:
    """Return the message of a response."""
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _item_id(head: Head) -> str:
    return head.answer_id.replace("resp_", "msg_", 1)


def _part(text: str, logprobs: Sequence[Json] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _usage(call: Call, result: Result) -> Json:
    counted = usage(call, [result])
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": counted["prompt_tokens_details"],
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted["total_tokens"],
        "speculation": counted["speculation"],
    }
