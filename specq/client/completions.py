"""Turn the events of a request's jobs into pieces and results.

Rule: a failed completion does not affect the others. If the answer is a list, the result of that completion has
`error`. A single completion raises JobError. Both raise JobError if the broker is gone.

A call may have a list of prompts, chats or lists of ids, as in vLLM's `LLM.generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specq.client.events import Event, JobDone, NewTokens, RequestFailed
from specq.client.request import (
    CHAT_VARIABLES,
    SOURCES,
    Request,
    ServedModel,
    check_values,
    not_one_source,
    read_request,
)
from specq.client.result import Piece, PieceMaker, Result, failed_result, make_result
from specq.protocol import BROKER_GONE, JobError


class Completions:
    """Turns the events of a request's jobs into pieces, and into results in order."""

    def __init__(self, request: Request, served: ServedModel, place: int = 0, num_known: Sequence[int] = ()) -> None:
        """Take the request, the model, and the tokens to skip.

        place      index of the request among several.
        num_known  number of tokens of each completion whose text is not shown.
        """
        self._request, self._codec = request, served.codec
        known = [*num_known, *(0,) * len(request.submits)]
        self._positions: dict[int | str, int] = {job.job_id: i for i, job in enumerate(request.submits)}
        self._makers = [
            PieceMaker(served.codec, job.params, i, place, known[i], job.prompt_ids, request.text)
            for i, job in enumerate(request.submits)
        ]
        self._ends: dict[int, JobDone | RequestFailed] = {}

    def take(self, event: Event) -> None:
        """Handle an event; only the end of a completion matters."""
        if isinstance(event, (JobDone, RequestFailed)):
            self._ends[self._positions[event.key]] = event

    @property
    def ended(self) -> bool:
        return len(self._ends) == len(self._makers)

    def piece(self, event: Event, last: NewTokens | None = None) -> Piece:
        """Handle an event and return its piece; raise JobError if a single completion failed.

        last  the tokens that arrived together with `event`, the end.
        """
        self.take(event)
        position = self._positions[event.key]
        if isinstance(event, NewTokens):
            return self._makers[position].piece(event)
        return self._makers[position].last(self._result(position), last)

    def results(self) -> list[Result]:
        """Return the results in order, when all have ended.

        Raises JobError if a single completion failed.
        """
        return [self._result(position) for position in range(len(self._makers))]

    def _result(self, position: int) -> Result:
        end = self._ends[position]
        in_list = self._request.listed or self._request.in_batch
        if isinstance(end, JobDone):
            return make_result(self._request, position, end.transcript, self._codec)
        if in_list and end.error.code not in BROKER_GONE:
            return failed_result(self._request, position, str(end.error))
        raise end.error


def read_requests(arguments: dict[str, Any], served: ServedModel) -> list[Request]:
    """Return the requests of a call: one, or one for each item of a list.

    The items are prompts, chats or lists of ids.

    The parameters apply to every prompt. `id` is then a list too, or None. If one of several prompts is wrong, the
    error names its place.
    """
    if not is_batch(arguments):
        return [read_request(arguments, served)]
    batch = split_batch(arguments)
    check_values({name: value for name, value in arguments.items() if name not in (*SOURCES, CHAT_VARIABLES)})
    requests = []
    for place, own in enumerate(batch):
        try:
            requests.append(replace(read_request(own, served), in_batch=True))
        except JobError as error:
            reason = f"prompt {place}: {error}" if len(batch) > 1 else str(error)
            raise JobError(reason, error.code, error.field) from None
    return requests


def is_batch(arguments: dict[str, Any]) -> bool:
    """Return whether these are the arguments of a list of prompts, perhaps empty."""
    return _is_list(arguments.get("prompt")) or any(_is_nested(arguments.get(name)) for name in SOURCES[1:])


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, np.ndarray))


def _is_nested(value: Any) -> bool:
    return _is_list(value) and len(value) > 0 and _is_list(value[0])


def split_batch(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of each prompt of a list.

    Raises JobError if there is more than one list.
    """
    given = [name for name in SOURCES if arguments.get(name) is not None]
    if len(given) != 1:
        raise not_one_source(given)
    prompts = arguments[given[0]]
    rest = {name: value for name, value in arguments.items() if name not in (given[0], "id", "job_key")}
    ids, key = _ids(arguments.get("id"), len(prompts)), arguments.get("job_key")
    keys = [None if key is None else f"{key} prompt {i}" for i in range(len(prompts))]
    return [
        {**rest, given[0]: prompt, "id": own, "job_key": job_key}
        for prompt, own, job_key in zip(prompts, ids, keys, strict=True)
    ]


def _ids(ids: Any, count: int) -> list[Any]:
    if ids is None:
        return [None] * count
    if not isinstance(ids, (list, tuple)) or len(ids) != count:
        raise JobError(f"id is {ids!r}; for {count} prompts it must be a list of {count} ids", field="id")
    return list(ids)
