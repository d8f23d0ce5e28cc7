"""From a core's events to the pieces and results of a request's jobs.

The events are new tokens, the end of a job, answers, failures. Each has the key of its request.

Rule: a failed completion does not affect the others. If the answer is a list, the result of that completion has
`error`. A single completion raises JobError. Both raise JobError if the broker is gone.

A call may have a list of prompts, chats or lists of ids, as in vLLM's `LLM.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

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
from specq.protocol import (
    BROKER_GONE,
    ORIGIN_CODES,
    OWN,
    JobError,
    JobInfo,
    LogprobRecord,
    ModelInfo,
    RejectedDraft,
    RoundTime,
    Tokens,
    origin_names,
    read_rejected,
)

_OWN = bytes([ORIGIN_CODES[OWN]])


@dataclass(slots=True)
class ReceivedTranscript:
    """The known part of a job's output.

    Tokens, the origin of each (`specq.protocol.origins`), and the times, in seconds of the caller's clock.
    """

    started: float
    token_ids: list[int] = field(default_factory=list)
    origins: bytearray = field(default_factory=bytearray)
    logprobs: LogprobRecord = field(default_factory=lambda: LogprobRecord(-1))
    prompt_rows: bytes = b""  # see `specq.protocol.logprobs`
    finish: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    first_token: float | None = None
    finished: float | None = None

    def extend(self, message: Tokens, num_known: int, now: float) -> NewTokens | None:
        """Append a message's tokens after the first `num_known`.

        Returns them, or None if there are none.
        """
        new = tuple(message.token_ids.tolist()[num_known:])
        if not new:
            return None
        origins = message.origins.tobytes()[num_known:].ljust(len(new), _OWN)[: len(new)]
        start = len(self.token_ids)
        self.token_ids.extend(new)
        self.origins += origins
        self.logprobs.extend(message, num_known)
        self.prompt_rows = self.prompt_rows or message.prompt_rows.tobytes()
        self.first_token = self.first_token or now
        rejected, rounds = read_rejected(message)
        fresh = tuple(one for one in rejected if one.place >= start), tuple(one for one in rounds if one.place >= start)
        return self._since(start, message.job_id, *fresh)

    def so_far(self, key: int) -> list[NewTokens]:
        """Return all known tokens, for a caller that joins late."""
        return [self._since(0, key)] if self.token_ids else []

    def _since(
        self, start: int, key: int, rejected: tuple[RejectedDraft, ...] = (), rounds: tuple[RoundTime, ...] = ()
    ) -> NewTokens:
        new, origins = tuple(self.token_ids[start:]), origin_names(self.origins[start:])
        prompt_rows = b"" if start else self.prompt_rows
        return NewTokens(key, new, origins, tuple(self.logprobs.to_list(new, start)), rejected, rounds, prompt_rows)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """New tokens of a job.

    origins   the origin of each: names of `specq.protocol.ORIGINS`.
    logprobs  as in `Result`; empty if not requested.
    rejected, rounds  present if the job has the option `explain`.
    prompt_rows  with the first tokens: the prompt's log-probabilities, as in `ReceivedTranscript`.
    ends      whether the job's end follows at once.
    """

    key: int
    token_ids: tuple[int, ...]
    origins: tuple[str, ...]
    logprobs: tuple[dict[str, Any], ...] = ()
    rejected: tuple[RejectedDraft, ...] = ()
    rounds: tuple[RoundTime, ...] = ()
    prompt_rows: bytes = b""
    ends: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class JobDone:
    """A job has ended; its transcript holds the reason."""

    key: int
    transcript: ReceivedTranscript


@dataclass(frozen=True, slots=True)
class JobAccepted:
    """The broker has accepted a detached job."""

    key: int


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job that was looked up: its description, tokens so far, and error, if any.

    The times of the transcript are the broker's, in seconds since submission. `started` is 0, and `finished` is the
    end.
    """

    key: int
    info: JobInfo | None
    transcript: ReceivedTranscript
    error: JobError | None = None

    @property
    def ended(self) -> bool:
        return bool(self.transcript.finish) or self.error is not None


@dataclass(frozen=True, slots=True)
class JobPage:
    """The broker's answer to `list_jobs`, as JSON."""

    key: str
    data: bytes


@dataclass(frozen=True, slots=True)
class TokenizerReady:
    """A model's tokenizer has arrived: file names to texts."""

    key: str
    model: ModelInfo
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class StatusReport:
    """The broker's answer to `get_status`."""

    key: str
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TraceReport:
    """The broker's answer to `get_trace`, as JSON."""

    key: str
    data: bytes


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A job or another request has failed and gets no other answer."""

    key: int | str
    error: JobError


@dataclass(frozen=True, slots=True)
class AwaitedModel:
    """A request still waits for a broker, or for a verifier."""

    key: int | str
    what: str


E = TypeVar("E")
LAST = (
    JobDone,
    JobAccepted,
    FoundJob,
    JobPage,
    TokenizerReady,
    StatusReport,
    TraceReport,
    RequestFailed,
)  # events that end a request
Event = (
    NewTokens
    | AwaitedModel
    | JobDone
    | JobAccepted
    | FoundJob
    | JobPage
    | TokenizerReady
    | StatusReport
    | TraceReport
    | RequestFailed
)


def answered(event: Event, kind: type[E]) -> E:
    """Return the event as the expected kind of answer; raise JobError if the request failed."""
    if isinstance(event, RequestFailed):
        raise event.error
    assert isinstance(event, kind), "only these two answer a request"
    return event


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
