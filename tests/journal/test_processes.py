"""A real broker, killed, frozen, cut off from its disk; a verifier with a toy model; clients that must not notice."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from specq import Client
from specq.client import Job
from specq.config.values import free_address
from specq.journal.sqlite.connection import connect
from specq.protocol.errors import JobError
from specq.testing import toy_text, wait_until
from tests.freezing import freeze_between_writes

pytestmark = pytest.mark.slow

TOY = (sys.executable, "-m", "tests.journal.toy_target")
BEATS = ("--heartbeat-ms", "100", "--liveness-ms", "2000")
PROMPT = [5, 6, 7]
LENGTH = 400
LONG = 1900  # still running where an answer of LENGTH is nearly there, also if this process is late by seconds
STEP_MS = "4"
PATIENCE_S = 60.0

Process = subprocess.Popen[bytes]
StartBroker = Callable[..., Process]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "broker.journal"


@pytest.fixture
def start_broker(spawn: Callable[..., Process], free_address: str, journal: Path) -> StartBroker:
    """Start a broker on the test's journal."""

    def start(*options: str, address: str = free_address) -> Process:
        return spawn("broker", "--bind", address, "--journal", str(journal), *BEATS, *options)

    return start


@pytest.fixture
def client(spawn: Callable[..., Process], free_address: str, tmp_path: Path) -> Iterator[Client]:
    """A client, and a toy verifier, of the test's broker."""
    spawn(free_address, STEP_MS, program=TOY)
    with Client(free_address, timeout_s=PATIENCE_S, cache_dir=tmp_path / "cache") as connected:
        yield connected


def said(process: Process) -> str:
    return process.output.read_text()


def test_a_killed_broker_goes_on_where_it_was(start_broker: StartBroker, client: Client, journal: Path) -> None:
    """Killed three times in the midst of jobs, it loses and doubles nothing; clients and workers find it again."""
    broker = start_broker()
    client.wait_until_ready()
    jobs = [client.submit(token_ids=[*PROMPT, i], max_tokens=LONG, id=i) for i in range(1, 9)]
    stream = client.stream(token_ids=PROMPT, max_tokens=LENGTH)
    seen: list[int] = []
    for kills in (1, 2, 3):
        while len(seen) < kills * LENGTH // 4:
            seen += next(stream).token_ids
        broker.kill()
        broker.wait()
        assert not all(job.done for job in jobs)
        broker = start_broker()
    for piece in stream:
        seen += piece.token_ids
    assert seen == toy_text(PROMPT, LENGTH)
    assert [job.result(PATIENCE_S).token_ids for job in jobs] == [toy_text([*PROMPT, i], LONG) for i in range(1, 9)]
    assert "jobs" not in client.status()["counts"]  # the last broker took no job: it had them all from the journal


def test_tenants_keep_their_shares_when_the_broker_is_killed(
    spawn: Callable[..., Process], start_broker: StartBroker, free_address: str, tmp_path: Path
) -> None:
    """Of ten places ann has five: she gets no sixth, before or after; another tenant, and the gateway itself, get
    one."""
    broker = start_broker("--max-jobs", "10")
    spawn(free_address, "20", program=TOY)
    with Client(free_address, timeout_s=PATIENCE_S, cache_dir=tmp_path / "cache") as client:
        client.wait_until_ready()
        running = [client.submit(token_ids=[*PROMPT, i], max_tokens=LONG, tenant="ann") for i in range(5)]
        wait_until(lambda: client.status()["jobs"]["running"] == 5)
        assert "of one key" in str(refusal(client, tenant="ann"))
        broker.kill()
        broker.wait()
        start_broker("--max-jobs", "10")
        assert "of one key" in str(refusal(client, tenant="ann"))
        for tenant in ("ben", ""):
            assert len(client.generate(token_ids=[9], max_tokens=4, tenant=tenant).token_ids) == 4
        assert not any(job.done for job in running)


