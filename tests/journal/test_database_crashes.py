"""The broker dies at boundaries of decide, journal, confirm and send, with a PostgreSQL journal. Another broker takes
its jobs. No token is lost or doubled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from specq.journal import JobEnded, Record, StoredJob
from specq.journal.postgres.store import PostgresJournal
from tests.journal.cluster import Database
from tests.journal.scene import Scene
from tests.journal.test_crashes import num_boundaries, play

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

Open = Callable[..., PostgresJournal]
TABLES = "jobs, active, groups, folded, results"


class Lives:
    """A journal as the scene uses it: each life of the broker opens it anew, when the lease of the former has ended."""

    def __init__(self, open_it: Open, database: Database) -> None:
        database.run(f"TRUNCATE {', '.join(f'specq.{name}' for name in TABLES.split(', '))}")
        self.num_ends: Counter[int] = Counter()
        self._open_it, self._database = open_it, database
        self._journal: PostgresJournal | None = None

    def write(self, records: Sequence[Record]) -> None:
        assert self._journal
        assert self._journal.write(records) == frozenset()
        self.num_ends.update(record.job_id for record in records if isinstance(record, JobEnded))

    def unfinished(self) -> list[StoredJob]:
        """Begin a life."""
        if self._journal is not None:
            self._database.expire(self._journal)
            self.end()
        self._journal = self._open_it()
        self._reader = self._journal.reader()
        return self._journal.take()

    def end(self) -> None:
        """Die, without ending the lease."""
        assert self._journal
        self._journal._session.close()
        self._reader.close()

    def find(self, job_id: int) -> StoredJob | None:
        """Return a job with the tokens that it has."""
        assert self._journal
        found = self._reader.find(job_id)
        if found is None or found.finish:
            return found
        tokens = {job.submit.job_id: job.token_ids for job in self._journal.unfinished()}
        return replace(found, token_ids=tokens[job_id])


@pytest.mark.parametrize("survives", [False, True])
def test_a_crash_at_each_boundary(open_it: Open, database: Database, survives: bool) -> None:
    """With the records on their way lost, or journaled unheard."""
    open_it().close()
    for boundary in range(1, num_boundaries() + 1):
        scene = Scene([boundary], survives=survives, journal=Lives(open_it, database))
        play(scene)
        assert scene.life == 2
        scene.journal.end()


def test_many_crashes(open_it: Open, database: Database) -> None:
    """A broker that dies time and again gets there all the same."""
    open_it().close()
    scene = Scene(range(3, 60, 7), survives=True, journal=Lives(open_it, database))
    play(scene)
    assert scene.life > 5
    scene.journal.end()
