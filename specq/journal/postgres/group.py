"""A group of records as the arguments of `specq.write_group`: what becomes of each job.

Rule: two groups with the same records are equal, so a group that is written again is recognized.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from psycopg.types.numeric import Int8

from specq.journal import rows
from specq.journal.postgres.arrays import blobs, floats, ints, texts
from specq.journal.records import JobBound, JobCrashed, JobDropped, JobEnded, JobTaken, Record, TokensAdded

Values = list[tuple[Any, ...]]

ROW_BYTES = 100  # about the size of a row of tokens without its arrays
_TAKEN = (ints, *(texts,) * 7, ints, floats, floats, blobs)
_BOUND = (ints, texts, ints)
_CRASHED = (ints, ints, ints, ints)
_ADDED = (ints, ints, blobs, blobs, blobs, ints, ints, ints)
_ENDED = (texts, floats, texts, texts, texts, ints, blobs, blobs, blobs, ints)
NUM_ARGUMENTS = 3 + sum(map(len, (_TAKEN, _BOUND, _CRASHED, _ADDED, _ENDED)))


@dataclass(slots=True)
class Life:
    """What a group has of one job, beside tokens, since it was last dropped. Rows are those of `rows`."""

    taken: tuple[Any, ...] | None = None
    bound: tuple[str, int] | None = None
    crashed: tuple[int, ...] | None = None
    ended: tuple[Any, ...] | None = None

    def add(self, record: JobTaken | JobBound | JobCrashed | JobEnded) -> None:
        """Add a record of the job."""
        if isinstance(record, JobTaken):
            self.taken = rows.job_row(record)
        elif isinstance(record, JobBound):
            self.bound = record.weights, record.placed
        elif isinstance(record, JobCrashed):
            self.crashed = tuple(record.crashes)
        else:
            self.ended = rows.result_row(record)


@dataclass(slots=True)
class RecordGroup:
    """A group of records by job. `added` has one row of tokens for each job that has not ended."""

    dropped: list[int] = field(default_factory=list)
    lives: dict[int, Life] = field(default_factory=dict)
    added: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Sequence[Record]) -> RecordGroup:
        """Return the group with these records."""
        group = cls(added={job_id: merged.row() for job_id, merged in rows.merge(records).items()})
        for record in records:
            if isinstance(record, JobDropped):
                life = group.lives.pop(record.job_id, None)
                if life is None or life.taken is None:
                    group.dropped.append(record.job_id)
            elif not isinstance(record, TokensAdded):
                group.lives.setdefault(record.job_id, Life()).add(record)
        return group

    @property
    def touched(self) -> set[int]:
        """The jobs that the broker must hold, with the jobs that it takes."""
        return self.lives.keys() | self.added.keys()

    @property
    def size(self) -> int:
        """About the bytes of all tokens."""
        return sum(
            [len(row[2]) + len(row[3]) + len(row[4]) for row in self.added.values()], len(self.added) * ROW_BYTES
        )

    def num_bytes(self) -> Iterator[tuple[int, int]]:
        """Yield jobs that have not ended, and about how many bytes they grow."""
        for job_id, life in self.lives.items():
            if life.taken and not life.ended:
                yield job_id, len(life.taken[-1]) + len(life.taken[6]) + rows.ROW_BYTES
        for job_id, row in self.added.items():
            yield job_id, len(row[2]) + len(row[3]) + len(row[4])

    def arguments(self) -> list[Any]:
        """Return the rest of the function's arguments, in its order."""
        lives = sorted(self.lives.items())  # two brokers that take the same jobs do so in the same order
        taken = [life.taken for _, life in lives if life.taken]
        bound = [(job_id, *life.bound) for job_id, life in lives if life.bound]
        crashed = [(job_id, *life.crashed) for job_id, life in lives if life.crashed]
        ended = [life.ended for _, life in lives if life.ended]
        return [
            ints(self.dropped),
            *_arrays(taken, _TAKEN),
            ints(list(self.touched)),
            *_arrays(bound, _BOUND),
            *_arrays(crashed, _CRASHED),
            *_arrays(self.added.values(), _ADDED),
            Int8(self.size),
            *_arrays(ended, _ENDED),
        ]


def _arrays(table: Iterable[tuple[Any, ...]], columns: Sequence[Any]) -> list[Any]:
    """Return an array for each column of a table."""
    by_column = list(zip(*table, strict=True)) or [()] * len(columns)
    return [make(values) for make, values in zip(columns, by_column, strict=True)]
