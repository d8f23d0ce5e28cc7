"""Real brokers with a PostgreSQL journal, which are killed, and a job that kills verifiers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from specq import Client
from specq.testing import toy_text, wait_until
from tests.journal.cluster import Database
from tests.journal.test_poison import MOST_STARTS, OFTEN, PATIENCE_S, PROMPT, STATUS, House, Process
from tests.journal.test_poison import check as check_poison
from tests.journal.test_poison import submit as submit_with_poison

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture
def house(spawn: Callable[..., Process], free_address: str, tmp_path: Path, database: Database) -> House:
    client = Client(free_address, timeout_s=PATIENCE_S, cache_dir=tmp_path / "cache")
    yield House(spawn, free_address, database.address, client)
    client.close()


def num_tokens(database: Database) -> int:
    return sum(size for (size,) in database.run("SELECT octet_length(token_ids) / 4 FROM specq.commits"))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_broker_that_ends_loses_nothing(house: House, database: Database, end: signal.Signals) -> None:
    """The next one takes its jobs: at once, or when the lease has ended."""
    broker, _ = house.broker(*OFTEN), house.worker()
    house.wait_ready()
    jobs = [house.client.submit(token_ids=[*PROMPT, i], max_tokens=400) for i in range(3)]
    for _ in range(3):
        before = num_tokens(database)
        wait_until(lambda: num_tokens(database) > before + 20, PATIENCE_S)  # noqa: B023
        broker.send_signal(end)
        broker.wait(PATIENCE_S)
        broker = house.broker(*OFTEN)
    assert [job.result(PATIENCE_S).token_ids for job in jobs] == [toy_text([*PROMPT, i], 400) for i in range(3)]
    wait_until(lambda: database.run("SELECT count(*) FROM specq.results") == [(3,)])
    assert database.run("SELECT count(*) FROM specq.commits") == [(0,)]


def test_broker_and_verifier_that_end_together(house: House) -> None:
    """At each verifier death the broker is also killed, before it can notice."""
    num_starts, broker, worker = 1, house.broker(*OFTEN), house.worker()
    house.wait_ready()
    innocent, poison = submit_with_poison(house.client)

    def is_over() -> bool:
        return worker.poll() is not None or all(job.done for job in (poison, *innocent))

    while True:
        wait_until(is_over, PATIENCE_S)
        if worker.poll() is None:
            break
        assert (worker.returncode, num_starts < MOST_STARTS) == (STATUS, True)
        broker.kill()
        broker.wait(PATIENCE_S)
        num_starts, broker, worker = num_starts + 1, house.broker(*OFTEN), house.worker()
    check_poison(innocent, poison)
