"""Answers to a request, whole or as a stream of events; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from specq.client import Piece, Result
from specq.gateway import sse
from specq.gateway.completion_call import Call
from specq.gateway.errors import ApiError
from specq.gateway.shapes import AnswerShape, Details, Json

_SUMMED = ("rounds", "draft_tokens", "accepted_tokens")


@dataclass(frozen=True, slots=True)
class Head:
    """The common part of all parts of an answer.

    `prompt_tokens` has the number for each prompt.
    """

    answer_id: str
    created: int
    model: str
    fingerprint: str
    prompt_tokens: tuple[int, ...] = ()

    def around(self, kind: str, choices: Sequence[Json]) -> Json:
        """Return the choices as an answer of a kind."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": list(choices),
        }


class EventSource(Protocol):
    """The events of one stream; `results` are the results so far, in order; `keep_alive` is sent after a pause."""

    @property
    def results(self) -> list[Result]: ...
    @property
    def keep_alive(self) -> bytes: ...
    def opening(self) -> bytes: ...
    def take(self, piece: Piece) -> bytes: ...
    def closing(self) -> bytes: ...
    def failed(self, error: ApiError) -> bytes: ...


class Answering(Protocol):
    """The form of an answer; `prefix` is that of the answer's id."""

    @property
    def prefix(self) -> str: ...

    def whole(self, head: Head, results: Sequence[Result]) -> Json:
        """Return the whole answer, from the results of all prompts in order."""
        ...

    def events(self, head: Head, position: sse.Position, *, with_ids: bool) -> EventSource:
        """Return the answer as a stream."""
        ...


class Choices:
    """An answer that is a list of choices."""

    def __init__(self, call: Call, shape: AnswerShape, details: Details | None = None) -> None:
        self._call, self._shape, self.prefix, self._details = call, shape, shape.prefix, details

    def whole(self, head: Head, results: Sequence[Result]) -> Json:
        choices = [self._shape.whole(index, result) for index, result in enumerate(results)]
        return head.around(self._shape.whole_kind, choices) | {"usage": usage(self._call, results)}

    def events(self, head: Head, position: sse.Position, *, with_ids: bool) -> EventSource:
        return Events(self._call, self._shape, head, position, with_ids=with_ids, details=self._details)


class Events:
    """The events of a stream, from a position on.

    With `with_ids`, each event has the id for resuming after it.
    """

    keep_alive = sse.KEEP_ALIVE

    def __init__(
        self,
        call: Call,
        shape: AnswerShape,
        head: Head,
        position: sse.Position,
        *,
        with_ids: bool,
        details: Details | None = None,
    ) -> None:
        self._call, self._shape, self._head, self._with_ids = call, shape, head, with_ids
        self._details = details
        self.position = position
        self._results: dict[int, Result] = {}

    def opening(self) -> bytes:
        """Return the events before the first text."""
        return b"".join(map(self._open, range(len(self.position.choices))))

    def _open(self, index: int) -> bytes:
        choice = None if self.position.choices[index].is_open else self._shape.opening(index)
        if choice is None:
            return b""
        self.position = self.position.moved(index)
        return self._event(choice, index)

    def take(self, piece: Piece) -> bytes:
        """Return the event of a piece; empty for tokens whose text is still uncertain."""
        index = piece.place * self._call.n + piece.index
        if piece.result is not None:
            self._results[index] = piece.result
        if self.position.choices[index].ended:
            return b""
        ended, place = piece.result is not None, self.position.choices[index].num_tokens
        self.position = self.position.moved(index, len(piece.token_ids), ended=ended)
        details = self._details.of(place, piece) if self._details else None
        choice = self._shape.chunk(index, piece)
        if not (ended or details or choice.get("delta") or choice.get("text") or self._shows(piece)):
            return b""
        return self._event(choice, index, details)

    def _shows(self, piece: Piece) -> bool:
        """Return whether a piece has anything to send besides its text."""
        return bool(piece.logprobs)

    def closing(self) -> bytes:
        """Return the events after the last text."""
        if not self._call.include_usage or self.position.has_usage:
            return sse.DONE
        self.position = replace(self.position, has_usage=True)
        last = self._head.around(self._shape.chunk_kind, ()) | {"usage": usage(self._call, self.results)}
        return sse.event(last, self._id) + sse.DONE

    @property
    def results(self) -> list[Result]:
        """Return the results so far, in order."""
        return [self._results[index] for index in sorted(self._results)]

    def failed(self, error: ApiError) -> bytes:
        """Return the event with the error that ends a stream early.

        It does not change the position.
        """
        return sse.event(error.body)

    def _event(self, choice: Json, index: int, details: Json | None = None) -> bytes:
        data = self._around(choice)
        if details:
            data["specq"] = details
        if self._call.include_usage:
            data["usage"] = self._usage_so_far(index) if self._call.continuous_usage else None
        return sse.event(data, self._id)

    def _around(self, choice: Json) -> Json:
        return self._head.around(self._shape.chunk_kind, (choice,))

    def _usage_so_far(self, index: int) -> Json:
        """Return the numbers of tokens of one choice up to this chunk, as vLLM does."""
        return _tokens(self._head.prompt_tokens[index // self._call.n], self.position.choices[index].num_tokens)

    @property
    def _id(self) -> str:
        return str(self.position) if self._with_ids else ""


# --- usage and speculation --------------------------------------------------------------------------------------------


def usage(call: Call, results: Sequence[Result]) -> Json:
    """Return the token counts of a request, each prompt counted once, and speculation figures.

    Later completions of a prompt share the KV of the first one. So the cached tokens of a prompt are the smallest count
    among its completions.
    """
    prompts = sum(result.usage["prompt_tokens"] for result in results[:: call.n])
    cached = [result.usage["cached_tokens"] for result in results]
    completions = sum(result.usage["completion_tokens"] for result in results)
    found = sum(min(cached[first : first + call.n]) for first in range(0, len(cached), call.n))
    return _tokens(prompts, completions) | {
        "prompt_tokens_details": {"cached_tokens": found},
        "speculation": speculation([result.stats for result in results]),
    }


def _tokens(prompts: int, completions: int) -> Json:
    return {"prompt_tokens": prompts, "completion_tokens": completions, "total_tokens": prompts + completions}


def speculation(stats: Iterable[dict[str, Any]]) -> Json:
    """Return the sums over all completions, the resulting rates, and the statistics of each.

    See docs/reference/jobs.md, "Results".
    """
    each = list(stats)
    rounds, drafted, accepted = (sum(one[name] for one in each) for name in _SUMMED)
    return {
        "rounds": rounds,
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0,
        "mean_accepted_length": round(1 + accepted / rounds, 4) if rounds else 0.0,
        "choices": each,
    }