def test_a_second_broker_is_refused(start_broker: StartBroker, free_address: str) -> None:
    """It says who has the journal, and ends with status 2."""
    first = start_broker()
    wait_until(lambda: "broker_started" in said(first))
    second = start_broker(address="tcp://127.0.0.1:*")
    assert second.wait(PATIENCE_S) == 2
    assert f"in use by another broker (process {first.pid}, listening on {free_address})" in said(second)
    assert first.poll() is None


def test_a_frozen_broker_finds_that_it_lost(
    start_broker: StartBroker, client: Client, journal: Path, tmp_path: Path
) -> None:
    """While it is frozen another broker takes over its journal. It resumes and ends without a message."""
    first = start_broker()
    client.wait_until_ready()
    stream = client.stream(token_ids=PROMPT, max_tokens=LONG)
    assert next(stream).token_ids
    freeze_between_writes(first, journal)
    refused = start_broker(address="tcp://127.0.0.1:*")
    assert refused.wait(PATIENCE_S) == 2
    assert "--take-over" in said(refused)
    address = free_address()
    second = start_broker("--take-over", address=address)
    with Client(address, timeout_s=PATIENCE_S, cache_dir=tmp_path / "cache") as other:
        assert other.status()["jobs"] == {"waiting": 1, "running": 0, "finished": 0}
        first.send_signal(signal.SIGCONT)
        assert first.wait(PATIENCE_S) == 1
        assert "now belongs to another broker" in said(first)
        assert other.status()["jobs"]["waiting"] == 1
    assert second.poll() is None


def refusal(client: Client, **options: str) -> JobError:
    """Return why a new job is refused."""
    with pytest.raises(JobError) as raised:
        client.generate(token_ids=[9], max_tokens=4, **options)
    return raised.value


def submit_running(client: Client, journal: Path) -> Job:
    """Wait for a verifier; return a job of which the journal has tokens, and which goes on for a while."""
    client.wait_until_ready()
    job = client.submit(token_ids=PROMPT, max_tokens=LONG)
    with closing(connect(journal, read_only=True)) as reader:
        wait_until(lambda: reader.execute("SELECT 1 FROM commits LIMIT 1").fetchall())
    return job


def check_goes_on(client: Client, running: Job) -> None:
    """The job that ran ends with its text, and so do new ones."""
    assert running.result(PATIENCE_S).token_ids == toy_text(PROMPT, LONG)
    assert client.generate(token_ids=PROMPT, max_tokens=5).token_ids == toy_text(PROMPT, 5)


def test_a_locked_journal_is_temporary(start_broker: StartBroker, client: Client, journal: Path) -> None:
    """New jobs are refused with the reason, the broker answers, and what ran ends well once the lock is gone."""
    start_broker()
    running = submit_running(client, journal)
    other = connect(journal)
    wait_until(lambda: locks(other))
    wait_until(lambda: client.status()["journal"]["trouble"])
    error = refusal(client)
    assert (error.code, "locked" in str(error)) == ("busy", True)
    assert not running.done
    other.execute("ROLLBACK")
    other.close()
    check_goes_on(client, running)


def locks(connection: object) -> bool:
    try:
        connection.execute("BEGIN IMMEDIATE")
    except Exception:  # noqa: BLE001 - the broker was faster
        return False
    return True


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits other processes' files")
def test_a_full_disk_is_temporary(start_broker: StartBroker, client: Client, journal: Path) -> None:
    """The same if no more bytes can be written: the running job loses no token."""
    broker = start_broker("--durability", "process")
    running = submit_running(client, journal)
    hard = resource.prlimit(broker.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (Path(f"{journal}-wal").stat().st_size, hard))
    wait_until(lambda: client.status()["journal"]["trouble"])
    error = refusal(client)
    assert error.code == "busy"
    assert "cannot be written" in str(error)
    assert not running.done
    resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (hard, hard))
    check_goes_on(client, running)


def test_sigterm_loses_no_job(start_broker: StartBroker, client: Client, journal: Path) -> None:
    """A broker that is asked to stop ends with status 0; the next one goes on with its jobs."""
    broker = start_broker()
    running = submit_running(client, journal)
    broker.terminate()
    assert broker.wait(PATIENCE_S) == 0
    assert not running.done
    start_broker()
    check_goes_on(client, running)
