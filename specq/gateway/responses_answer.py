"""Answers of `/v1/responses`: items, whole or as events with a type and a number; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specq.client import Piece, Result
from specq.gateway import sse
from specq.gateway.answers import EventSource, Head, usage
from specq.gateway.completion_call import Call
from specq.gateway.errors import ApiError
from specq.gateway.parts import split
from specq.gateway.response_items import ItemStream, items
from specq.gateway.shapes import ChatShape, Json

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
