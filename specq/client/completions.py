"""How the events of a request's jobs become pieces and results.

Rule: a completion that fails harms no other. Where the answer is a list, the result of that completion has `error`; a
single completion raises JobError. All raise it if the broker is gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from specq.client.events import Event, JobDone, NewTokens, RequestFailed
from specq.client.request import Request, ServedModel
from specq.client.result import Piece, PieceMaker, Result, failed_result, make_result
from specq.protocol import BROKER_GONE


class Completions:
    """Turns the events of a request's jobs into pieces, and into results in order."""

    def __init__(self, request: Request, served: ServedModel, place: int = 0, num_known: Sequence[int] = ()) -> None:
        """`place`: of the request among several; `num_known`: tokens of each completion of which nothing is to be
        shown."""
        self._request, self._codec = request, served.codec
        known = [*num_known, *(0,) * len(request.submits)]
        self._positions: dict[int | str, int] = {job.job_id: i for i, job in enumerate(request.submits)}
        self._makers = [
            PieceMaker(served.codec, job.params, i, place, known[i], job.prompt_ids)
            for i, job in enumerate(request.submits)
        ]
        self._ends: dict[int, JobDone | RequestFailed] = {}

    def take(self, event: Event) -> None:
        """Take in an event; only those that end a completion matter."""
        if isinstance(event, (JobDone, RequestFailed)):
            self._ends[self._positions[event.key]] = event

    @property
    def ended(self) -> bool:
        return len(self._ends) == len(self._makers)

    def piece(self, event: Event, last: NewTokens | None = None) -> Piece:
        """Take in an event and return the piece that it makes; raises JobError if a single completion failed.

        last  the tokens that came with the end, which is the event
        """
        self.take(event)
        position = self._positions[event.key]
        if isinstance(event, NewTokens):
            return self._makers[position].piece(event)
        return self._makers[position].last(self._result(position), last)

    def results(self) -> list[Result]:
        """Return the results in order, when all have ended; raises JobError if a single completion failed."""
        return [self._result(position) for position in range(len(self._makers))]

    def _result(self, position: int) -> Result:
        end = self._ends[position]
        in_list = self._request.listed or self._request.in_batch
        if isinstance(end, JobDone):
            return make_result(self._request, position, end.transcript, self._codec)
        if in_list and end.error.code not in BROKER_GONE:
            return failed_result(self._request, position, str(end.error))
        raise end.error
