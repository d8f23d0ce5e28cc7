"""Copy a journal to another one, of the same or another kind: results, and unfinished jobs with their tokens.

Rule: no broker uses either journal meanwhile. Both are opened as brokers do it, so a journal in use is refused.

Ages are kept: times are shifted from the one journal's time to the other's. The target's epochs are above the source's,
so the next broker's sessions replace former ones at verifiers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from specq.journal.check import require_journal
from specq.journal.interface import EPOCHS, Journal, JournalReader, Opening, open_journal, take_all
from specq.journal.records import (
    NO_CRASHES,
    JobBound,
    JobCrashed,
    JobEnded,
    JobTaken,
    Record,
    StoredJob,
    TokensAdded,
    num_bytes,
)
from specq.protocol import ConfigError

PAGE = 200  # results that are listed at once
GROUP_BYTES = 4 << 20  # about the size of a group of records


class Copied(NamedTuple):
    """Numbers of copied jobs. `num_misfits`: of results with values that are out of bounds now, and were left out."""

    num_unfinished: int
    num_results: int
    num_misfits: int


def copy_journal(source_address: str, target_address: str) -> Copied:
    """Copy all jobs to an empty journal.

    Raises ConfigError if the source does not exist, if a broker uses one of them, if the target is not empty, or if a
    job is unreadable.
    """
    require_journal(source_address)
    source = open_journal(source_address, Opening(owner="specq journal copy"))
    try:
        unfinished = _take_all(source)
        floor = max([source.epoch, *(job.epoch for job in unfinished)]) + EPOCHS
        target = open_journal(target_address, Opening(owner="specq journal copy", floor=floor))
        try:
            return _copy(source, target, unfinished)
        finally:
            target.close()
    finally:
        source.close()


def _take_all(source: Journal) -> list[StoredJob]:
    """Return all unfinished jobs, which no other broker holds."""
    others = source.renew()
    taken = take_all(source)
    missing = {job.submit.job_id for job in source.unfinished()} - {job.submit.job_id for job in taken}
    if others or missing:
        raise ConfigError(
            f"the journal {source.address} is in use: brokers at {', '.join(others) or 'other places'} hold jobs in "
            f"it; stop them, and wait until their leases have ended"
        )
    for job in taken:
        if job.misfit:
            raise ConfigError(f"job {job.submit.job_id} cannot be copied before it has ended: {job.misfit}")
    return taken


def _copy(source: Journal, target: Journal, unfinished: list[StoredJob]) -> Copied:
    reader, written = source.reader(), target.reader()
    try:
        if target.take() or target.unfinished() or written.finished(1):
            raise ConfigError(f"the journal {target.address} is not empty; name a new one")
        if others := target.renew():
            raise ConfigError(f"the journal {target.address} is in use by brokers at {', '.join(others)}; stop them")
        shift = target.offset - source.offset
        num_results = num_misfits = 0
        group: list[Record] = []
        for job in _results(reader):
            num_results, num_misfits = num_results + 1, num_misfits + bool(job.misfit)
            group = _add(target, group, _ended(job, shift), source)
        for job in unfinished:
            group = _add(target, group, _running(job, shift), source)
        _write(target, group)
        num_written = sum(1 for _ in _pages(written)), len(target.unfinished())
        if num_written != (num_results, len(unfinished)):
            raise ConfigError(f"the journal {target.address} has other jobs than it was given; another program uses it")
        return Copied(len(unfinished), num_results, num_misfits)
    finally:
        reader.close()
        written.close()


def _add(target: Journal, group: list[Record], records: Iterable[Record], source: Journal) -> list[Record]:
    """Return a group with more records. A large one is written first."""
    if sum(map(num_bytes, group)) > GROUP_BYTES or len(group) > PAGE:
        _write(target, group)
        source.renew()
        target.renew()
        group = []
    return [*group, *records]


def _write(target: Journal, group: list[Record]) -> None:
    if target.write(group):
        raise ConfigError(f"the journal {target.address} has such jobs already; another program uses it")


def _pages(reader: JournalReader) -> Iterator[int]:
    """Yield the ids of all results."""
    skip = 0
    while page := reader.finished(PAGE, skip):
        yield from (line.job_id for line in page)
        skip += len(page)


def _results(reader: JournalReader) -> Iterator[StoredJob]:
    for job_id in _pages(reader):
        job = reader.find(job_id)
        if job is None:
            raise ConfigError(f"job {job_id} was forgotten meanwhile; a broker uses the journal")
        yield job


def _begun(job: StoredJob, shift: float) -> Iterator[Record]:
    """Yield the records of a job but those of its tokens and its end."""
    job_id = job.submit.job_id
    yield JobTaken(job.submit, job.owner, job.submitted + shift, job.deadline + shift if job.deadline else 0.0)
    if job.weights or job.placed:
        yield JobBound(job_id, job.weights, job.placed)
    if job.crashes != NO_CRASHES:
        yield JobCrashed(job_id, job.crashes)


def _running(job: StoredJob, shift: float) -> Iterator[Record]:
    """Yield the records of an unfinished job. Its rounds after the first have no tokens, and are counted."""
    yield from _begun(job, shift)
    if job.rounds:
        first = TokensAdded(
            job.submit.job_id, 0, job.token_ids, job.origins, job.logprobs, job.draft_tokens, job.cached_tokens
        )
        empty = TokensAdded(job.submit.job_id, job.num_tokens, b"", b"", b"", 0)
        yield from (first, *[empty] * (job.rounds - 1))


def _ended(job: StoredJob, shift: float) -> Iterator[Record]:
    yield from _begun(replace(job, placed=0), shift)
    yield JobEnded(
        *(job.submit.job_id, job.finish, job.code, job.reason, job.stats, job.ended + shift),
        *(job.token_ids, job.origins, job.logprobs),
    )
