"""Answers with what evaluations and tools ask for (`specq.gateway.evaluation_fields`); pure.

`EvaluatedChoices` adds it to the choices of an endpoint: the prompt, its log-probabilities, token ids, `stop_reason`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from specq.client import Piece, PromptLogprobs, Result
from specq.gateway import sse
from specq.gateway.answers import Choices, Events, EventSource, Head
from specq.gateway.completion_call import Call
from specq.gateway.shapes import LEAST_LOGPROB, AnswerShape, CompletionShape, Details, Json
from specq.text import Detokenizer, TextCodec

_OF_CHAT = "prompt_token_ids", "prompt_logprobs"  # in a chat they belong to the answer, not to the choice


class _Name(NamedTuple):
    text: str
    data: bytes


class _Names:
    """Tokens by id whose texts are their ids."""

    def __getitem__(self, token_id: int) -> _Name:
        return _Name(f"token_id:{token_id}", b"token_id:%d" % token_id)


@dataclass(frozen=True, slots=True)
class IdCodec:
    """Stands for a codec where tokens are shown as their ids."""

    tokens: _Names = _Names()  # noqa: RUF009 - it has no state


def shown_codec(codec: TextCodec, call: Call) -> Any:
    """Return what gives the texts of single tokens in an answer."""
    return IdCodec() if call.evaluation.names_ids else codec


class EvaluatedShape:
    """A shape with more fields in each choice."""

    def __init__(self, shape: AnswerShape, codec: TextCodec, call: Call) -> None:
        self._shape, self._codec, self._call = shape, codec, call
        self.prefix, self.whole_kind, self.chunk_kind = shape.prefix, shape.whole_kind, shape.chunk_kind
        self._told = set[int]()  # choices of a stream whose prompt was sent

    def skip_prompts(self, position: sse.Position) -> None:
        """Note the choices of a stream that goes on behind some tokens."""
        self._told = {index for index, choice in enumerate(position.choices) if choice.num_tokens}

    def opening(self, index: int) -> Json | None:
        return self._shape.opening(index)

    def chunk(self, index: int, piece: Piece) -> Json:
        asked = self._call.evaluation
        choice = self._shape.chunk(index, piece)
        choice["stop_reason"] = piece.result.stop_reason if piece.result else None
        if asked.with_ids:
            choice["token_ids"] = list(piece.token_ids)
        if index not in self._told and (piece.token_ids or piece.result or asked.is_empty):
            self._told.add(index)
            if asked.with_ids:
                choice["prompt_token_ids"] = self._prompt_ids(index)
            if asked.echo:
                self._put_prompt(choice, index, piece.prompt_logprobs)
        elif asked.echo:
            self._move(choice, len(self._prompt_text(index)))
        return choice

    def whole(self, index: int, result: Result) -> Json:
        asked = self._call.evaluation
        choice = self._shape.whole(index, result)
        choice |= {"stop_reason": result.stop_reason, **dict.fromkeys(("token_ids", *_OF_CHAT))}  # null, as in vLLM
        if asked.num_prompt_top >= 0:
            choice["prompt_logprobs"] = self._prompt_logprobs(result)
        if asked.with_ids:
            choice |= {"token_ids": result.token_ids, "prompt_token_ids": self._prompt_ids(index)}
        if asked.echo:
            self._put_prompt(choice, index, result.prompt_logprobs)
        return choice

    def _prompt_ids(self, index: int) -> list[int]:
        found: list[int] = self._call.prompts[index // self._call.n].submits[0].prompt_ids.tolist()
        return found

    def _prompt_text(self, index: int) -> str:
        return self._call.prompts[index // self._call.n].prompt

    # --- echo -------------------------------------------------------------------------------------------------------

    def _put_prompt(self, choice: Json, index: int, entries: Any) -> None:
        """Put the prompt before the text of a choice of `/v1/completions`, and its log-probabilities before those."""
        prompt = self._prompt_text(index)
        choice["text"] = prompt + choice["text"]
        if self._call.num_top < 0:
            return
        self._move(choice, len(prompt))
        own = choice["logprobs"] or {}
        of_prompt = self._of_prompt(index, entries or [])
        choice["logprobs"] = {name: values + own.get(name, []) for name, values in of_prompt.items()}

    def _move(self, choice: Json, num_characters: int) -> None:
        if choice.get("logprobs"):
            offsets = choice["logprobs"]["text_offset"]
            choice["logprobs"]["text_offset"] = [offset + num_characters for offset in offsets]

    def _of_prompt(self, index: int, entries: Sequence[Json | None]) -> Json:
        """Return the log-probabilities of a prompt's tokens in the form of `/v1/completions`. The first has none."""
        assert isinstance(self._shape, CompletionShape)
        token_ids, num_top = self._prompt_ids(index), self._call.num_top
        offsets = self._offsets(index, token_ids)
        first = {"token_id": token_ids[0], "logprob": 0.0, "top": [], "offset": offsets[0]}
        rest = [
            {**entry, "top": entry["top"][:num_top], "offset": offset}
            for entry, offset in zip(entries[1:], offsets[1:], strict=False)
            if entry is not None
        ]
        found = self._shape.logprobs([first, *rest])
        found["token_logprobs"][0] = found["top_logprobs"][0] = None
        return found

    def _offsets(self, index: int, token_ids: Sequence[int]) -> list[int]:
        """Return where the text of each token begins in the prompt. Special tokens that no text has take no room."""
        with_special = "prompt" not in self._call.arguments
        text, offsets = Detokenizer(self._codec, with_special=with_special), []
        for token_id in token_ids:
            offsets.append(text.offset)
            text.push(token_id)
        return offsets

    # --- prompt_logprobs --------------------------------------------------------------------------------------------

    def _prompt_logprobs(self, result: Result) -> list[Json | None] | None:
        """Return vLLM's form: for each token of the prompt an object by token id, null for the first."""
        if result.prompt_logprobs is None:
            return None
        return [None if entry is None else self._entry(entry) for entry in result.prompt_logprobs]

    def _entry(self, entry: Json) -> Json:
        """Return the token itself first, then the likeliest. The rank of a token that is not among them is unknown."""
        top = entry["top"][: self._call.evaluation.num_prompt_top]
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry["top"], 1)}
        values = {entry["token_id"]: entry["logprob"], **dict(top)}
        return {
            str(token_id): {
                "logprob": max(logprob, LEAST_LOGPROB),
                "rank": ranks.get(token_id),
                "decoded_token": self._codec.tokens[token_id].text,
            }
            for token_id, logprob in values.items()
        }


