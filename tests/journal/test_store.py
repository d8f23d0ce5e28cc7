"""The journal in a SQLite file, beside what every kind must do: torn files, older files, room, faults of the disk."""

from __future__ import annotations

import random
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from specq.journal import Opening, StoredJob, pack, unpack
from specq.journal.sqlite.connection import STEPS, connect, prepare, room
from specq.journal.sqlite.store import SqliteJournal
from specq.protocol import ConfigError, JournalBusyError, LogprobRecord, SamplingParams
from specq.testing.conformance.journals import take_over_and_go_on
from specq.testing.fake_journal import PARAMS, FakeJournal, added, ended, groups, history, taken
from tests.each import each


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "broker.journal"


Open = Callable[..., SqliteJournal]


def find(journal: SqliteJournal, job_id: int) -> StoredJob | None:
    """Look a job up, as the broker's reader does."""
    reader = journal.reader()
    found = reader.find(job_id)
    reader.close()
    return found


def token_ids(journal: SqliteJournal) -> list[int]:
    """Return the tokens of the oldest job that has not ended."""
    return np.frombuffer(journal.unfinished()[0].token_ids, "<i4").tolist()


@pytest.fixture
def other(path: Path) -> Iterator[sqlite3.Connection]:
    """Another program's connection to the journal."""
    path.parent.mkdir()
    connection = connect(path)
    yield connection
    connection.close()


@pytest.fixture(name="open_journal")
def _open_journal(path: Path) -> Iterator[Open]:
    """Open journals that are closed at the end, unless the test has done so."""
    opened: list[SqliteJournal] = []

    def open_journal(at: Path = path, **options: object) -> SqliteJournal:
        opened.append(SqliteJournal(str(at), Opening(**options)))
        return opened[-1]

    yield open_journal
    for journal in opened:
        journal.close()


