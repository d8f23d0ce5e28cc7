"""The PostgreSQL journal without faults: addresses, versions, texts, times, and what is counted."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specq.journal import LEASE_S, Opening, open_journal
from specq.journal.postgres import store
from specq.journal.postgres.address import parse
from specq.journal.postgres.arrays import from_text, to_text
from specq.journal.postgres.schema import STEPS, prepare
from specq.journal.postgres.session import DatabaseSession
from specq.journal.postgres.store import PostgresJournal
from specq.protocol import ConfigError, SpecqError
from specq.testing import wait_until
from specq.testing.fake_journal import PARAMS, FakeJournal, added, ended, groups, history, taken
from tests.each import each
from tests.journal.cluster import Database, ids, texts

Open = Callable[..., PostgresJournal]
OUTSIDE = ("PGHOST", "PGHOSTADDR", "PGSERVICE", "PGSSLMODE", "PGUSER", "PGDATABASE", "PGPORT")


@pytest.fixture(autouse=True)
def _no_servers_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OUTSIDE:
        monkeypatch.delenv(name, raising=False)


@each(
    ("address", "mode", "shown"),
    [
        ("postgresql:///specq", None, "postgresql:///specq"),
        ("postgresql://u@/specq?host=/run/pg&port=5", None, "postgresql://u@/specq?host=/run/pg&port=5"),
        ("postgresql://u@localhost/specq?sslmode=prefer", "prefer", "postgresql://u@localhost/specq"),
        ("postgresql://127.0.0.1:7,[::1]:8/specq", None, "postgresql://127.0.0.1:7,::1:8/specq"),
        ("postgresql://u@db.example:7/specq", "verify-full", "postgresql://u@db.example:7/specq"),
        ("postgresql://a,b/specq?sslrootcert=x&passfile=y", "verify-full", "postgresql://a,b/specq"),
        ("postgresql://localhost,b/specq", "verify-full", "postgresql://localhost,b/specq"),
        ("postgresql://10.0.0.7/specq?sslmode=disable", "disable", "postgresql://10.0.0.7/specq"),
        ("postgresql://localhost/x?hostaddr=10.0.0.7", "verify-full", "postgresql://localhost/x"),
        ("postgresql:///?service=main", "verify-full", "postgresql:///?service=main"),
    ],
)
def test_other_machines_are_verified(address: str, mode: str | None, shown: str) -> None:
    """Unless the address says that they need not be. A socket and this machine are as the library likes."""
    parameters, found = parse(address)
    assert (parameters.get("sslmode"), found) == (mode, shown)
    assert parameters["target_session_attrs"] == "read-write"


@each(
    ("address", "reason"),
    [
        ("postgresql://db.example/x?sslmode=require", "sslmode=require, which accepts any server"),
        ("postgresql://db.example/x?sslmode=prefer", "write sslmode=disable"),
        ("postgresql://db.example/x?sslmode=verify-ca", "use sslmode=verify-full"),
        ("postgresql://u:hidden@db.example/x", r"PGPASSFILE .*service"),
        ("postgresql://u@db.example/x?password=hidden", "~/.pgpass"),
        ("postgresql://u@db.example/x?sslpassword=hidden", "has a password"),
        ("postgresql://u:hidden@[db/x", "not valid"),
        ("postgresql://db.example/x?colour=hidden", "not valid"),
    ],
)
def test_an_address_that_is_not_safe_is_refused(address: str, reason: str) -> None:
    """With the reason, and without the password."""
    with pytest.raises(ConfigError, match=reason) as refused:
        parse(address)
    assert "hidden" not in str(refused.value)


def test_a_host_of_the_environment_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used where the address names none."""
    monkeypatch.setenv("PGHOST", "db.example")
    assert parse("postgresql:///x")[0]["sslmode"] == "verify-full"


