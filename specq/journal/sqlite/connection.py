"""A journal's file: its tables, the upgrades of older files, its time, its owner, and the limit of its size.

- `jobs`: the requests, written once.
- `active`: the unfinished jobs. Also the weights of their texts, their verifiers, and the crashes that count against
  them.
- `commits`: their tokens by position, in the order of time. Each group appends a few pages, for any number of jobs.
  Rows of ended jobs are deleted from time to time.
- `results`: the ended jobs, with their ends and all their tokens.
- `meta`: the journal's owner and its time.

Rule: a released step never changes. A new version is a new step at the end of `STEPS`. `PRAGMA user_version` is the
number of steps that a file has completed. A file with more steps than this specq knows is refused.

Size: everything counts, as pages in use. That includes prompts, parameters, tokens, results, indexes, and SQLite's own
data. The results that ended first are forgotten first, with their prompts. Their pages are used again. They return to
the file system if the file exceeds its limit or the writer is idle.

Rule: a step is small (`STEP_BYTES`, `GIVEN_BACK` pages), since groups of records wait for it.

SQLite's errors become the journal's.

The journal's time in a SQLite file: see `specq.journal.interface`. `meta` has the last noted `time`, `boot` and
`uptime`.

One broker at a time owns a journal. A number that rises with each owner identifies it, the fence. An owner holds a lock
on a file beside the journal. The fence is part of the file's name. The system releases the lock when the process ends,
for any reason. A broker that finds the lock held is refused, unless it takes the journal over. To take it over, it
raises the fence. The former owner may be frozen or cut off. At its next group of records it notices that its fence is
not the newest, and stops."""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from specq.journal.interface import EPOCHS, Clocks, MachineClock, Noted, Opening, offset_of, read_clocks
from specq.protocol import ConfigError, JournalBusyError

APPLICATION_ID = 0x73706371  # "spcq": identifies a journal to `file` and to specq

STEPS = (
    """
    CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
    CREATE TABLE jobs (
        job_id INTEGER PRIMARY KEY,
        owner TEXT NOT NULL,
        label TEXT NOT NULL,
        model TEXT NOT NULL,
        params TEXT NOT NULL,
        speculation TEXT NOT NULL,
        priority INTEGER NOT NULL,
        submitted REAL NOT NULL,
        deadline REAL NOT NULL,
        prompt_ids BLOB NOT NULL
    );
    CREATE TABLE active (job_id INTEGER PRIMARY KEY, weights TEXT NOT NULL);
    CREATE TABLE commits (
        number INTEGER PRIMARY KEY,
        job_id INTEGER NOT NULL,
        base_len INTEGER NOT NULL,
        token_ids BLOB NOT NULL,
        accepted BLOB NOT NULL,
        logprobs BLOB NOT NULL,
        rounds INTEGER NOT NULL,
        draft_tokens INTEGER NOT NULL
    );
    CREATE TABLE results (
        job_id INTEGER PRIMARY KEY,
        weights TEXT NOT NULL,
        finish TEXT NOT NULL,
        ended REAL NOT NULL,
        code TEXT NOT NULL,
        reason TEXT NOT NULL,
        stats TEXT NOT NULL,
        num_bytes INTEGER NOT NULL,
        token_ids BLOB NOT NULL,
        accepted BLOB NOT NULL,
        logprobs BLOB NOT NULL
    );
    CREATE INDEX ended ON results (ended);
    """,
    """
    ALTER TABLE active ADD COLUMN deaths INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE active ADD COLUMN lone_deaths INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE active ADD COLUMN death_length INTEGER NOT NULL DEFAULT 0;
    """,
    """
    ALTER TABLE active ADD COLUMN placed INTEGER NOT NULL DEFAULT 0;
    """,
    """
    ALTER TABLE commits RENAME COLUMN accepted TO origins;
    ALTER TABLE results RENAME COLUMN accepted TO origins;
    """,
    """
    ALTER TABLE jobs ADD COLUMN tenant TEXT NOT NULL DEFAULT '';
    """,
    """
    ALTER TABLE jobs ADD COLUMN cache_salt TEXT NOT NULL DEFAULT '';
    ALTER TABLE commits ADD COLUMN cached_tokens INTEGER NOT NULL DEFAULT 0;
    """,
)


