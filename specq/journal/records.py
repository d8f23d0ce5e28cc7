"""The records that a journal is given about jobs, and the values that are read back. All are plain values.

Rule: records are written in the order of events. The `TokensAdded` of one job follow each other without a gap.

Log-probabilities are stored as bytes, one row per token. So rows of two rounds are joined by appending. A row is f32
log-probability of the token, i32[n] the likeliest tokens, f32[n] theirs, little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specq.protocol import LogprobRecord, Submit


def pack(record: LogprobRecord, start: int) -> bytes:
    """Return the rows of the tokens from `start` on. Empty if the record is off."""
    arrays = record.arrays(start)
    if not arrays:
        return b""
    shape = (len(arrays["logprobs"]), record.num_top)
    columns = (
        arrays["logprobs"].astype("<f4").view("<i4").reshape(-1, 1),
        arrays["top_ids"].astype("<i4").reshape(shape),
        arrays["top_logprobs"].astype("<f4").view("<i4").reshape(shape),
    )
    return np.hstack(columns).tobytes()


def unpack(rows: bytes, num_top: int) -> LogprobRecord:
    """Return the record that the rows were packed from."""
    record = LogprobRecord(num_top)
    if num_top >= 0:
        table = np.frombuffer(rows, "<i4").reshape(-1, 1 + 2 * num_top)
        record.tokens = table[:, :1].copy().view("<f4").ravel().tolist()
        record.top_ids = table[:, 1 : 1 + num_top].ravel().tolist()
        record.top = table[:, 1 + num_top :].copy().view("<f4").ravel().tolist()
    return record


class JobTaken(NamedTuple):
    """A job was accepted.

    Times are the journal's (`specq.journal.interface`). `deadline` 0: none. `owner`: its submitter.
    """

    submit: Submit
    owner: str
    submitted: float
    deadline: float

    @property
    def job_id(self) -> int:
        return self.submit.job_id


class JobBound(NamedTuple):
    """The weights that the job's text comes from. Only a verifier with the same weights may continue it.

    `placed` is the incarnation of the verifier that holds the job. 0: none, or the verifier gave it back in good order.
    """

    job_id: int
    weights: str
    placed: int = 0


class Crashes(NamedTuple):
    """The crashes that count against a job: see `specq.broker.workers.assignment`.

    - `total`: verifiers that crashed while they held the job.
    - `lone`: crashes since the job runs alone.
    - `length`: number of generated tokens of the job at the last crash.
    """

    total: int = 0
    lone: int = 0
    length: int = 0


NO_CRASHES = Crashes()


class JobCrashed(NamedTuple):
    """The crashes that count against a job from now on."""

    job_id: int
    crashes: Crashes


class TokensAdded(NamedTuple):
    """One round's tokens, after `base_len` generated ones. All arrays as bytes, little-endian.

    - `token_ids`: i32[m].
    - `origins`: u8[m] (`specq.protocol.logprobs`).
    - `logprobs`: rows of `specq.journal.records`, or empty. Those of the prompt come first, with the first tokens.
    - `num_nodes`: number of draft nodes that the round verified.
    - `cached_tokens`: with the first tokens, as in `JobStats`.
    """

    job_id: int
    base_len: int
    token_ids: bytes
    origins: bytes
    logprobs: bytes
    num_nodes: int
    cached_tokens: int = 0


class JobEnded(NamedTuple):
    """A job ended, with all its tokens. `code` and `reason` describe its failure, if any. `ended` as in JobTaken."""

    job_id: int
    finish: str
    code: str
    reason: str
    stats: dict[str, Any]
    ended: float
    token_ids: bytes
    origins: bytes
    logprobs: bytes


class JobDropped(NamedTuple):
    """A job was refused after it had been taken. Its id is free again."""

    job_id: int


Record = JobTaken | JobBound | JobCrashed | TokensAdded | JobEnded | JobDropped


def num_bytes(record: Record) -> int:
    """Return about how many bytes a record adds to a journal: those of its arrays, and of a job's grammar."""
    if isinstance(record, JobTaken):
        return record.submit.prompt_ids.nbytes + len(record.submit.params.grammar)
    if isinstance(record, (TokensAdded, JobEnded)):
        return len(record.token_ids) + len(record.origins) + len(record.logprobs)
    return 0


@dataclass(slots=True)
class StoredJob:
    """A job as the journal holds it, with the fields of the records.

    `rounds`, `draft_tokens` and `cached_tokens` count up to its last tokens. `misfit` names values that are now out of
    bounds, although an earlier broker accepted them. It is usually "". In `submit` these values have their defaults,
    and no verifier receives the job.

    - `epoch`: of a job that was taken, above all epochs of its sessions so far.
    - `holder`: of an unfinished job that was found, the address of the broker that has it. "": none is known.
    """

    submit: Submit
    owner: str = ""
    submitted: float = 0.0
    deadline: float = 0.0
    weights: str = ""
    placed: int = 0
    crashes: Crashes = NO_CRASHES
    token_ids: bytes = b""
    origins: bytes = b""
    logprobs: bytes = b""
    rounds: int = 0
    draft_tokens: int = 0
    cached_tokens: int = 0
    finish: str = ""
    code: str = ""
    reason: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    ended: float = 0.0
    misfit: str = ""
    epoch: int = 0
    holder: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4


class JobSummary(NamedTuple):
    """A line of a list of jobs. `finish` is empty until the job ends. Times are the journal's."""

    job_id: int
    label: str
    model: str
    owner: str
    priority: int
    finish: str
    num_tokens: int
    submitted: float
    ended: float