class EvaluatedChoices(Choices):
    """Choices with more fields."""

    def __init__(self, call: Call, shape: AnswerShape, codec: TextCodec, details: Details | None = None) -> None:
        self._evaluated = EvaluatedShape(shape, codec, call)
        super().__init__(call, self._evaluated, details)
        self._is_chat = not isinstance(shape, CompletionShape)

    def whole(self, head: Head, results: Sequence[Result]) -> Json:
        asked = self._call.evaluation
        answer = super().whole(head, [_emptied(result) for result in results] if asked.is_empty else results)
        return _of_answer(answer, is_chat=self._is_chat)

    def events(self, head: Head, position: sse.Position, *, with_ids: bool) -> EventSource:
        self._evaluated.skip_prompts(position)
        given = self._call, self._evaluated, head, position
        return EvaluatedEvents(*given, with_ids=with_ids, details=self._details, is_chat=self._is_chat)


class EvaluatedEvents(Events):
    """A stream of such choices."""

    def __init__(self, *given: Any, is_chat: bool, **options: Any) -> None:
        super().__init__(*given, **options)
        self._is_chat = is_chat
        self._of_prompts: dict[int, PromptLogprobs] = {}  # by choice, until they are sent

    def take(self, piece: Piece) -> bytes:
        index = piece.place * self._call.n + piece.index
        self._of_prompts[index] = piece.prompt_logprobs or self._of_prompts.get(index)
        piece = replace(piece, prompt_logprobs=self._of_prompts[index])
        if self._call.evaluation.is_empty:
            if piece.result is None:
                return b""
            nothing: Any = dict.fromkeys(("token_ids", "origins", "texts", "spans", "logprobs"), ())
            piece = replace(piece, text="", result=_emptied(piece.result), **nothing)
        return super().take(piece)

    def _shows(self, piece: Piece) -> bool:
        return super()._shows(piece) or (self._call.evaluation.with_ids and bool(piece.token_ids))

    def _around(self, choice: Json) -> Json:
        return _of_answer(super()._around(choice), is_chat=self._is_chat)


def _of_answer(answer: Json, *, is_chat: bool) -> Json:
    """Move the fields of the prompt of a chat from the choices to the answer, as in vLLM."""
    for choice in answer["choices"] if is_chat else ():
        answer |= {name: choice.pop(name) for name in _OF_CHAT if name in choice}
    return answer


def _emptied(result: Result) -> Result:
    """Return the result of a request for no tokens: one was generated, and is left out."""
    usage = result.usage | {"completion_tokens": 0}
    entries: list[Json] | None = None if result.logprobs is None else []
    return replace(
        result, text="", token_ids=[], finish_reason="length", usage=usage, logprobs=entries, stop_reason=None
    )
