"""The events of the client's core: new tokens, the end of a job, answers, failures. Each has the key of its request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from specq.protocol import (
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
