"""Messages to a client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np

from specq.protocol import bounds
from specq.protocol.arrays import spans_of
from specq.protocol.messages.base import (
    Bytes,
    Count,
    Id,
    Ids,
    Lengths,
    Logprobs32,
    Message,
    Name,
    Origins,
    Probs,
    PromptRows,
    References,
    Tokens32,
    WithReason,
    check_sizes,
    empty,
)
from specq.protocol.params import SamplingParams
from specq.protocol.types import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Accepted(Message):
    """The job is in the journal."""

    TYPE: ClassVar[str] = "accepted"
    job_id: Id


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moved(Message):
    """The job is with another broker. The client repeats its request at this address.

    If no broker answers there, it repeats it at any other broker of the same journal.
    """

    TYPE: ClassVar[str] = "moved"
    job_id: Id
    address: Annotated[str, bounds.ENDPOINT]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobInfo(Message):
    """Describes a job to a client that sent `Follow`. Fields as in `Submit`.

    - ended: the job has ended.
    - elapsed_ms: from its submission to its end, or to now.
    """

    TYPE: ClassVar[str] = "job_info"
    job_id: Id
    params: SamplingParams
    model: Name = ""
    label: Annotated[str, bounds.LABEL] = ""
    ended: bool = False
    elapsed_ms: Annotated[int, bounds.ELAPSED_MS] = 0
    prompt_ids: Tokens32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobList(Message):
    """The answer to `ListJobs` with the same `skip`: a JSON list of `specq.broker.jobs.reports.ListedJob` objects."""

    TYPE: ClassVar[str] = "job_list"
    skip: Count = 0
    data: Bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens(Message):
    """New tokens of a job.

    - base_len: number of generated tokens before these, without the prompt.
    - origins u8[m]: the origin of each token, as codes of `specq.protocol.origins`.
    - finish: a finish reason or "".
    - stats: with the last message. Names as in `specq.broker.state.transcript.JobStats`.
    - logprobs, top_ids, top_logprobs: as in `Verdict`.
    - rounds i32[3n]: if the job asks for an explanation and it is still known. The rounds that began among these
      tokens, as rows of (place, step_us, wait_us).
    - rejected i32[4d]: likewise, the drafts that were verified there and not accepted. Rows of (place, token id,
      parent, code of its origin), as in `specq.protocol.explanation`.
    - rejected_probs f32[d]: likewise, their acceptance probabilities.
    - prompt_rows: with the first tokens, as in `Verdict`.
    """

    TYPE: ClassVar[str] = "tokens"
    job_id: Id
    base_len: Count
    finish: Annotated[str, bounds.FINISH] = ""
    stats: Annotated[dict[str, Any], bounds.STATS] = field(default_factory=dict)
    token_ids: Tokens32
    origins: Origins
    logprobs: Logprobs32 = empty("<f4")
    top_ids: Tokens32 = empty("<i4")
    top_logprobs: Logprobs32 = empty("<f4")
    rounds: References = empty("<i4")
    rejected: References = empty("<i4")
    rejected_probs: Probs = empty("<f4")
    prompt_rows: PromptRows = empty("<u1", 6)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobTokens(Message):
    """New tokens of n running jobs without explanation and log-probabilities. Other tokens travel as `Tokens`.

    The fields are those of `Tokens`. Each array holds the values of one job after the other.

    - job_ids i64[n], base_lens i32[n].
    - num_tokens i32[n]: how many elements of the arrays below belong to each job.
    - token_ids i32[tokens], origins u8[tokens].
    """

    TYPE: ClassVar[str] = "job_tokens"
    job_ids: Ids
    base_lens: Lengths
    num_tokens: Lengths
    token_ids: Tokens32
    origins: Origins

    def each(self) -> list[Tokens]:
        """Return them as single messages.

        Raises ProtocolError if the arrays do not fit together.
        """
        num_jobs, num_tokens = self.job_ids.size, int(self.num_tokens.sum(dtype=np.int64))
        check_sizes(self, ((num_jobs, ("base_lens", "num_tokens")), (num_tokens, ("token_ids", "origins"))))
        columns = self.job_ids.tolist(), self.base_lens.tolist(), spans_of(self.num_tokens)
        return [
            Tokens(job_id=job_id, base_len=base_len, token_ids=self.token_ids[span], origins=self.origins[span])
            for job_id, base_len, span in zip(*columns, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Failed(WithReason):
    """The job was refused or failed. `code` as in JobError."""

    TYPE: ClassVar[str] = "failed"
    job_id: Id
    code: Annotated[str, bounds.CODE]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Status(Message):
    """The broker's state as a JSON-able dict: models, workers, sessions, counters.

    `data`: the report as JSON, if it is too large for the header. See `specq.protocol.status_report`.
    """

    TYPE: ClassVar[str] = "status"
    report: Annotated[dict[str, Any], bounds.REPORT] = field(default_factory=dict)
    data: Bytes = empty("<u1")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace(WithReason):
    """What happened to a job, as JSON (`specq.broker.state.traces`), or the reason why that is unknown."""

    TYPE: ClassVar[str] = "trace"
    job_id: Id
    data: Bytes = empty("<u1")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizerChunk(Message):
    """A piece of a tokenizer, of at most 1 MiB. Also from verifier to broker.

    The pieces, joined in order, are a JSON object. It maps file names ("tokenizer.json", "tokenizer_config.json") to
    texts.
    """

    TYPE: ClassVar[str] = "tokenizer_chunk"
    model: ModelInfo
    index: Annotated[int, bounds.PIECE]
    count: Annotated[int, bounds.PIECES]
    data: Bytes
