"""The parts of answers in the JSON of `/v1/chat/completions`: a message, or the deltas of a stream; pure.

Reasoning has the names `reasoning_content` and `reasoning`, the older and the newer one in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specq.client import Piece, Result
from specq.gateway.completion_call import Call
from specq.gateway.parts import (
    CallArguments,
    CallBegun,
    ContentText,
    Part,
    PartSplitter,
    ReasoningText,
    ToolCall,
    split,
)

Json = dict[str, Any]


class ChatParts:
    """The parts of all answers to a request, each with its own splitter."""

    def __init__(self, call: Call) -> None:
        self._form, self._with_reasoning = call.form, call.with_reasoning
        self._is_named = call.tools.is_named
        self._splitters: dict[int, PartSplitter] = {}

    def delta(self, index: int, piece: Piece) -> Json:
        """Return the delta of an answer's next piece, {} for none."""
        return self._delta(self.parts(index, piece))

    def parts(self, index: int, piece: Piece) -> list[Part]:
        """Return the parts of an answer's next piece, without the part that the reader knows."""
        splitter = self._splitters.get(index)
        if splitter is None:
            splitter = self._splitters[index] = PartSplitter(self._form, index)
        splitter.push(piece.known)
        return splitter.push(piece.text) + (splitter.finish() if piece.result else [])

    def _delta(self, parts: Iterable[Part]) -> Json:
        texts: dict[str, str] = {}
        calls: dict[int, Json] = {}
        for part in parts:
            match part:
                case ReasoningText(text) if self._with_reasoning:
                    for name in ("reasoning_content", "reasoning"):
                        texts[name] = texts.get(name, "") + text
                case ContentText(text):
                    texts["content"] = texts.get("content", "") + text
                case CallBegun(index, call_id, name):
                    calls[index] = {"index": index, **call_json(ToolCall(call_id, name, ""))}
                case CallArguments(index, text):
                    own = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    own["function"]["arguments"] += text
        return texts | ({"tool_calls": list(calls.values())} if calls else {})

    def reason(self, index: int, result: Result) -> str:
        """Return why a streamed answer ended, when all of it was taken."""
        splitter = self._splitters.get(index)
        return self._reason(result, has_calls=splitter is not None and splitter.num_calls > 0)

    def _reason(self, result: Result, *, has_calls: bool) -> str:
        """Return the finish_reason. A call of a function that tool_choice names ends with `stop`, as at OpenAI."""
        is_call = has_calls and result.finish_reason == "stop" and not self._is_named
        return "tool_calls" if is_call else result.finish_reason

    def message(self, index: int, result: Result) -> tuple[Json, str]:
        """Return the message of a whole answer, and why it ended."""
        answer = split(self._form, result.text, index)
        has_other = bool(answer.calls or answer.reasoning)
        message: Json = {"role": "assistant", "content": answer.content or (None if has_other else ""), "refusal": None}
        if answer.reasoning and self._with_reasoning:
            message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
        if answer.calls:
            message["tool_calls"] = list(map(call_json, answer.calls))
        return message, self._reason(result, has_calls=bool(answer.calls))


def call_json(call: ToolCall) -> Json:
    """Return a call as an entry of `tool_calls`."""
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
