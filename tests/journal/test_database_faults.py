"""A PostgreSQL journal whose network, server or standby fails: nothing is lost or doubled, and no call takes long."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specq.journal import JobBound, JobDropped, Journal, Record
from specq.journal.postgres import session, store
from specq.protocol import ConfigError, JournalBusyError
from specq.testing import wait_until
from specq.testing.fake_journal import FakeJournal, added, ended, groups, history, taken
from tests.journal.cluster import Cluster, Database, ids, texts
from tests.journal.proxy import Proxy

pytestmark = pytest.mark.cluster

Open = Callable[..., store.PostgresJournal]
CLUSTER = Path(__file__).parents[2] / "scripts" / "cluster.sh"


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    """A proxy of the primary."""
    one = Proxy(cluster.primary.port)
    yield one
    one.close()


def write(journal: Journal, records: list[Record], most_s: float = 30.0) -> int:
    """Write a group as the broker's thread does. Return how often the journal was busy."""
    for attempt in range(int(most_s / 0.02)):
        try:
            assert journal.write(records) == frozenset()
        except JournalBusyError:
            time.sleep(0.02)  # the thread's pause
        else:
            return attempt
    raise AssertionError("the journal is busy for ever")


def lose_an_answer(open_it: Open, database: Database, proxy: Proxy) -> None:
    """The group is written, and the broker does not learn it. It writes the group again."""
    journal = open_it(database.through(proxy.port))
    journal.write([taken(1), added(1, 0, [1, 2]), taken(5)])
    group = [added(1, 2, [3]), taken(2), ended(2, [4]), taken(3), JobDropped(5), JobBound(1, "w")]
    proxy.loses = "answers"
    with pytest.raises(JournalBusyError, match="cannot be written"):
        journal.write(group)
    wait_until(lambda: database.run("SELECT 1 FROM specq.results") != [])
    assert journal.write(group) == frozenset()
    assert journal.write([added(1, 3, [5])]) == frozenset()
    assert texts(journal) == {1: [1, 2, 3, 5], 3: []}


def test_a_lost_answer_is_read_again(open_it: Open, database: Database, proxy: Proxy) -> None:
    """The second time the group has no further effect, and no job of it is taken for lost."""
    lose_an_answer(open_it, database, proxy)