def test_without_psycopg_the_extra_is_named(tmp_path: Path) -> None:
    """Other journals do not import it."""
    script = (
        "import sys\nsys.modules['psycopg'] = None\nfrom specq.journal import Opening, open_journal\n"
        f"open_journal({str(tmp_path / 'j')!r}, Opening()).close()\n"
        "try:\n    open_journal('postgresql:///x', Opening())\n"
        "except Exception as error:\n    print(type(error).__name__, error)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.startswith("ConfigError this needs psycopg, which is not installed")
    assert "'.[postgres]'" in said


@each("text", ["", "plain", "\0", "\\", "\\0", "\0\\", "\\\0\\\\00", "a\\b\0c"])
def test_texts_are_kept(text: str) -> None:
    """Also those that PostgreSQL cannot store."""
    stored = to_text(text)
    assert "\0" not in stored
    assert from_text(stored) == text


@pytest.mark.cluster
def test_labels_with_any_character(open_it: Open) -> None:
    """They come back as they were, and are found."""
    journal = open_it()
    for job_id, label in enumerate(("\0", "\\0 'ü' \U0001f600", "%s $1 {}"), start=1):
        submit = replace(taken(job_id).submit, label=label)
        journal.write(
            [
                taken(job_id)._replace(submit=submit, owner=f"{label}!"),
                ended(job_id, [1])._replace(reason=label, code="engine"),
            ]
        )
        reader = journal.reader()
        found = reader.find(job_id)
        assert (found.submit.label, found.owner, found.reason) == (label, f"{label}!", label)
        assert found.submit.params == PARAMS
        assert [line.label for line in reader.finished(9, 0, f"{label}!")] == [label]
        reader.close()


def make_alien(database: Database) -> None:
    database.run("CREATE SCHEMA specq; CREATE TABLE specq.songs (title text)")


def make_alien_with_meta(database: Database) -> None:
    database.run("CREATE SCHEMA specq; CREATE TABLE specq.meta (title text)")


def make_newer(database: Database) -> None:
    open_journal(database.address, Opening()).close()
    database.run("UPDATE specq.meta SET value = 99 WHERE name = 'version'")


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (make_alien, "its schema specq is of another program"),
        (make_alien_with_meta, "its schema specq is of another program"),
        (make_newer, f"its version is 99; this specq reads versions up to {len(STEPS)}"),
    ],
)
def test_a_database_that_is_not_a_journal_is_refused(database: Database, make: Any, reason: str) -> None:
    """With its address and what is wrong with it."""
    make(database)
    with pytest.raises(ConfigError, match=reason) as refused:
        open_journal(database.address, Opening())
    assert str(refused.value).startswith(f"cannot use the journal {database.address}: ")


@pytest.mark.cluster
def test_an_older_database_is_brought_up_to_date(open_it: Open, database: Database) -> None:
    """Steps that it has not had are taken once, all or none."""

    def failure(reason: str) -> SpecqError:
        return SpecqError(reason)

    journal = open_it()
    journal.write([taken(1)])
    other = DatabaseSession(parse(database.address)[0], "full", failure)
    newer = (*STEPS, "ALTER TABLE specq.jobs ADD COLUMN mood text DEFAULT 'good'; CREATE TABLE specq.extra (x int)")
    with pytest.raises(SpecqError, match="extra"):
        prepare(other, (*newer, "CREATE TABLE specq.half (x int); CREATE TABLE specq.extra (x int)"))
    assert database.run("SELECT to_regclass('specq.extra'), to_regclass('specq.half')") == [(None, None)]
    for _ in range(2):
        prepare(other, newer)
    assert database.run("SELECT job_id, mood FROM specq.jobs") == [(1, "good")]
    assert database.run("SELECT value FROM specq.meta WHERE name = 'version'") == [(len(newer),)]
    with pytest.raises(ConfigError, match=f"version is {len(newer)}"):
        prepare(other)
    other.close()
    journal.write([taken(2)])  # a broker of the former version goes on


@pytest.mark.cluster
def test_two_brokers_create_the_tables_at_the_same_time(open_it: Open) -> None:
    """One of them waits for the other."""
    with ThreadPoolExecutor() as pool:
        journals = list(pool.map(lambda _: open_it(), range(4)))
    assert len({journal.epoch for journal in journals}) == 4


@pytest.mark.cluster
def test_its_time_is_the_databases(open_it: Open, database: Database) -> None:
    """Times after it are corrected when a broker opens it, and keep their order."""
    journal = open_it()
    assert abs(time.monotonic() + journal.offset - time.time()) < 1.0
    journal.write([taken(job_id, 9e9 + job_id) for job_id in (1, 2, 3, 4)])
    journal.write([ended(3, [5], at=9e9), ended(1, [5], at=9e9 + 1)])
    journal.close()
    again = open_it()
    now = time.monotonic() + again.offset
    second, fourth = again.take()
    assert ids([second, fourth]) == [2, 4]
    assert second.submitted <= fourth.submitted <= now
    assert abs(second.deadline - now - (7.5 - 9e9 - 2)) < 1.0
    reader = again.reader()
    assert [one.job_id for one in reader.finished(9)] == [1, 3]
    assert all(one.ended <= now for one in reader.finished(9))
    reader.close()


