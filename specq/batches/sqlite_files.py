"""Files in the store: see `specq.batches.interface`. The statements are those of both kinds of stores."""

from __future__ import annotations

import secrets
import sqlite3
import time
from contextlib import closing
from typing import Any

from specq.batches.interface import CHUNK_BYTES, MOST_FILES, BatchStoreError, StoreLimits
from specq.batches.schema import StoreClock, transaction
from specq.batches.values import Purpose, StoredFile

PART = 64  # chunks that one step deletes
MOST_READ = 1024  # chunks that are read at once
_FILE = "SELECT number, id, owner, name, purpose, num_bytes, created, expires_at FROM files WHERE"
_NEW = (
    "INSERT INTO files (id, owner, name, purpose, is_shown, num_bytes, created, expires_at, expires) "
    "VALUES (?, ?, ?, ?, 0, 0, 0, 0, ?)"
)
_SHOW = "UPDATE files SET is_shown = 1, created = ?, expires_at = ?, expires = ? WHERE number = ?"


class SqliteFiles:
    """The files of a store. Methods that begin with an underscore belong to a transaction of their caller."""

    limits: StoreLimits
    _connection: sqlite3.Connection
    _clock: StoreClock

    def new_file(self, owner: str, name: str, within_s: float) -> int:
        with transaction(self._connection):
            if self._number("SELECT count(*) FROM files WHERE owner = ?", owner) >= MOST_FILES:
                raise BatchStoreError(f"there are {MOST_FILES} files of this key; delete some", "full")
            return self._new_file(owner, name, "batch", within_s)

    def _new_file(self, owner: str, name: str, purpose: Purpose, within_s: float) -> int:
        """Create a hidden file and return its number."""
        values = f"file-{secrets.token_hex(12)}", owner, name, purpose, self._clock.now() + within_s
        return int(self._connection.execute(_NEW, values).lastrowid or 0)

    def append(self, file: int, place: int, data: bytes) -> None:
        with transaction(self._connection):
            self._check_room(file, len(data))
            self._add_chunk(file, place, data)

    def _add_chunk(self, file: int, place: int, data: bytes) -> None:
        self._connection.execute("INSERT INTO chunks VALUES (?, ?, ?)", (file, place, data))
        self._connection.execute("UPDATE files SET num_bytes = num_bytes + ? WHERE number = ?", (len(data), file))

    def _check_room(self, file: int, added: int) -> None:
        """Raise BatchStoreError if a chunk exceeds a limit."""
        row = self._connection.execute("SELECT owner, num_bytes FROM files WHERE number = ?", (file,)).fetchone()
        if row is None:
            raise BatchStoreError("the upload took too long", "full")
        owner, own = row
        if own + added > self.limits.file_bytes:
            reason = f"the file is larger than {self.limits.file_bytes} bytes (serve.upload_mb)"
            raise BatchStoreError(reason, "too_large")
        used = self._number("SELECT sum(num_bytes) FROM files WHERE owner = ?", owner)
        if used + added > self.limits.owner_bytes:
            raise BatchStoreError(f"the files of one key may have {self.limits.owner_bytes} bytes; delete some", "full")
        if self._used_bytes() + added > self.limits.upload_bytes:
            raise BatchStoreError("there is no room for more files (serve.batch_store_mb); delete some", "full")

    def _used_bytes(self) -> int:
        """Return the bytes of all files."""
        return self._number("SELECT sum(num_bytes) FROM files")

    def _number(self, query: str, *values: Any) -> int:
        row = self._connection.execute(query, values).fetchone()
        return int(row[0] or 0) if row else 0

    def finish_file(self, file: int, name: str, keep_s: float) -> StoredFile:
        with transaction(self._connection):
            self._connection.execute("UPDATE files SET name = ? WHERE number = ?", (name, file))
            self._show(file, keep_s)
            row = self._connection.execute(f"{_FILE} number = ?", (file,)).fetchone()
        if row is None:
            raise BatchStoreError("the upload took too long", "full")
        return StoredFile(*row)

    def _show(self, file: int, keep_s: float) -> None:
        wall = int(time.time())
        self._connection.execute(_SHOW, (wall, wall + int(keep_s), self._clock.now() + keep_s, file))

    def find_file(self, owner: str, file_id: str) -> StoredFile | None:
        row = self._connection.execute(f"{_FILE} owner = ? AND id = ? AND is_shown = 1", (owner, file_id)).fetchone()
        return StoredFile(*row) if row else None

    def list_files(
        self, owner: str, limit: int, after: int = 0, purpose: Purpose | None = None, *, newest_first: bool = True
    ) -> list[StoredFile]:
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        query, values = f"{_FILE} owner = ? AND is_shown = 1", [owner]
        for condition, value in ((f"number {sign} ?", after or None), ("purpose = ?", purpose)):
            if value is not None:
                query += f" AND {condition}"
                values.append(value)  # type: ignore[arg-type]
        rows = self._connection.execute(f"{query} ORDER BY number {order} LIMIT ?", (*values, limit))
        return [StoredFile(*row) for row in rows]

    def _is_used(self, file: int) -> bool:
        query = "SELECT 1 FROM batches WHERE has_ended = 0 AND ? IN (input_file, output, errors)"
        return self._connection.execute(query, (file,)).fetchone() is not None

    def hide(self, file: int) -> bool:
        with transaction(self._connection):
            if self._is_used(file):
                return False
            self._connection.execute("UPDATE files SET is_shown = 0, expires = 0 WHERE number = ?", (file,))
        return True

    def drop_part(self, file: int) -> bool:
        with transaction(self._connection):
            query = "SELECT place, length(data) FROM chunks WHERE file = ? ORDER BY place LIMIT ?"
            rows = self._connection.execute(query, (file, PART)).fetchall()
            if not rows:
                self._connection.execute("DELETE FROM files WHERE number = ?", (file,))
                return False
            places = [(file, place) for place, _ in rows]
            self._connection.executemany("DELETE FROM chunks WHERE file = ? AND place = ?", places)
            freed = sum(size for _, size in rows)
            self._connection.execute("UPDATE files SET num_bytes = num_bytes - ? WHERE number = ?", (freed, file))
        return True

    def chunk(self, file: int, after: int) -> tuple[int, bytes] | None:
        query = "SELECT place, data FROM chunks WHERE file = ? AND place > ? ORDER BY place LIMIT ?"
        found, size, last = list[bytes](), 0, after
        with closing(self._connection.execute(query, (file, after, MOST_READ))) as rows:
            for place, data in rows:
                found.append(data)
                last, size = place, size + len(data)
                if size >= CHUNK_BYTES:
                    break
        return (last, b"".join(found)) if found else None

    def _places(self, file: int) -> set[int]:
        """Return the places of a file's chunks."""
        return {place for (place,) in self._connection.execute("SELECT place FROM chunks WHERE file = ?", (file,))}

    def _old_file(self) -> int:
        """Return a file that is too old, and that no unfinished batch needs; 0: there is none."""
        query = (
            "SELECT number FROM files WHERE expires <= ? AND NOT EXISTS (SELECT 1 FROM batches WHERE has_ended = 0 "
            "AND files.number IN (input_file, output, errors)) LIMIT 1"
        )
        found = self._connection.execute(query, (self._clock.now(),)).fetchone()
        return int(found[0]) if found else 0
