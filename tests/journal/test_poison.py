"""A job that kills its verifier, with real processes: the journal that holds it heals by itself, whoever dies beside.

`tests.journal.deadly` is the verifier: it ends at once, without a word, in a step with the magic token.
"""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specq import Client
from specq.client import Job
from specq.protocol.errors import JobError
from specq.testing import wait_until
from specq.testing.toy import toy_text
from tests.journal.deadly import BEATS, LOST, MAGIC, RAISES, STATUS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # many starts of processes, one after the other

DEADLY = (sys.executable, "-m", "tests.journal.deadly")
PROMPT = [5, 6, 7]
LENGTH = 60
MOST_STARTS = 7  # four deaths find the job out; one may be missed by a broker that was killed before it was journaled
PATIENCE_S = 60.0
ORDERS = ("workers first", "broker first", "at once")

Process = subprocess.Popen[bytes]
Spawn = Callable[..., Process]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "broker.journal"


def connect(address: str, tmp_path: Path) -> Client:
    return Client(address, timeout_s=PATIENCE_S, cache_dir=tmp_path / "cache")


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
    with pytest.raises(JobError, match=r"\d verifiers died of it, 2 of them with nothing else to do") as raised:
        poison.result(PATIENCE_S)
    assert raised.value.code == "engine"


def test_up_lives_through_it(spawn: Spawn, free_address: str, journal: Path, tmp_path: Path) -> None:
    """The worker is started again each time, and said to be; `specq up` serves on."""
    up = spawn("up", "5", free_address, str(journal), program=DEADLY)
    with connect(free_address, tmp_path) as client:
        client.wait_until_ready(timeout_s=PATIENCE_S)
        check(*submit(client))
        assert client.generate(token_ids=[9], max_tokens=5).token_ids == toy_text([9], 5)
    assert up.poll() is None
    said = up.output.read_text()
    assert said.count(f"ended with status {STATUS}; starting it again in") == 4
    assert "(4 of 5)" in said


def test_up_ends_where_it_is_in_vain_and_heals_when_started_again(
    spawn: Spawn, free_address: str, journal: Path, tmp_path: Path
) -> None:
    """Without a restart allowed, each death ends it with status 1; a few starts of it are enough all the same."""
    num_starts, up = 1, spawn("up", "0", free_address, str(journal), program=DEADLY)
    with connect(free_address, tmp_path) as client:
        client.wait_until_ready(timeout_s=PATIENCE_S)
        innocent, poison = submit(client)
        while not poison.done or not all(job.done for job in innocent):
            if up.poll() is not None:
                assert (up.returncode, num_starts < MOST_STARTS) == (1, True)
                assert "1 times within 600 s; stopping the others" in up.output.read_text()
                num_starts, up = num_starts + 1, spawn("up", "0", free_address, str(journal), program=DEADLY)
            time.sleep(0.02)
        check(innocent, poison)


def test_a_verifier_that_an_error_ends_says_so(spawn: Spawn, free_address: str, journal: Path, tmp_path: Path) -> None:
    """Its engine is lost: it ends with status 1, and its last word counts against its jobs at once, not as a leave."""
    spawn("broker", "--bind", free_address, "--journal", str(journal), "--liveness-ms", "600000", program=DEADLY)
    worker = spawn("worker", "--broker", free_address, "--name", "toy", program=DEADLY)
    with connect(free_address, tmp_path) as client:
        client.wait_until_ready(timeout_s=PATIENCE_S)
        client.submit(token_ids=[5, LOST], max_tokens=LENGTH)
        assert worker.wait(PATIENCE_S) == 1
        wait_until(lambda: crashes(journal) == [(1, 0)])


def test_a_step_that_raises_costs_no_process(spawn: Spawn, free_address: str, journal: Path, tmp_path: Path) -> None:
    """The job that makes it raise fails with the reason; those beside it have their texts from the same verifier."""
    up = spawn("up", "0", free_address, str(journal), program=DEADLY)
    with connect(free_address, tmp_path) as client:
        client.wait_until_ready(timeout_s=PATIENCE_S)
        innocent = [client.submit(token_ids=[*PROMPT, i], max_tokens=LENGTH) for i in (1, 2, 3)]
        raising = client.submit(token_ids=[5, RAISES], max_tokens=LENGTH)
        with pytest.raises(JobError, match=r"given up after 3 failures; .* could not be computed: ValueError: magic"):
            raising.result(PATIENCE_S)
        texts = [job.result(PATIENCE_S).token_ids for job in innocent]
    assert texts == [toy_text([*PROMPT, i], LENGTH) for i in (1, 2, 3)]
    assert up.poll() is None


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_broker_and_verifier_that_end_together(
    spawn: Spawn, free_address: str, journal: Path, tmp_path: Path, end: signal.Signals
) -> None:
    """Each time the verifier dies the broker is killed too, or told to stop, before it can notice."""
    beats = [value for name, ms in BEATS.items() for value in (f"--{name.replace('_', '-')}", str(ms))]

    def start() -> tuple[Process, Process]:
        broker = spawn("broker", "--bind", free_address, "--journal", str(journal), *beats, program=DEADLY)
        return broker, spawn("worker", "--broker", free_address, "--name", "toy", program=DEADLY)

    num_starts, (broker, worker) = 1, start()
    with connect(free_address, tmp_path) as client:
        client.wait_until_ready(timeout_s=PATIENCE_S)
        innocent, poison = submit(client)
        while not poison.done or not all(job.done for job in innocent):
            if worker.poll() is not None:
                assert (worker.returncode, num_starts < MOST_STARTS) == (STATUS, True)
                broker.send_signal(end)
                broker.wait(PATIENCE_S)
                num_starts, (broker, worker) = num_starts + 1, start()
            time.sleep(0.02)
        check(innocent, poison)


def test_ten_clean_restarts_of_everything_hold_nothing_against_a_job(
    spawn: Spawn, free_address: str, journal: Path, tmp_path: Path
) -> None:
    """Whatever is told to stop first: no death is counted, and the text is the right one."""
    beats = [value for name, ms in BEATS.items() for value in (f"--{name.replace('_', '-')}", str(ms))]
    with connect(free_address, tmp_path) as client:
        for life in range(11):
            before = num_journaled(journal) if life else 0
            broker = spawn("broker", "--bind", free_address, "--journal", str(journal), *beats, program=DEADLY)
            worker = spawn("worker", "--broker", free_address, "--name", "toy", program=DEADLY)
            if life == 0:
                client.wait_until_ready(timeout_s=PATIENCE_S)
                jobs = [client.submit(token_ids=[*PROMPT, i], max_tokens=1200) for i in (1, 2)]
            wait_until(lambda: num_journaled(journal) >= before + 20)  # noqa: B023
            if life < 10:
                stop(ORDERS[life % len(ORDERS)], broker, worker)
                assert crashes(journal) == [(0, 0), (0, 0)]
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
