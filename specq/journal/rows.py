"""Records and stored jobs as rows of a journal's tables, and back. All kinds of journals have these columns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import orjson

from specq.journal.records import JobDropped, JobEnded, JobTaken, Record, StoredJob, TokensAdded, num_bytes
from specq.protocol import (
    ConfigError,
    JobError,
    RenamedCounts,
    SamplingParams,
    Speculation,
    Submit,
    Values,
)

V = TypeVar("V", bound=Values)

JOB = "job_id, owner, tenant, cache_salt, label, model, params, speculation, priority, submitted, deadline, prompt_ids"
COMMIT = "job_id, base_len, token_ids, origins, logprobs, rounds, draft_tokens, cached_tokens"
RESULT = "weights, finish, ended, code, reason, stats, token_ids, origins, logprobs"
SUMMARY = "job_id, label, model, owner, priority, finish, length(token_ids) / 4, submitted, ended"
ACTIVE_SUMMARY = "job_id, label, model, owner, priority, '', coalesce(num_tokens, 0), submitted, 0.0"
ROW_BYTES = 200  # about the size of a result without its arrays


def job_row(record: JobTaken) -> tuple[Any, ...]:
    """Return the values of a new row of `jobs`, in the order of `JOB`."""
    submit = record.submit
    return (
        submit.job_id,
        record.owner,
        submit.tenant,
        submit.cache_salt,
        submit.label,
        submit.model,
        orjson.dumps(submit.params.to_dict()).decode(),
        orjson.dumps(submit.speculation.to_dict()).decode(),
        submit.priority,
        record.submitted,
        record.deadline,
        submit.prompt_ids.astype("<i4").tobytes(),
    )


def result_row(record: JobEnded) -> tuple[Any, ...]:
    """Return the values of a row of `results`: finish, ended, code, reason, stats, num_bytes, arrays, job_id."""
    stats = orjson.dumps(record.stats).decode()
    arrays = (record.token_ids, record.origins, record.logprobs)
    size = num_bytes(record) + len(stats) + len(record.reason) + ROW_BYTES
    return (record.finish, record.ended, record.code, record.reason, stats, size, *arrays, record.job_id)


class Merged:
    """The rounds of one job within a group of records, merged to one row."""

    def __init__(self, first: TokensAdded) -> None:
        self.job_id, self.base_len = first.job_id, first.base_len
        self._rounds: list[TokensAdded] = [first]

    def add(self, record: TokensAdded) -> None:
        """Append the next round."""
        self._rounds.append(record)

    def row(self) -> tuple[Any, ...]:
        """Return the values of a row of `commits`, in the order of `COMMIT`."""
        rounds = self._rounds
        if len(rounds) == 1:
            one = rounds[0]
            return (
                self.job_id,
                self.base_len,
                one.token_ids,
                one.origins,
                one.logprobs,
                1,
                one.num_nodes,
                one.cached_tokens,
            )
        return (
            self.job_id,
            self.base_len,
            b"".join([one.token_ids for one in rounds]),
            b"".join([one.origins for one in rounds]),
            b"".join([one.logprobs for one in rounds]),
            len(rounds),
            sum([one.num_nodes for one in rounds]),
            max([one.cached_tokens for one in rounds]),
        )


def merge(records: Sequence[Record]) -> dict[int, Merged]:
    """Merge the token records by job, without jobs that end or are dropped in the same group."""
    merged: dict[int, Merged] = {}
    for record in records:
        if isinstance(record, TokensAdded):
            known = merged.get(record.job_id)
            if known is None:
                merged[record.job_id] = Merged(record)
            else:
                known.add(record)
        elif isinstance(record, (JobEnded, JobDropped)):
            merged.pop(record.job_id, None)
    return merged


def stored_job(row: tuple[Any, ...]) -> StoredJob:
    """Return the job in a row of `JOB`, without its tokens.

    Raises ConfigError for an unreadable row. A job with values that are now out of bounds is a `misfit`.
    """
    job_id, owner, tenant, cache_salt, label, model, params, speculation, priority, submitted, deadline, prompt_ids = (
        row
    )
    try:
        (sampling, reason), (drafting, other) = _values(SamplingParams, params), _values(Speculation, speculation)
        submit = Submit(
            job_id=job_id,
            params=sampling,
            speculation=drafting,
            model=model,
            label=label,
            tenant=tenant,
            cache_salt=cache_salt,
            priority=priority,
            prompt_ids=np.frombuffer(prompt_ids, "<i4"),
        )
    except (JobError, ValueError) as error:
        raise ConfigError(f"job {job_id} cannot be read: {error}") from None
    return StoredJob(submit, owner, submitted, deadline, misfit=reason or other)


def _values(cls: type[V], text: str) -> tuple[V, str]:
    """Return stored values and "". If some are out of bounds now, return the valid ones and the reason.

    Raises JobError for unknown names. A later specq wrote them, and may continue the job.
    """
    values = orjson.loads(text)
    cls.check_names(values)
    try:
        return cls.from_dict(values), ""
    except JobError as error:
        reason = str(error)
    kept: dict[str, Any] = {}
    for name, value in values.items():
        with suppress(JobError):
            cls.from_dict(kept | {name: value})
            kept[name] = value
    return cls.from_dict(kept), reason


def add_commit(job: StoredJob, row: tuple[int, int, bytes, bytes, bytes, int, int, int]) -> None:
    """Append a row of `COMMIT`. A row behind a gap is left out, and its tokens are generated again."""
    _, base_len, token_ids, origins, logprobs, rounds, draft_tokens, cached_tokens = row
    if base_len == job.num_tokens:
        job.token_ids += token_ids
        job.origins += origins
        job.logprobs += logprobs
        job.rounds += rounds
        job.draft_tokens += draft_tokens
        job.cached_tokens = max(job.cached_tokens, cached_tokens)


def add_result(job: StoredJob, row: tuple[Any, ...]) -> None:
    """Add a row of `RESULT`."""
    job.weights, job.finish, job.ended, job.code, job.reason, stats, *arrays = row
    job.token_ids, job.origins, job.logprobs = arrays
    job.stats = RenamedCounts.renamed(orjson.loads(stats))
