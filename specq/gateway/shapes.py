"""The JSON of answers: a choice, whole or in pieces, for each endpoint; pure.

In `/v1/chat/completions` a choice is a message, or the deltas of a stream. Reasoning has the names `reasoning_content`
and `reasoning`, the older and the newer one in vLLM.

To add an endpoint of the same kind, add a class that implements `AnswerShape`.

`Details` is a chunk's report of speculation, for requests with `explain`: the field `specq`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

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
from specq.text import TextCodec

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


class Details:
    """The field `specq` of each piece; the codec gives the texts of tokens."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def of(self, place: int, piece: Piece) -> Json:
        """Return each token's origin, the drafts rejected beside the tokens, and the times of their rounds.

        `place` is that of the first token. Text that was held back to the end has no token.
        """
        tokens = zip(piece.token_ids, piece.texts, piece.origins, strict=True)
        told = [{"id": token, "text": text, "origin": origin} for token, text, origin in tokens]
        held = [{"id": None, "text": text, "origin": origin} for text, origin in piece.spans if not told]
        return {
            "place": place,
            "tokens": told or held,
            "rejected": [
                {
                    "place": draft.place,
                    "id": draft.token_id,
                    "text": self._codec.tokens[draft.token_id].text,
                    "parent": draft.parent,
                    "origin": draft.origin,
                    "accept_prob": round(draft.accept_prob, 4),
                }
                for draft in piece.rejected
            ],
            "rounds": [
                {"place": one.place, "step_ms": one.step_us / 1e3, "wait_ms": one.wait_us / 1e3} for one in piece.rounds
            ],
        }


LEAST_LOGPROB = -9999.0  # JSON for minus infinity, as in OpenAI's API
Logprobs = Sequence[dict[str, Any]]


class AnswerShape(Protocol):
    """The form of a request's answer.

    prefix      the prefix of the answer's id.
    whole_kind, chunk_kind  its object names.
    """

    prefix: str
    whole_kind: str
    chunk_kind: str

    def opening(self, index: int) -> Json | None:
        """Return the choice at the start of a stream, or None."""
        ...

    def chunk(self, index: int, piece: Piece) -> Json:
        """Return the choice for a piece of the stream; its `delta` or `text` is empty if the piece shows none."""
        ...

    def whole(self, index: int, result: Result) -> Json:
        """Return the choice for a whole answer."""
        ...


class ChatShape:
    """`/v1/chat/completions`."""

    prefix, whole_kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, codec: TextCodec, num_top: int, call: Call | None = None) -> None:
        """Take the codec, the number of likeliest tokens, and the call whose answers this shows."""
        self._codec, self._num_top, self.parts = codec, num_top, ChatParts(call or Call({}))

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, piece: Piece) -> Json:
        return {
            "index": index,
            "delta": self.parts.delta(index, piece),
            "logprobs": self.logprobs(piece.logprobs) if piece.logprobs else None,
            "finish_reason": self.parts.reason(index, piece.result) if piece.result else None,
        }

    def whole(self, index: int, result: Result) -> Json:
        message, reason = self.parts.message(index, result)
        return {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(result.logprobs or ()) if self._num_top >= 0 else None,
            "finish_reason": reason,
        }

    def logprobs(self, entries: Logprobs) -> Json:
        """Return the log-probabilities of tokens; `content` is a list, as in `/v1/responses`."""
        return {
            "content": [
                {
                    **self._token(entry["token_id"], entry["logprob"]),
                    "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry["top"]],
                }
                for entry in entries
            ],
            "refusal": None,
        }

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._codec.encode_part(text)) if text else 0

    def _token(self, token_id: int, logprob: float) -> Json:
        token = self._codec.tokens[token_id]
        return {"token": token.text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(token.data)}


class CompletionShape:
    """`/v1/completions`."""

    prefix, whole_kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, codec: TextCodec, num_top: int) -> None:
        self._codec, self._num_top = codec, num_top

    def opening(self, index: int) -> Json | None:
        return None

    def chunk(self, index: int, piece: Piece) -> Json:
        logprobs = self.logprobs(piece.logprobs) if piece.logprobs else None
        finish = piece.result.finish_reason if piece.result else None
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": finish}

    def whole(self, index: int, result: Result) -> Json:
        logprobs = self.logprobs(result.logprobs or ()) if self._num_top >= 0 else None
        return {"index": index, "text": result.text, "logprobs": logprobs, "finish_reason": result.finish_reason}

    def logprobs(self, entries: Logprobs) -> Json:
        """Return the log-probabilities of tokens."""
        return {
            "tokens": [self._codec.tokens[entry["token_id"]].text for entry in entries],
            "token_logprobs": [max(entry["logprob"], LEAST_LOGPROB) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [entry["offset"] for entry in entries],
        }

    def _top(self, entry: dict[str, Any]) -> dict[str, float]:
        """Return the likeliest tokens and the token itself, by text.

        A token with the text of another one is named by its id.
        """
        sampled = entry["token_id"], entry["logprob"]
        names = {sampled[0]: self._codec.tokens[sampled[0]].text}
        for token_id, _ in entry["top"]:
            text = self._codec.tokens[token_id].text
            names.setdefault(token_id, f"token_id:{token_id}" if text in names.values() else text)
        return {names[token_id]: max(logprob, LEAST_LOGPROB) for token_id, logprob in (*entry["top"], sampled)}
