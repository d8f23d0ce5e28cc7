"""`specq journal migrate`, `copy` and `check`, over all kinds of journals."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specq.cli import main
from specq.journal import Crashes, JobBound, JobCrashed, Journal, Opening, StoredJob, open_journal
from specq.journal.interface import JOURNALS
from specq.testing.fake_journal import FakeJournal, added, ended, groups, history, taken
from tests.journal.kinds import ADDRESSES, KINDS, SHARED

PAIRS = [
    pytest.param(source, target, marks=[pytest.mark.cluster] * bool({source, target} & set(SHARED)))
    for source in sorted(JOURNALS)
    for target in sorted(JOURNALS)
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["journal", *arguments])


@pytest.fixture
def make_address(tmp_path: Path) -> Callable[[str], str]:
    """Return a new address of a kind."""
    folders = iter(range(10))

    def make(kind: str) -> str:
        return ADDRESSES[kind](tmp_path / str(next(folders)))

    return make


def fill(address: str) -> FakeJournal:
    """Write a random history, and a job with all that a job can have."""
    rng, fake = random.Random(3), FakeJournal()
    journal = open_journal(address, Opening())
    special = [taken(100), JobBound(100, "w", 77), JobCrashed(100, Crashes(2, 1, 9))]
    special += [added(100, i, [i]) for i in (0, 1)]
    for group in [*groups(rng, history(rng)), special, [taken(101)]]:
        fake.write(group)
        journal.write(group)
    journal.close()
    return fake


def comparable(job: StoredJob, now: float) -> StoredJob:
    """Return a job with its ages, in tenths of a second, and without what its journal adds."""
    ages = [round(now - at, 1) if at else 0.0 for at in (job.submitted, job.ended, job.deadline)]
    return replace(job, submitted=ages[0], ended=ages[1], deadline=ages[2], epoch=0, holder="")


def contents(address: str, clock: Callable[[Journal], float]) -> tuple[list[StoredJob], list[StoredJob | None], int]:
    """Return all that a journal has, and its epoch."""
    journal = open_journal(address, Opening())
    reader, now = journal.reader(), clock(journal)
    results = [reader.find(line.job_id) for line in reader.finished(1000)]
    found = [comparable(job, now) for job in journal.unfinished()], [comparable(job, now) for job in results if job]
    reader.close()
    journal.close()
    return *found, journal.epoch


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_copy_has_all_jobs(make_address: Callable[[str], str], source: str, target: str) -> None:
    """With their tokens, counts, ages, and higher epochs. The source stays as it was."""
    first, second = make_address(source), make_address(target)
    fake = fill(first)
    num_unfinished = len(fake.unfinished())
    said = run("copy", first, second)
    counts = f"copied {num_unfinished} unfinished jobs and {len(fake.jobs) - num_unfinished} results\n"
    assert (said.exit_code, said.stdout) == (0, counts)

    def clock(journal: Journal) -> float:
        return journal.offset

    before, after = contents(first, clock), contents(second, clock)
    assert before[:2] == after[:2]
    assert after[2] > before[2] - (2 << 32)
    again = run("copy", first, second)
    assert (again.exit_code, "is not empty" in again.stderr) == (2, True)
    assert contents(second, clock)[:2] == after[:2]
    assert run("check", second).stdout == run("check", first).stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_journal_in_use_is_not_copied(make_address: Callable[[str], str], kind: str) -> None:
    """Neither from it nor, empty as it is, to it."""
    address = make_address(kind)
    journal = open_journal(address, Opening(address="tcp://a:1", owner="the broker"))
    other = make_address("sqlite")
    assert run("migrate", other).exit_code == 0
    for arguments in ((other, address), (address, other)):
        said = run("copy", *arguments)
        assert (said.exit_code, "in use" in said.stderr) == (2, True)
        journal.write([taken(1)])
    assert journal.write([added(1, 0, [1])]) == frozenset()
    journal.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_journal_that_is_not_there_is_not_copied(make_address: Callable[[str], str], kind: str) -> None:
    """A mistyped source is refused, and not created."""
    source, target = make_address(kind), make_address("sqlite")
    for _ in range(2):
        assert run("copy", source, target).exit_code == 2
    assert (run("check", source).exit_code, Path(target).exists()) == (2, False)


@pytest.mark.parametrize("kind", KINDS)
def test_migrate_creates_a_journal(make_address: Callable[[str], str], kind: str) -> None:
    """Also a second time, without a change."""
    address = make_address(kind)
    assert run("check", address).exit_code == 2
    for _ in range(2):
        said = run("migrate", address)
        assert (said.exit_code, said.stdout) == (0, f"{address} is up to date\n")
    assert run("check", address).stdout == "0 unfinished jobs, 0 results, 0 tokens\n"


def test_an_unknown_kind_cannot_be_checked() -> None:
    assert "papyrus:// journals cannot be checked" in run("check", "papyrus://x").stderr


def change_sqlite(address: str) -> Callable[[str], Any]:
    def change(statement: str) -> None:
        with sqlite3.connect(address) as connection:
            connection.execute(statement)
        connection.close()

    return change


def change_postgres(address: str) -> Callable[[str], Any]:
    from tests.journal.cluster import Database, running

    database = Database(running().primary, address.partition("@/")[2].partition("?")[0])

    def change(statement: str) -> None:
        database.fold()
        database.run(f"SET search_path = specq; {statement.replace('FROM commits', 'FROM folded')}")

    return change


CHANGES = {"sqlite": change_sqlite, "postgresql": change_postgres}
FAULTS = {
    "DELETE FROM commits WHERE base_len = 1": "job 1: tokens 1 to 2 are missing, so later ones are made again",
    "UPDATE jobs SET params = '{\"wishes\": 3}' WHERE job_id = 2": "job 2: its request is unreadable",
    "UPDATE jobs SET params = 'x' WHERE job_id = 1": "job 1: its request is unreadable",
    "DELETE FROM active": "job 1: it has neither ended nor is it unfinished",
    "DELETE FROM jobs WHERE job_id = 1": "job 1: it is in active, and its request is missing",
    "DELETE FROM jobs WHERE job_id = 2": "job 2: it is in results, and its request is missing",
    "UPDATE results SET stats = '{'": "job 2: the counts of its result are unreadable",
    "UPDATE results SET origins = ''": "job 2: its result has 8 bytes of tokens, and origins of 0 tokens",
    "INSERT INTO active (job_id, weights) VALUES (2, '')": "job 2: it has ended and is unfinished",
}


@pytest.mark.parametrize("kind", KINDS)
def test_check_finds_what_is_wrong(make_address: Callable[[str], str], kind: str) -> None:
    """Each fault alone, with the job's id; while a broker uses the journal."""
    for statement, fault in FAULTS.items():
        address = make_address(kind)
        journal = open_journal(address, Opening())
        journal.write([taken(1)._replace(owner='"\\x"'), taken(2)])
        for base_len in range(3):
            journal.write([added(1, base_len, [base_len])])
        journal.write([ended(2, [1, 2])._replace(stats={"text": 'a"b\\c'})])
        good = run("check", address)
        assert (good.exit_code, good.stdout) == (0, "1 unfinished jobs, 1 results, 5 tokens\n")
        CHANGES[kind](address)(statement)
        bad = run("check", address)
        assert (bad.exit_code, fault in bad.stderr) == (1, True), (statement, bad.stderr)
        journal.close()
