"""What the client's core tells: new tokens, the end of a job, answers, failures. Each bears the key of its request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specq.protocol import JobError, LogprobRecord, ModelInfo


@dataclass(slots=True)
class Transcript:
    """What has been heard of a job: tokens, whether each was drafted, and when (seconds of the caller's clock)."""

    started: float
    token_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    logprobs: LogprobRecord = field(default_factory=lambda: LogprobRecord(-1))
    finish: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens of a job that were not known before; `accepted` flags those that a drafter guessed."""

    key: int
    token_ids: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JobDone:
    """A job ended as its transcript says."""

    key: int
    transcript: Transcript


@dataclass(frozen=True, slots=True)
class TokenizerReady:
    """A model's tokenizer is here: file names to texts."""

    key: str
    model: ModelInfo
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class StatusReport:
    """The broker's answer to `get_status`."""

    key: str
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A job or another request that will not be answered."""

    key: int | str
    error: JobError


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request is not answered yet, since something must come first: a broker, a verifier."""

    key: int | str
    what: str


Event = NewTokens | JobDone | TokenizerReady | StatusReport | RequestFailed | Waiting