def prepare(connection: sqlite3.Connection, steps: tuple[str, ...] = STEPS) -> None:
    """Upgrade a file to the newest version, in one transaction.

    Raises ConfigError for a file that is not a journal. The connection commits each statement by itself
    (`isolation_level=None`).
    """
    version = _version(connection, len(steps))
    if version == len(steps):
        return
    connection.execute("BEGIN EXCLUSIVE")
    try:
        version = _version(connection, len(steps))  # another broker may have been faster
        for step in steps[version:]:
            for statement in filter(str.strip, step.split(";")):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(steps)}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _version(connection: sqlite3.Connection, newest: int) -> int:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    num_tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if num_tables and application != APPLICATION_ID:
        raise ConfigError("it is a SQLite file of another program")
    if version > newest:
        raise ConfigError(f"its version is {version}; this specq reads versions up to {newest}")
    return version


STEP_ROWS = 200  # maximum number of results per step
STEP_BYTES = 8 << 20  # and about their bytes: more than a group of records adds
GIVEN_BACK = 512  # pages returned to the file system per step
SPARE = 256  # free pages that are kept for later records
MOST_WAL = 8 << 20  # bytes that the log keeps when it restarts
_OLDEST = (
    "SELECT job_id, ended, num_bytes + length(prompt_ids) + length(params) FROM results JOIN jobs USING (job_id) "
    "ORDER BY ended LIMIT ?"
)


class Room(NamedTuple):
    """The number of pages of a journal, the number of free ones, and the size of a page."""

    num_pages: int
    num_free: int
    page_bytes: int

    @property
    def used_bytes(self) -> int:
        return (self.num_pages - self.num_free) * self.page_bytes

    @property
    def file_bytes(self) -> int:
        return self.num_pages * self.page_bytes


def room(connection: sqlite3.Connection) -> Room:
    """Return the space that a journal takes."""
    return Room(*[_pragma(connection, name) for name in ("page_count", "freelist_count", "page_size")])


def oldest(connection: sqlite3.Connection, before: float, surplus: int) -> list[int]:
    """Return the results that one step must forget.

    These are results that ended before `before`, and enough others to remove the surplus of bytes.
    """
    found, freed = [], 0
    for job_id, ended, num_bytes in connection.execute(_OLDEST, (STEP_ROWS,)):
        if (ended >= before and freed >= surplus) or freed >= STEP_BYTES:
            break
        found.append(job_id)
        freed += num_bytes
    return found


def give_back(connection: sqlite3.Connection, path: Path, most_bytes: int, *, idle: bool) -> bool:
    """Return some free pages to the file system. False: no step was needed.

    If `idle`, return the spare pages, else those beyond the limit. If idle and without such pages, write the log into
    the file and empty it.
    """
    now = room(connection)
    num_surplus = now.num_free - SPARE if idle else (now.file_bytes - most_bytes) // now.page_bytes
    num_pages = min(GIVEN_BACK, now.num_free, num_surplus)
    if num_pages > 0:  # a script, since `execute` would run only its first step
        connection.executescript(f"PRAGMA incremental_vacuum({num_pages})")
        return True
    if idle and _size(path.with_name(path.name + "-wal")) > SPARE * now.page_bytes:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return False


def let_shrink(connection: sqlite3.Connection) -> None:
    """Enable a file to return pages, by rewriting it, unless it can already."""
    if _pragma(connection, "auto_vacuum") == 0:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("VACUUM")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


KEEP_ORDER = 1e-5  # corrected times keep this part of their distances, so that they keep their order
_NAMES = ("time", "boot", "uptime")
_NEWEST = (
    "SELECT max((SELECT coalesce(max(ended), 0) FROM results), "
    "(SELECT coalesce(max(submitted), 0) FROM jobs JOIN active USING (job_id)))"
)
_BRING_BACK = (
    f"UPDATE results SET ended = :now - {KEEP_ORDER} * (:newest - ended) WHERE ended > :now",  # noqa: S608 - a constant
    "UPDATE jobs SET deadline = deadline - submitted + :now WHERE submitted > :now AND deadline > 0",
    f"UPDATE jobs SET submitted = :now - {KEEP_ORDER} * (:newest - submitted) WHERE submitted > :now",  # noqa: S608
)