@pytest.mark.cluster
def test_a_broker_without_a_connection_loses_its_jobs_early(
    open_it: Open, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a silent one that has a connection; and a broker that is newly connected waits for the leases' end."""
    monkeypatch.setattr(store, "SILENT_S", 1.0)
    first, second, third = (open_it(address=f"tcp://10.0.0.{i}:1") for i in range(3))
    first.write([taken(1)])
    third.write([taken(2)])
    age = "SELECT min(extract(epoch FROM clock_timestamp() - backend_start)) FROM pg_stat_activity"
    wait_until(lambda: database.run(f"{age} WHERE application_name LIKE 'specq journal %'")[0][0] > LEASE_S)
    late = open_it(address="tcp://10.0.0.4:1")
    database.run(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = 'specq journal ' || (SELECT broker FROM specq.active WHERE job_id = 1)"
    )
    database.run("UPDATE specq.brokers SET until = clock_timestamp() + interval '3 s'")
    assert not second.take()
    database.run("UPDATE specq.brokers SET until = clock_timestamp() + interval '1.5 s'")
    assert [ids(late.take()), ids(second.take())] == [[], [1]]


@pytest.mark.cluster
@pytest.mark.parametrize("is_dead", [False, True])
def test_a_taking_reads_each_group_once(open_it: Open, database: Database, is_dead: bool) -> None:
    """Not once for each job, although its plan was made while the tables were empty."""
    holder, taker, num_jobs, num_groups = open_it(), open_it(), 300, 30
    for _ in range(10):  # PostgreSQL keeps a plan from the sixth time on
        taker.take()
    holder.write([taken(job_id) for job_id in range(num_jobs)])
    for number in range(num_groups):
        holder.write([added(job_id, number, [7]) for job_id in range(num_jobs)])
    if is_dead:
        database.expire(holder)
    with taker._session.transaction(60):
        jobs = [one for _ in range(2) for one in taker.take()]
        ((num_read,),) = taker._session.query(
            "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'groups'"
        )
    assert len(jobs) == is_dead * num_jobs
    assert num_read <= (4 * num_groups if is_dead else 1)
    assert texts(taker) == {job_id: [7] * num_groups for job_id in range(num_jobs)}


@pytest.mark.cluster
def test_a_lost_brokers_text_is_folded_in_steps(
    open_it: Open, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its jobs are taken, so that no statement takes long; a job's text is complete all the time."""
    monkeypatch.setattr(store, "FOLDED_FIRST", 3000)
    holder, taker, num_jobs, num_groups = open_it(), open_it(), 20, 30
    holder.write([taken(job_id) for job_id in range(num_jobs)])
    for number in range(num_groups):
        holder.write([added(job_id, number, [7]) for job_id in range(num_jobs)])
    database.expire(holder)
    left, whole = [num_groups], {job_id: [7] * num_groups for job_id in range(num_jobs)}
    while not (jobs := taker.take()):
        assert texts(taker) == whole
        left += database.run("SELECT count(*) FROM specq.groups")[0]
        assert left[-1] < left[-2]
    assert len(left) > 3
    assert (sorted(ids(jobs)), texts(taker)) == (sorted(whole), whole)


@pytest.mark.cluster
def test_what_is_stored_is_counted(open_it: Open, database: Database) -> None:
    """The bytes of results by the database, those of unfinished jobs by their holders."""
    journal, other = open_it(), open_it()
    journal.write([taken(1), added(1, 0, list(range(1000))), taken(2)])
    journal.write([taken(3), ended(3, list(range(1000)))])
    running = journal._running
    assert 17_000 < running < 19_000
    assert other.keep_to(1) == (1, False)
    assert other.keep_to(1) == (0, True)
    assert other.keep_to(30_000) == (0, False)
    journal.close()
    assert ids(other.take()) == [1, 2]
    assert abs(other._running - running) < 2000
    assert other.keep_to(1) == (0, True)
    assert database.run("SELECT sum(running) FROM specq.brokers") == [(other._running,)]
    other.write([ended(1, [1]), ended(2, [1])])
    assert other._running == 0


@pytest.mark.cluster
def test_old_groups_are_folded(open_it: Open, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tokens of unfinished jobs stay, and each job has its text; also after a takeover in the middle."""
    monkeypatch.setattr(store, "MOST_UNFOLDED", 3000)
    monkeypatch.setattr(store, "FOLDED", 3000)
    rng, fake = random.Random(7), FakeJournal()
    journal = open_it()
    most = most_folded = 0
    for group in groups(rng, history(rng, num_jobs=200, length=1500)):
        fake.write(group)
        assert journal.write(group) == frozenset()
        journal.keep_to(1 << 40)
        query = "SELECT (SELECT sum(size)::bigint FROM specq.groups), (SELECT count(*) FROM specq.folded)"
        ((size, num_folded),) = database.run(query)
        most, most_folded = max(most, size or 0), max(most_folded, num_folded)
    assert most < 12_000
    assert most_folded > 10
    assert journal.unfinished() == fake.unfinished() != []
    journal.close()
    other = open_it()
    assert [replace(job, epoch=0) for job in other.take()] == fake.unfinished()
    assert database.run("SELECT count(*) FROM specq.groups") == [(0,)]
    other.write([ended(job.submit.job_id, [1]) for job in fake.unfinished()])
    assert database.run("SELECT count(*) FROM specq.folded") == [(0,)]
