"""The store in a SQLite file of its own: see `specq.batches.interface`."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from specq.batches.interface import LEASE_S, MOST_ENDED, MOST_OPEN, BatchStoreError, BatchTables, StoreLimits
from specq.batches.lines import LineReason
from specq.batches.schema import StoreClock, connect, open_file, transaction
from specq.batches.sqlite_files import SqliteFiles
from specq.batches.values import ENDED, LineResult, NewBatch, Status, StoredBatch, StoredFile

FREE_PAGES = 512  # returned to the file system in one step, and kept for later
FOREVER_S = 1e9  # a result file is not too old while its batch runs
_COLUMNS = (
    "number, id, asked, status, input_file, deadline, times, total, completed, failed, output, errors, output_id, "
    "error_id, reasons"
)
_BATCH = f"SELECT {_COLUMNS} FROM batches WHERE"  # noqa: S608 - the names are ours
_NEW = (
    "INSERT INTO batches (id, owner, asked, status, has_ended, input_file, deadline, times) "
    "VALUES (?, ?, ?, 'validating', 0, ?, ?, ?)"
)
_CLAIM = (
    "UPDATE batches SET holder = ?, held_until = ? "
    "WHERE has_ended = 0 AND (holder = ? OR holder = '' OR held_until <= ?)"
)
_COUNTERS = "UPDATE batches SET completed = completed + ?, failed = failed + ? WHERE number = ?"


class SqliteBatches(SqliteFiles, BatchTables):
    """A `BatchTables` in a file. Raises ConfigError if the file cannot be used."""

    def __init__(self, path: Path, limits: StoreLimits) -> None:
        self.limits, self._path = limits, path
        self._connection = open_file(path)
        self._clock = StoreClock(self._connection)

    def reader(self) -> SqliteBatches:
        """Return the same store, for another thread that only reads."""
        other = object.__new__(SqliteBatches)
        other.limits, other._path, other._clock = self.limits, self._path, self._clock
        other._connection = connect(self._path, read_only=True)
        return other

    def now(self) -> float:
        return self._clock.now()

    def close(self) -> None:
        self._connection.close()

    # --- the owner's calls ------------------------------------------------------------------------------------------

    def new_batch(self, new: NewBatch, input_file: StoredFile, key: str = "") -> StoredBatch:
        digest = hashlib.blake2b(f"{new.owner} {key}".encode(), digest_size=12).hexdigest()
        batch_id = f"batch_{digest if key else secrets.token_hex(12)}"
        wall, deadline = int(time.time()), self.now() + new.window_s
        times = _json({"created_at": wall, "expires_at": wall + new.window_s})
        with transaction(self._connection):
            if (known := self.find_batch(new.owner, batch_id)) is not None:
                if known.asked != new:
                    raise BatchStoreError("this Idempotency-Key was used with another request", "conflict")
                return known
            if self._number("SELECT count(*) FROM batches WHERE owner = ? AND has_ended = 0", new.owner) >= MOST_OPEN:
                raise BatchStoreError(f"{MOST_OPEN} batches of this key have not ended; wait for some", "full")
            if self._number("SELECT is_shown FROM files WHERE number = ?", input_file.number) != 1:
                raise BatchStoreError("the input file was deleted", "full")
            values = batch_id, new.owner, _json(asdict(new)), input_file.number, deadline, times
            return self._batch(int(self._connection.execute(_NEW, values).lastrowid or 0))

    def _batch(self, number: int) -> StoredBatch:
        return _read(self._connection.execute(f"{_BATCH} number = ?", (number,)).fetchone())

    def find_batch(self, owner: str, batch_id: str) -> StoredBatch | None:
        row = self._connection.execute(f"{_BATCH} owner = ? AND id = ?", (owner, batch_id)).fetchone()
        return _read(row) if row else None

    def list_batches(self, owner: str, limit: int, after: int = 0) -> list[StoredBatch]:
        query, values = f"{_BATCH} owner = ? AND number < ? ORDER BY number DESC LIMIT ?", (after or 1 << 62, limit)
        return [_read(row) for row in self._connection.execute(query, (owner, *values))]

    def cancel_batch(self, owner: str, batch_id: str) -> StoredBatch | None:
        with transaction(self._connection):
            batch = self.find_batch(owner, batch_id)
            if batch is not None and batch.status in ("validating", "in_progress"):
                return self._move(batch, "cancelling")
        return batch

    def _move(self, batch: StoredBatch, status: Status, **changes: Any) -> StoredBatch:
        """Give a batch another status, and other values of its columns."""
        times = dict(batch.times) | {f"{status}_at": int(time.time())}
        values = {"status": status, "times": _json(times), "has_ended": int(status in ENDED)} | changes
        names = ", ".join(f"{name} = ?" for name in values)
        statement = f"UPDATE batches SET {names} WHERE number = ?"  # noqa: S608 - the names are ours
        self._connection.execute(statement, (*values.values(), batch.number))
        return self._batch(batch.number)

    # --- the holder's calls -----------------------------------------------------------------------------------------

    def claim(self, holder: str) -> list[StoredBatch]:
        now = self.now()
        with transaction(self._connection):
            self._connection.execute(_CLAIM, (holder, now + LEASE_S, holder, now))
            rows = self._connection.execute(f"{_BATCH} has_ended = 0 AND holder = ? ORDER BY number", (holder,))
            return [_read(row) for row in rows]

    def release(self, holder: str) -> None:
        with transaction(self._connection):
            self._connection.execute("UPDATE batches SET holder = '' WHERE has_ended = 0 AND holder = ?", (holder,))

    def _held(self, batch: int, holder: str) -> StoredBatch:
        """Return a batch of this holder that has not ended."""
        query = f"{_BATCH} number = ? AND holder = ? AND has_ended = 0"
        row = self._connection.execute(query, (batch, holder)).fetchone()
        if row is None:
            raise BatchStoreError("another gateway runs the batch now", "lost")
        return _read(row)

    def begin_batch(self, batch: int, holder: str, total: int) -> StoredBatch:
        with transaction(self._connection):
            held = self._held(batch, holder)
            if held.status != "validating":
                return held
            names = (f"{held.id}_{kind}.jsonl" for kind in ("output", "error"))
            output, errors = [self._new_file(held.asked.owner, name, "batch_output", FOREVER_S) for name in names]
            return self._move(held, "in_progress", total=total, output=output, errors=errors)

    def fail_batch(self, batch: int, holder: str, reasons: Sequence[LineReason]) -> StoredBatch:
        listed = _json([reason.to_dict() for reason in reasons])
        with transaction(self._connection):
            return self._end(self._held(batch, holder), "failed", reasons=listed)

    def done_lines(self, batch: StoredBatch) -> set[int]:
        return self._places(batch.output) | self._places(batch.errors)

    def add_results(self, batch: int, holder: str, results: Sequence[LineResult]) -> None:
        with transaction(self._connection):
            held = self._held(batch, holder)
            new = [result for result in results if not self._has_result(held, result.number)]
            for result in new:
                file = held.output if result.outcome == "completed" else held.errors
                self._add_chunk(file, result.number, result.data)
            outcomes = [result.outcome for result in new]
            self._connection.execute(_COUNTERS, (outcomes.count("completed"), outcomes.count("failed"), batch))

    def _has_result(self, batch: StoredBatch, line: int) -> bool:
        query = "SELECT 1 FROM chunks WHERE file IN (?, ?) AND place = ?"
        return self._connection.execute(query, (batch.output, batch.errors, line)).fetchone() is not None

    def finalize(self, batch: int, holder: str) -> StoredBatch:
        with transaction(self._connection):
            held = self._held(batch, holder)
            return self._move(held, "finalizing") if held.status == "in_progress" else held

    def end_batch(self, batch: int, holder: str, status: Status) -> StoredBatch:
        with transaction(self._connection):
            held = self._held(batch, holder)
            ids = {}
            for name, file in (("output_id", held.output), ("error_id", held.errors)):
                query = "SELECT id FROM files WHERE number = ? AND num_bytes > 0"
                found = self._connection.execute(query, (file,)).fetchone()
                ids[name] = found[0] if found else ""
                if found:
                    self._show(file, held.asked.keep_s)
                else:
                    self._connection.execute("DELETE FROM files WHERE number = ?", (file,))
            return self._end(held, status, **ids)

    def _end(self, held: StoredBatch, status: Status, **changes: Any) -> StoredBatch:
        return self._move(held, status, forget=self.now() + self.limits.keep_s, **changes)

    # --- upkeep -----------------------------------------------------------------------------------------------------

    def is_full(self) -> bool:
        return self._used_bytes() >= self.limits.num_bytes

    def tidy(self) -> bool:
        self._clock.note(self._connection)
        if file := self._old_file():
            return self.drop_part(file) or True
        if self._forget_batches():
            return True
        free = self._number("PRAGMA freelist_count")
        if free > FREE_PAGES:  # a script, since `execute` would run only its first step
            self._connection.executescript(f"PRAGMA incremental_vacuum({min(FREE_PAGES, free - FREE_PAGES)})")
        return free > 2 * FREE_PAGES

    def _forget_batches(self) -> int:
        """Forget ended batches that are too old, and an owner's beyond the newest MOST_ENDED."""
        old = "SELECT number FROM batches WHERE has_ended = 1 AND forget <= ? LIMIT 100"
        surplus = (
            "SELECT number FROM (SELECT number, row_number() OVER (PARTITION BY owner ORDER BY number DESC) AS place "
            "FROM batches WHERE has_ended = 1) AS ended WHERE place > ? LIMIT 100"
        )
        with transaction(self._connection):
            numbers = self._connection.execute(old, (self.now(),)).fetchall()
            numbers = numbers or self._connection.execute(surplus, (MOST_ENDED,)).fetchall()
            self._connection.executemany("DELETE FROM batches WHERE number = ?", numbers)
        return len(numbers)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _read(row: Sequence[Any]) -> StoredBatch:
    """Return a batch from its row of `_COLUMNS`."""
    values = dict(zip(_COLUMNS.split(", "), row, strict=True))
    values["asked"], values["times"] = NewBatch(**orjson.loads(values["asked"])), orjson.loads(values["times"])
    return StoredBatch(**values | {"reasons": tuple(orjson.loads(values["reasons"]))})