def go_on(connection: sqlite3.Connection, clocks: Clocks) -> float:
    """Continue the journal's time for a new owner, within its transaction, and return the offset."""
    (newest,) = connection.execute(_NEWEST).fetchone()
    offset = offset_of(clocks, _noted(connection), newest)
    now = clocks.monotonic + offset
    if newest > now:
        for statement in _BRING_BACK:
            connection.execute(statement, {"now": now, "newest": newest})
    note(connection, Noted(now, clocks.machine))
    return offset


def note(connection: sqlite3.Connection, noted: Noted) -> None:
    """Note the journal's time."""
    values = zip(_NAMES, (noted.time, *noted.machine), strict=True)
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values)


def _noted(connection: sqlite3.Connection) -> Noted | None:
    meta = dict(connection.execute("SELECT name, value FROM meta"))
    return Noted(meta["time"], MachineClock(meta["boot"], meta["uptime"])) if meta.keys() >= set(_NAMES) else None


DURABILITIES = {"full": "FULL", "process": "NORMAL"}
BUSY_S = 0.25  # how long a statement waits for another program


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Return a connection for one thread at a time. Each statement commits by itself."""
    mode = "ro" if read_only else "rwc"
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )


def configure(connection: sqlite3.Connection, durability: str) -> None:
    """Configure a connection for writing the journal."""
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # affects a new file only
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {DURABILITIES[durability]}")
    connection.execute("PRAGMA fullfsync = 1")  # affects macOS only
    connection.execute(f"PRAGMA journal_size_limit = {MOST_WAL}")


@contextmanager
def opening_errors(path: Path) -> Iterator[None]:
    """Turn errors while opening a journal into ConfigError."""
    try:
        yield
    except (ConfigError, JournalBusyError) as error:
        raise ConfigError(f"cannot use the journal {path}: {error}") from None
    except (sqlite3.Error, OSError) as error:
        locked = "another program is writing to it; if that is a broker that hangs, end it (kill -9)"
        hint = locked if "locked" in str(error) else str(error)
        raise ConfigError(f"cannot use the journal {path}: {hint}") from None


@contextmanager
def writing_errors(path: Path) -> Iterator[None]:
    """Turn errors of an open journal into JournalBusyError."""
    try:
        yield
    except sqlite3.Error as error:
        raise JournalBusyError(f"the journal {path} cannot be written: {error}") from None


class Ownership:
    """A broker's hold on a journal, from its construction until `release`.

    Its epochs are above `epoch`. `offset` is that of the journal's time.
    """

    def __init__(self, fence: int, epoch: int, offset: float, path: Path) -> None:
        self.fence, self.epoch, self.offset, self._path = fence, epoch, offset, path
        self._lock = path.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Release the journal."""
        self._path.unlink(missing_ok=True)
        self._lock.close()


def acquire(connection: sqlite3.Connection, journal: Path, opening: Opening) -> Ownership:
    """Become the owner of a journal.

    Raises ConfigError if a live broker owns it, unless `take_over`.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        meta = dict(connection.execute("SELECT name, value FROM meta").fetchall())
        former = int(meta.get("fence", 0))
        if _is_locked(_lock_path(journal, former)) and not opening.take_over:
            raise ConfigError(
                f"it is in use by another broker ({meta.get('owner')}); stop that one, or give this one an address "
                f"and a journal of its own (--bind, --journal). If that one hangs, start this one with --take-over"
            )
        fence, epoch = former + 1, max(int(meta.get("epoch", 0)), opening.floor)
        offset = go_on(connection, opening.clocks or read_clocks())
        held = Ownership(fence, epoch, offset, _lock_path(journal, fence))
        values = {"fence": fence, "epoch": epoch + EPOCHS, "owner": opening.owner}
        connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    _tidy(_lock_path(journal, former))
    return held


def is_newest(connection: sqlite3.Connection, fence: int) -> bool:
    """Return whether the journal still belongs to the owner with this fence."""
    row = connection.execute("SELECT value FROM meta WHERE name = 'fence'").fetchone()
    return bool(row and row[0] == fence)


def _lock_path(journal: Path, fence: int) -> Path:
    return journal.with_name(f"{journal.name}.lock-{fence}")


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _tidy(path: Path) -> None:
    """Remove the lock file of an owner that is gone."""
    if not _is_locked(path):
        path.unlink(missing_ok=True)