def test_a_group_is_written_whole_or_not_at_all(open_journal: Open, path: Path, tmp_path: Path) -> None:
    """Cut the log anywhere, as a loss of power does: what is left is the journal as it was after some group."""
    rng = random.Random(1)
    journal = open_journal()
    journal._connection.execute("PRAGMA wal_autocheckpoint = 0")
    states = [journal.unfinished()]
    fake = FakeJournal()
    for group in groups(rng, history(rng, length=60)):
        fake.write(group)
        journal.write(group)
        states.append(fake.unfinished())
    wal = Path(f"{path}-wal").read_bytes()
    seen = []
    for cut in range(0, len(wal) + 1, max(1, len(wal) // 40)):
        torn = tmp_path / f"torn-{cut}.journal"
        shutil.copy(path, torn)
        Path(f"{torn}-wal").write_bytes(wal[:cut] + bytes(rng.randrange(256) for _ in range(50)))
        found = open_journal(torn)
        seen.append(states.index(found.unfinished()))
        found.close()
    journal.close()
    assert seen == sorted(seen)
    assert len(set(seen)) > 3


def test_what_a_gap_cuts_off_is_forgotten(open_journal: Open, other: sqlite3.Connection) -> None:
    """A file that lost a row in the middle gives the tokens before it; the rest is generated anew, and not mixed in."""
    journal = open_journal()
    journal.write([taken(1)])
    for base_len in (0, 2, 4):
        journal.write([added(1, base_len, [base_len, base_len + 1])])
    other.execute("DELETE FROM commits WHERE base_len = 2")
    assert token_ids(journal) == [0, 1]
    journal.write([added(1, 2, [7, 8, 9, 10])])
    assert token_ids(journal) == [0, 1, 7, 8, 9, 10]


def test_commits_of_jobs_that_ended_are_cleared_away(
    open_journal: Open, other: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once they are many, and more than those of use; the others stay."""
    monkeypatch.setattr("specq.journal.sqlite.store.MOST_STALE", 30)
    journal, most = open_journal(), 0
    journal.write([taken(1000)])
    for job_id in range(1, 60):
        journal.write([taken(job_id)])
        for base_len in range(5):
            journal.write([added(job_id, base_len, [base_len])])
        journal.write([ended(job_id, list(range(5))), added(1000, job_id - 1, [job_id])])
        most = max(most, other.execute("SELECT count(*) FROM commits").fetchone()[0])
    assert most <= 2 * (30 + 59)
    assert token_ids(journal) == list(range(1, 60))


def test_a_closed_journal_is_one_file(open_journal: Open, path: Path) -> None:
    """Its locks and its log are gone."""
    open_journal().close()
    open_journal().close()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_only_the_user_can_read_the_journal(open_journal: Open, path: Path) -> None:
    """Prompts and answers are for the user's eyes."""
    journal = open_journal()
    journal.write([taken(1)])
    for file in path.parent.iterdir():
        if "lock" not in file.name:
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_locked_file_is_busy(open_journal: Open, other: sqlite3.Connection) -> None:
    """While another program writes, no record is lost: the same group is written later."""
    journal = open_journal()
    journal.write([taken(1)])
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(JournalBusyError, match="locked"):
        journal.write([added(1, 0, [5])])
    other.execute("ROLLBACK")
    journal.write([added(1, 0, [5])])
    assert journal.unfinished()[0].num_tokens == 1


def test_a_full_disk_is_busy(open_journal: Open, path: Path) -> None:
    """What does not fit is refused whole; what was there before is whole, and readers go on."""
    journal = open_journal()
    journal.write([taken(1), added(1, 0, [1, 2]), taken(2), ended(2, [3])])
    pages = journal._connection.execute("PRAGMA page_count").fetchone()[0]
    journal._connection.execute(f"PRAGMA max_page_count = {pages}")
    big = [taken(3), added(3, 0, list(range(20_000)))]
    for _ in range(2):
        with pytest.raises(JournalBusyError, match="full"):
            journal.write(big)
    assert [job.submit.job_id for job in journal.unfinished()] == [1]
    found = find(journal, 2)
    assert found is not None
    assert found.num_tokens == 1
    journal._connection.execute("PRAGMA max_page_count = 1000000")
    journal.write(big)
    assert [job.num_tokens for job in journal.unfinished()] == [2, 20_000]


def make_alien(path: Path) -> None:
    alien = sqlite3.connect(path)
    alien.execute("CREATE TABLE songs (title TEXT)")
    alien.commit()
    alien.close()


def make_newer(path: Path) -> None:
    SqliteJournal(str(path), Opening()).close()
    newer = sqlite3.connect(path)
    newer.execute("PRAGMA user_version = 99")
    newer.close()


def make_unreadable_job(path: Path) -> None:
    journal = SqliteJournal(str(path), Opening())
    journal.write([taken(1)])
    journal.close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("UPDATE jobs SET params = '{\"wishes\": 3}'")
    other.close()


@each(
    ("make", "reason"),
    [
        (make_alien, "another program"),
        (make_newer, f"version is 99; this specq reads versions up to {len(STEPS)}"),
        (lambda path: path.write_bytes(b"x" * 5000), "not a database"),
        (lambda path: path.mkdir(), "cannot use the journal"),
        (make_unreadable_job, "job 1 cannot be read"),
    ],
)
def test_a_file_that_is_not_a_journal_is_refused(open_journal: Open, tmp_path: Path, make: object, reason: str) -> None:
    """With the file's name and what is wrong with it."""
    path = tmp_path / "some.journal"
    make(path)
    with pytest.raises(ConfigError, match=reason) as raised:
        open_journal(path).unfinished()
    assert str(path) in str(raised.value)


OLD = '{"temperature":0.5,"top_k":9223372036854775808,"repetition_penalty":1e-40,"logprobs":1,"stop":["x"]}'


def test_a_stored_job_out_of_current_bounds_is_a_misfit(open_journal: Open, other: sqlite3.Connection) -> None:
    """Values that an earlier specq let in are read: what is out of bounds now is left out and said, the rest is as it
    was, and the result of a job that ended with such values is there."""
    journal = open_journal()
    journal.write([taken(1), added(1, 0, [4, 5]), taken(2), ended(2, [7, 8]), taken(3)])
    other.execute("UPDATE jobs SET params = ? WHERE job_id < 3", (OLD,))
    other.execute("UPDATE jobs SET speculation = '{\"max_depth\":99999}' WHERE job_id = 3")

    first, third = journal.unfinished()
    assert "top_k is 9223372036854775808" in first.misfit
    assert first.submit.params == SamplingParams(temperature=0.5, logprobs=1, stop=("x",))
    assert first.num_tokens == 2
    assert "max_depth is 99999" in third.misfit
    assert third.submit.params == PARAMS
    found = find(journal, 2)
    assert found is not None
    assert (found.finish, found.num_tokens) == ("length", 2)


def test_counts_of_an_earlier_specq_have_their_new_names(open_journal: Open) -> None:
    """A result that was journaled under the old names is read under those of today."""
    journal = open_journal()
    journal.write([taken(1), ended(1, [7])._replace(stats={"rounds": 2, "worths": 400})])
    found = find(journal, 1)
    assert found is not None
    assert found.stats == {"rounds": 2, "min_accept_probs": 400}


def test_an_older_file_is_brought_up_to_date(open_journal: Open, other: sqlite3.Connection) -> None:
    """Steps that the file has not had are taken, once; what it held stays."""
    journal = open_journal()
    journal.write([taken(1)])
    newer = (*STEPS, "ALTER TABLE jobs ADD COLUMN mood TEXT NOT NULL DEFAULT 'good'; CREATE TABLE extra (x)")
    for _ in range(2):
        prepare(other, newer)
    assert other.execute("SELECT job_id, mood FROM jobs").fetchall() == [(1, "good")]
    with pytest.raises(ConfigError, match=f"version is {len(newer)}"):
        prepare(other)
    with pytest.raises(sqlite3.OperationalError):
        prepare(other, (*newer, "CREATE TABLE half (x); CREATE TABLE extra (x)"))
    assert other.execute("PRAGMA user_version").fetchone() == (len(newer),)
    assert not other.execute("SELECT 1 FROM sqlite_master WHERE name = 'half'").fetchall()


# --- one owner --------------------------------------------------------------------------------------------------------


def test_planted_no_fence_is_caught(open_journal: Open, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the look at the fence both write."""
    monkeypatch.setattr("specq.journal.sqlite.store.is_newest", lambda connection, number: True)
    with pytest.raises(pytest.fail.Exception):
        take_over_and_go_on(open_journal)


# --- expiry -----------------------------------------------------------------------------------------------------------


def test_old_results_expire(open_journal: Open, other: sqlite3.Connection) -> None:
    """By age, then the oldest while the journal takes too many bytes; running jobs stay."""
    journal = open_journal()
    journal.write([taken(100)])
    tokens = list(range(2000))
    for job_id in range(1, 41):
        journal.write([taken(job_id), ended(job_id, tokens, at=float(job_id))])
    assert journal.keep_to(1 << 30, 11.0).num_forgotten == 10
    used = room(other).used_bytes
    assert 13 <= journal.keep_to(used // 2).num_forgotten <= 17
    assert room(other).used_bytes <= used // 2
    assert journal.keep_to(used // 2) == (0, False)
    reader = journal.reader()
    left = [one.job_id for one in reader.finished(100)]
    reader.close()
    assert left == list(range(40, 40 - len(left), -1))
    assert find(journal, 3) is None
    assert find(journal, 100) is not None


def test_a_journal_of_the_first_version_is_read(open_journal: Open, other: sqlite3.Connection) -> None:
    """Its unfinished jobs are there, with nothing held against them, and of no tenant."""
    prepare(other, STEPS[:1])
    other.execute("INSERT INTO active VALUES (1, 'w')")
    other.execute("INSERT INTO jobs VALUES (1, 'o', 'l', 'm', '{}', '{}', 0, 1.0, 0.0, x'01000000')")
    (job,) = open_journal().unfinished()
    row = other.execute("SELECT weights, deaths, lone_deaths, death_length FROM active").fetchone()
    assert row == ("w", 0, 0, 0)
    assert (job.owner, job.submit.tenant, job.submit.label) == ("o", "", "l")


def test_log_probabilities_survive_as_bytes() -> None:
    """Packed in pieces and joined, they are the same; with none wanted there are no bytes."""
    record = LogprobRecord(2)
    rng = np.random.default_rng(0)
    record.tokens = rng.normal(size=5).astype(np.float32).tolist()
    record.top_ids = rng.integers(0, 2**31 - 1, 10).tolist()
    record.top = rng.normal(size=10).astype(np.float32).tolist()
    whole = pack(record, 0)
    found = unpack(whole[: 3 * 20] + pack(record, 3), 2)
    assert (found.tokens, found.top_ids, found.top) == (record.tokens, record.top_ids, record.top)
    bare = LogprobRecord(0)
    bare.tokens = record.tokens
    assert unpack(pack(bare, 1), 0).tokens == record.tokens[1:]
    assert (pack(LogprobRecord(-1), 0), unpack(b"", -1).tokens) == (b"", [])
