"""A job that kills its verifier, with real processes: its journal heals by itself, also when others die.

`tests.journal.deadly` is the verifier: it ends at once, without a word, in a step with the magic token.
"""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specq import Client
from specq.client import Job
from specq.protocol.errors import JobError
from specq.testing import toy_text, wait_until
from tests.journal.deadly import BEATS, LOST, MAGIC, RAISES, STATUS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # many starts of processes, one after the other

DEADLY = (sys.executable, "-m", "tests.journal.deadly")
PROMPT = [5, 6, 7]
LENGTH = 60
MOST_STARTS = 7  # four deaths find the job out; one may be missed by a broker that was killed before it was journaled
PATIENCE_S = 60.0
OFTEN = [value for name, ms in BEATS.items() for value in (f"--{name.replace('_', '-')}", str(ms))]
ORDERS = ("workers first", "broker first", "at once")

Process = subprocess.Popen[bytes]


class House:
    """A journal, a client, and processes that are started by name."""

    def __init__(self, spawn: Callable[..., Process], address: str, journal: Path, client: Client) -> None:
        self.journal, self.client, self._address = journal, client, address
        self._spawn = lambda *arguments: spawn(*arguments, program=DEADLY)

    def up(self, most_restarts: int) -> Process:
        return self._spawn("up", str(most_restarts), self._address, str(self.journal))

    def broker(self, *options: str) -> Process:
        return self._spawn("broker", "--bind", self._address, "--journal", str(self.journal), *options)

    def worker(self) -> Process:
        return self._spawn("worker", "--broker", self._address, "--name", "toy")

    def wait_ready(self) -> None:
        self.client.wait_until_ready(timeout_s=PATIENCE_S)


@pytest.fixture
def house(spawn: Callable[..., Process], free_address: str, tmp_path: Path) -> Iterator[House]:
    with Client(free_address, timeout_s=PATIENCE_S, cache_dir=tmp_path / "cache") as client:
        yield House(spawn, free_address, tmp_path / "broker.journal", client)


def submit(client: Client) -> tuple[list[Job], Job]:
    """Submit three innocent jobs and, amid them, one that kills."""
    innocent = [client.submit(token_ids=[*PROMPT, 1], max_tokens=LENGTH)]
    poison = client.submit(token_ids=[5, MAGIC], max_tokens=LENGTH)
    return [*innocent, *(client.submit(token_ids=[*PROMPT, i], max_tokens=LENGTH) for i in (2, 3))], poison


def check(innocent: list[Job], poison: Job) -> None:
    """The one failed, with the reason; the others have their texts."""
    assert [job.result(PATIENCE_S).token_ids for job in innocent] == [
        toy_text([*PROMPT, i], LENGTH) for i in range(1, 4)
    ]
    with pytest.raises(JobError, match=r"\d verifiers crashed because of it, 2 of them with only this job") as raised:
        poison.result(PATIENCE_S)
    assert raised.value.code == "engine"


def test_up_lives_through_it(house: House) -> None:
    """The worker is started again each time, and said to be; `specq up` serves on."""
    up = house.up(5)
    house.wait_ready()
    check(*submit(house.client))
    assert house.client.generate(token_ids=[9], max_tokens=5).token_ids == toy_text([9], 5)
    assert up.poll() is None
    said = up.output.read_text()
    assert said.count(f"ended with status {STATUS}; restarting it in") == 4
    assert "(4 of 5)" in said


def test_up_ends_where_it_is_in_vain_and_heals_when_started_again(house: House) -> None:
    """Without a restart allowed, each death ends it with status 1; a few starts of it are enough all the same."""
    num_starts, up = 1, house.up(0)
    house.wait_ready()
    innocent, poison = submit(house.client)
    while not all(job.done for job in (poison, *innocent)):
        if up.poll() is not None:
            assert (up.returncode, num_starts < MOST_STARTS) == (1, True)
            assert "1 times within 600 s; stopping the others" in up.output.read_text()
            num_starts, up = num_starts + 1, house.up(0)
        time.sleep(0.02)
    check(innocent, poison)


