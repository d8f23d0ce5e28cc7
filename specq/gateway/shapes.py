"""The JSON of answers: a choice, whole or in pieces, for each endpoint; pure.

To add an endpoint of the same kind, add a class that implements `AnswerShape`.

`Details` is a chunk's report of speculation, for requests with `explain`: the field `specq`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from specq.client import Piece, Result
from specq.gateway.chat_parts import ChatParts
from specq.gateway.completion_call import Call
from specq.text import TextCodec


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
Json = dict[str, Any]
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
