"""Answers of Anthropic's `/v1/messages`: one message of blocks, whole or as events; pure.

A stream has `message_start`, for each block `content_block_start`, `content_block_delta`s and `content_block_stop`,
then `message_delta` with the reason of the end and the counts, and `message_stop`. `ping` may come between any two.

The blocks are those of `specq.gateway.parts`: `thinking`, `text` and `tool_use`. A call that the end of the text cuts
off is text in a whole answer. In a stream its block ends with incomplete JSON, as at Anthropic.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from specq.client import Piece, Result
from specq.gateway import sse
from specq.gateway.answers import EventSource, Head, usage
from specq.gateway.completion_call import Call
from specq.gateway.errors import ApiError, in_anthropics_form
from specq.gateway.parts import (
    Answer,
    CallArguments,
    CallBegun,
    CallCut,
    CallEnded,
    ContentText,
    Part,
    PartSplitter,
    ReasoningText,
    split,
)
from specq.gateway.shapes import Json

_UNSIGNED = "unsigned"  # in place of the signature by which Anthropic knows its own thinking again
_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class Messages:
    """The form of an answer of `/v1/messages`."""

    prefix = "msg_"

    def __init__(self, call: Call) -> None:
        self._call = call

    def whole(self, head: Head, results: Sequence[Result]) -> Json:
        (result,) = results
        found = split(self._call.form, result.text)
        end = _end(result, len(found.calls))
        return _message(head, _blocks(found, self._call), end, _usage(self._call, result))

    def events(self, head: Head, position: sse.Position, *, with_ids: bool) -> EventSource:
        if position != sse.start(1):
            raise ApiError(
                "Last-Event-ID is not supported here; omit it to receive the whole stream again", param="Last-Event-ID"
            )
        return MessageEvents(self._call, head)


def _blocks(found: Answer, call: Call) -> list[Json]:
    """Return the blocks of a whole answer; one empty text if there is nothing."""
    thought = found.reasoning if call.with_reasoning else ""
    calls = [_call(one.call_id, one.name, json.loads(one.arguments)) for one in found.calls]
    thinking = [{"type": "thinking", "thinking": thought, "signature": _UNSIGNED}] if thought else []
    text = [{"type": "text", "text": found.content}] if found.content or not (thinking or calls) else []
    return [*thinking, *text, *calls]


def _call(call_id: str, name: str, values: Json) -> Json:
    return {"type": "tool_use", "id": call_id, "name": name, "input": values}


class MessageEvents:
    """The events of one message."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, call: Call, head: Head) -> None:
        self._call, self._head = call, head
        self._splitter = PartSplitter(call.form)
        self._index, self._open = 0, ""  # of the current block, and its type while it is open
        self.results: list[Result] = []

    def opening(self) -> bytes:
        """Return the events before the first text."""
        counts = {"input_tokens": self._head.prompt_tokens[0], "cache_read_input_tokens": 0, "output_tokens": 0}
        end = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=_message(self._head, [], end, counts)) + self.keep_alive

    def take(self, piece: Piece) -> bytes:
        """Return the events of a piece."""
        self.results += [piece.result] if piece.result else []
        return self._add_all(self._splitter.push(piece.text))

    def closing(self) -> bytes:
        """Return the events after the last text. An answer without blocks has one empty text."""
        (result,), splitter = self.results, self._splitter
        last = self._add_all(splitter.finish())
        if not (self._index or self._open):
            last += self._begin({"type": "text", "text": ""})
        end = _end(result, splitter.num_calls)
        counts = _event("message_delta", delta=end, usage=_usage(self._call, result))
        return last + self._close() + counts + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        """Return the event with the error that ends a stream early."""
        return _event(**in_anthropics_form(error)[1])

    def _add_all(self, parts: Iterable[Part]) -> bytes:
        return b"".join(map(self._add, parts))

    def _add(self, part: Part) -> bytes:
        match part:
            case ReasoningText(text) if not self._call.with_reasoning:
                return b""
            case ReasoningText(text):
                return self._begin({"type": "thinking", "thinking": "", "signature": ""}) + self._delta(
                    {"type": "thinking_delta", "thinking": text}
                )
            case ContentText(text):
                return self._begin({"type": "text", "text": ""}) + self._delta({"type": "text_delta", "text": text})
            case CallBegun(_, call_id, name):
                return self._begin(_call(call_id, name, {}))
            case CallArguments(_, text):
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnded() | CallCut():
                return self._close()

    def _begin(self, block: Json) -> bytes:
        """Return the events that open a block, unless one of its type is open."""
        if self._open == block["type"]:
            return b""
        events = self._close()
        self._open = block["type"]
        return events + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        """Return the events that close the open block."""
        if not self._open:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": _UNSIGNED}) if self._open == "thinking" else b""
        events = signed + _event("content_block_stop", index=self._index)
        self._index, self._open = self._index + 1, ""
        return events


def _event(type: str, **values: Any) -> bytes:  # noqa: A002 - the name in the event
    return f"event: {type}\n".encode() + sse.event({"type": type, **values})


def _message(head: Head, content: list[Json], end: Json, counts: Json) -> Json:
    return {
        "id": head.answer_id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        **end,
        "usage": counts,
    }


def _end(result: Result, num_calls: int) -> Json:
    """Return why the text ended; a cancelled job's reason is `cancelled`, as in `/v1/chat/completions`."""
    reason = _REASONS.get(result.finish_reason, result.finish_reason)
    stopped_by = result.stop_reason if isinstance(result.stop_reason, str) else None
    if stopped_by is not None:
        reason = "stop_sequence"
    elif reason == "end_turn" and num_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": stopped_by}


def _usage(call: Call, result: Result) -> Json:
    """Return the counts; as at Anthropic, cached tokens are not among `input_tokens`."""
    counted = usage(call, [result])
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counted["completion_tokens"],
        "speculation": counted["speculation"],
    }
