"""What the tests of the PostgreSQL journal share: servers, a database each, journals that are closed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from specq.journal import Opening, open_journal
from specq.protocol import JournalBusyError

if TYPE_CHECKING:
    from tests.journal.cluster import Cluster, Database


@pytest.fixture
def cluster() -> Cluster:
    """The servers of `make test-cluster`."""
    from tests.journal.cluster import running  # imports psycopg

    return running()


@pytest.fixture
def database(cluster: Cluster) -> Database:
    """A new database."""
    return cluster.new_database()


@pytest.fixture
def open_it(database: Database) -> Iterator[Any]:
    """Open journals in the database, and close them at the end."""
    opened: list[Any] = []

    def open_it(at: str = "", **options: Any) -> Any:
        opened.append(open_journal(at or database.address, Opening(**options)))
        return opened[-1]

    yield open_it
    for journal in opened:
        with suppress(JournalBusyError):
            journal.close()