def test_planted_lost_answer_that_is_assumed_lost_is_caught(
    open_it: Open, database: Database, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group gets another number when it is written again."""
    write_once = store.PostgresJournal.write

    def forgetful(self: store.PostgresJournal, records: list[Record]) -> frozenset[int]:
        self._unsure.clear()
        return write_once(self, records)

    monkeypatch.setattr(store.PostgresJournal, "write", forgetful)
    with pytest.raises(AssertionError):
        lose_an_answer(open_it, database, proxy)


@pytest.mark.parametrize("seed", range(3))
def test_requests_and_answers_are_lost_at_random(open_it: Open, database: Database, proxy: Proxy, seed: int) -> None:
    """The journal is the same in the end as without faults."""
    rng, fake = random.Random(seed), FakeJournal()
    journal = open_it(database.through(proxy.port))
    records = history(rng, length=800)
    for start in range(0, len(records), 5):
        group = records[start : start + 5]
        fake.write(group)
        if rng.random() < 0.5:
            proxy.loses = rng.choice(["requests", "answers"])
        write(journal, group)
    assert proxy.num_lost > 5
    proxy.loses = ""
    assert journal.unfinished() == fake.unfinished()
    reader = journal.reader()
    for job_id, job in fake.jobs.items():
        found = reader.find(job_id)
        assert (found.finish, found.stats, found.ended) == (job.finish, job.stats, job.ended)
    reader.close()


def test_a_taking_whose_answer_is_lost_is_found_again(
    open_it: Open, database: Database, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs are this broker's already, with the epoch of that taking."""
    first = open_it()
    first.write([taken(1), added(1, 0, [1]), taken(2)])
    second = open_it(database.through(proxy.port))
    second.write([taken(3)])
    assert second.take() == []
    first.close()
    query = second._session.query

    def losing(statement: str, *values: Any, **options: Any) -> Any:
        if "specq.take(" in statement:
            proxy.loses = "answers"
        return query(statement, *values, **options)

    monkeypatch.setattr(second._session, "query", losing)
    with pytest.raises(JournalBusyError):
        second.take()
    monkeypatch.undo()
    wait_until(lambda: set(database.holders().values()) == {second._number})
    jobs = second.take()
    assert ids(jobs) == [1, 2]
    assert {job.epoch for job in jobs} == {value for (value,) in database.run("SELECT max(epoch) FROM specq.active")}
    assert second.take() == []


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_the_server_restarts(open_it: Open, database: Database, cluster: Cluster, mode: str) -> None:
    """Each group that was written is there, and the journal goes on by itself."""
    rng, fake = random.Random(mode), FakeJournal()
    journal = open_it()
    reader = journal.reader()
    assert reader.find(1) is None
    written = list(groups(rng, history(rng, length=150)))
    num_busy = 0
    for number, group in enumerate(written):
        fake.write(group)
        if number == len(written) // 2:
            cluster.primary.run("CHECKPOINT")  # it starts faster
            restart = threading.Thread(target=cluster.primary.control, args=("restart", "-m", mode))
            restart.start()
        num_busy += write(journal, group)
    restart.join(60)
    num_busy += write(journal, [taken(1000)])
    fake.write([taken(1000)])
    assert num_busy > 0
    assert journal.unfinished() == fake.unfinished()
    with pytest.raises(JournalBusyError, match="cannot be read"):
        reader.find(1)  # its connection is gone
    assert reader.find(1000) is not None
    reader.close()
    cluster.wait_replicated()


def test_a_read_only_server_is_busy(open_it: Open, database: Database) -> None:
    """It refuses groups, and the same groups are written later. A broker cannot start."""
    journal = open_it()
    journal.write([taken(1)])
    database.run(f"ALTER DATABASE {database.name} SET default_transaction_read_only = on")
    journal._session.query("SET default_transaction_read_only = on")
    for _ in range(2):  # the second connection is refused at once
        with pytest.raises(JournalBusyError, match="read-only"):
            journal.write([added(1, 0, [1])])
    with pytest.raises(ConfigError, match=r"cannot use the journal .*read-only"):
        open_it()
    database.server.run(f"ALTER DATABASE {database.name} RESET default_transaction_read_only")
    assert journal.write([added(1, 0, [1])]) == frozenset()
    assert texts(journal) == {1: [1]}


def test_a_standby_is_no_journal(database: Database, cluster: Cluster, open_it: Open) -> None:
    """The address may name both servers. The one that can be written is used."""
    wait_until(lambda: (database.name,) in cluster.standby.run("SELECT datname FROM pg_database"))
    with pytest.raises(ConfigError, match=r"read-only|recovery|standby"):
        open_it(cluster.standby.address(database.name))
    both = f"?host={cluster.folder},{cluster.folder}&port={cluster.standby.port},{cluster.primary.port}"
    journal = open_it(f"postgresql://postgres@/{database.name}{both}")
    assert journal.write([taken(1)]) == frozenset()


def test_a_request_that_a_server_carries_out_late_has_no_effect(
    open_it: Open, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker gave its connection up, and went on with another one."""
    journal = open_it()
    journal.write([taken(1), JobBound(1, "w"), taken(2)])
    ((process,),) = journal._session.query("SELECT pg_backend_pid()")
    os.kill(process, signal.SIGSTOP)
    try:
        monkeypatch.setattr(session, "ANSWER_S", 0.3)
        started = time.monotonic()
        with pytest.raises(JournalBusyError, match="does not answer"):
            journal.write([JobBound(1, "late"), JobDropped(2)])
        assert time.monotonic() - started < 7.0
        monkeypatch.undo()
        assert journal.write([JobBound(1, "early"), JobDropped(2)]) == frozenset()
        assert journal.write([taken(2)]) == frozenset()
    finally:
        os.kill(process, signal.SIGCONT)
    wait_until(lambda: database.run(f"SELECT 1 FROM pg_stat_activity WHERE pid = {process}") == [])
    assert {job.submit.job_id: job.weights for job in journal.unfinished()} == {1: "early", 2: ""}


def wait_for_standby(database: Database) -> int:
    """Wait until a commit waits for the standby, and return its process."""
    query = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname = current_database()"
    wait_until(lambda: database.run(query) != [])
    ((process,),) = database.run(query)
    return int(process)


@pytest.mark.parametrize("fault", ["pg_cancel_backend", "pg_terminate_backend"])
def test_a_group_that_the_standby_does_not_have_is_not_written(
    open_it: Open, database: Database, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The commit's wait is cancelled. The primary has the group, and that is not enough."""
    monkeypatch.setattr(session, "ANSWER_S", 2.0)
    journal = open_it()
    journal.write([taken(1)])
    cluster.standby.control("stop", "-m", "fast")
    try:
        raised: list[BaseException] = []

        def attempt() -> None:
            try:
                journal.write([added(1, 0, [1])])
            except JournalBusyError as error:
                raised.append(error)

        writer = threading.Thread(target=attempt)
        writer.start()
        database.run(f"SELECT {fault}({wait_for_standby(database)})")
        writer.join(60)
        assert len(raised) == 1
        started = time.monotonic()
        with pytest.raises(JournalBusyError):
            journal.write([added(1, 0, [1])])
        assert time.monotonic() - started < 10.0
    finally:
        cluster.standby.control("start", "--wait")
    assert write(journal, [added(1, 0, [1])]) < 1000
    assert texts(journal) == {1: [1]}
    cluster.wait_replicated()


def test_process_durability_does_not_wait(open_it: Open, database: Database, cluster: Cluster) -> None:
    """A standby that is gone stops the journals with `full`, and not those with `process`."""
    journal = open_it(durability="process")
    cluster.standby.control("stop", "-m", "fast")
    try:
        assert journal.write([taken(1)]) == frozenset()
        assert journal.renew() == ()
    finally:
        cluster.standby.control("start", "--wait")
    ((setting,),) = open_it()._session.query("SELECT current_setting('synchronous_commit')")
    assert setting == "on"
    database.run(f"ALTER DATABASE {database.name} SET synchronous_commit = remote_apply")
    ((setting,),) = open_it()._session.query("SELECT current_setting('synchronous_commit')")
    assert setting == "remote_apply"
    cluster.wait_replicated()


def test_a_failover_to_the_standby_loses_nothing(tmp_path: Path, open_it: Open) -> None:
    """Servers of their own: the primary is killed in the middle, and the standby becomes the primary."""
    script = "import os, sys; print(os.environ['SPECQ_CLUSTER'], flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [str(CLUSTER), sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin
    assert process.stdout
    try:
        cluster = Cluster(Path(process.stdout.readline().strip()))
        database = cluster.new_database()
        both = f"?host={cluster.folder},{cluster.folder}&port={cluster.primary.port},{cluster.standby.port}"
        journal = open_it(f"postgresql://postgres@/{database.name}{both}")
        rng, fake = random.Random(5), FakeJournal()
        written = list(groups(rng, history(rng)))
        for number, group in enumerate(written):
            fake.write(group)
            if number == len(written) // 2:
                cluster.primary.control("stop", "-m", "immediate")
                cluster.standby.run("ALTER SYSTEM SET synchronous_standby_names = ''")
                cluster.standby.control("reload")
                cluster.standby.control("promote", "--wait")
            write(journal, group)
        assert journal.unfinished() == fake.unfinished() != []
        journal.close()
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def test_no_password_is_shown(
    database: Database,
    cluster: Cluster,
    open_it: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Neither that of a file nor a wrong one, in addresses, errors or log lines."""
    password = "correct-horse"
    known = database.run("SELECT 1 FROM pg_roles WHERE rolname = 'with_password'") != []
    verb = "ALTER" if known else "CREATE"
    database.run(f"{verb} ROLE with_password SUPERUSER LOGIN PASSWORD '{password}'")
    file = tmp_path / "pgpass"
    file.write_text(f"*:*:*:*:{password}\n")
    file.chmod(0o600)
    at = f"postgresql://with_password@127.0.0.1:{cluster.primary.port}/{database.name}"
    monkeypatch.setenv("PGPASSFILE", str(file))
    journal = open_it(at)
    journal.write([taken(1)])
    said = [journal.address]
    database.run("ALTER ROLE with_password PASSWORD 'another'")
    journal._session.close()
    with pytest.raises(JournalBusyError) as busy:
        journal.write([taken(2)])
    with pytest.raises(ConfigError) as refused:
        open_it(at)
    with pytest.raises(ConfigError) as refused_at_once:
        open_it(at.replace("with_password@", f"with_password:{password}@"))
    with pytest.raises(ConfigError) as unreadable:
        open_it(f"postgresql://with_password:{password}@[::1/x?y=z")
    said += [str(one.value) for one in (busy, refused, refused_at_once, unreadable)]
    assert all(re.search("postgresql://", one) for one in said)
    assert password not in " ".join([*said, *capfd.readouterr()])
    database.run("ALTER ROLE with_password PASSWORD 'correct-horse'")