def test_a_verifier_that_an_error_ends_says_so(house: House) -> None:
    """Its engine is lost: it ends with status 1, and its last word counts against its jobs at once, not as a leave."""
    house.broker("--liveness-ms", "600000")
    worker = house.worker()
    house.wait_ready()
    house.client.submit(token_ids=[5, LOST], max_tokens=LENGTH)
    assert worker.wait(PATIENCE_S) == 1
    wait_until(lambda: crashes(house.journal) == [(1, 0)])


def test_a_step_that_raises_costs_no_process(house: House) -> None:
    """The job that makes it raise fails with the reason; those beside it have their texts from the same verifier."""
    up, client = house.up(0), house.client
    house.wait_ready()
    innocent = [client.submit(token_ids=[*PROMPT, i], max_tokens=LENGTH) for i in (1, 2, 3)]
    raising = client.submit(token_ids=[5, RAISES], max_tokens=LENGTH)
    with pytest.raises(JobError, match=r"gave up after 3 failures; .* could not be computed: ValueError: magic"):
        raising.result(PATIENCE_S)
    texts = [job.result(PATIENCE_S).token_ids for job in innocent]
    assert texts == [toy_text([*PROMPT, i], LENGTH) for i in (1, 2, 3)]
    assert up.poll() is None


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_broker_and_verifier_that_end_together(house: House, end: signal.Signals) -> None:
    """At each verifier death the broker is also killed, or stopped, before it can notice."""
    num_starts, broker, worker = 1, house.broker(*OFTEN), house.worker()
    house.wait_ready()
    innocent, poison = submit(house.client)
    while not all(job.done for job in (poison, *innocent)):
        if worker.poll() is not None:
            assert (worker.returncode, num_starts < MOST_STARTS) == (STATUS, True)
            broker.send_signal(end)
            broker.wait(PATIENCE_S)
            num_starts, broker, worker = num_starts + 1, house.broker(*OFTEN), house.worker()
        time.sleep(0.02)
    check(innocent, poison)


def test_ten_clean_restarts_count_no_deaths_for_a_job(house: House) -> None:
    """In any order of stops: no death is counted, and the text is right."""
    for life in range(11):
        before = num_journaled(house.journal) if life else 0
        broker, worker = house.broker(*OFTEN), house.worker()
        if life == 0:
            house.wait_ready()
            jobs = [house.client.submit(token_ids=[*PROMPT, i], max_tokens=1200) for i in (1, 2)]
        wait_until(lambda: num_journaled(house.journal) >= before + 20)  # noqa: B023
        if life < 10:
            stop(ORDERS[life % len(ORDERS)], broker, worker)
            assert crashes(house.journal) == [(0, 0), (0, 0)]
    assert [job.result(PATIENCE_S).token_ids for job in jobs] == [toy_text([*PROMPT, i], 1200) for i in (1, 2)]


def stop(order: str, broker: Process, worker: Process) -> None:
    processes = [broker, worker] if order == "broker first" else [worker, broker]
    for process in processes:
        process.terminate()
        if order != "at once":
            process.wait(PATIENCE_S)
    assert [process.wait(PATIENCE_S) for process in processes] == [0, 0]


def num_journaled(journal: Path) -> int:
    """Return how many tokens the journal has of the job that has the fewest."""
    with sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro", uri=True) as connection:
        found = connection.execute("SELECT sum(length(token_ids)) / 4 FROM commits GROUP BY job_id").fetchall()
    return min(count for (count,) in found) if len(found) == 2 else 0


def crashes(journal: Path) -> list[tuple[int, int]]:
    """Return of each unfinished job the deaths held against it, and by whom the next broker will think that it is
    held."""
    with sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro", uri=True) as connection:
        return connection.execute("SELECT deaths, placed FROM active").fetchall()
