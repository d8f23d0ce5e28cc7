"""The store's two threads, one that writes and one that reads, so that no request waits for the disk.

The file is opened when it is first needed: a gateway without batches has none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from specq.batches.interface import BatchStoreError, BatchTables, StoreLimits
from specq.batches.schema import store_errors
from specq.batches.store import SqliteBatches
from specq.protocol import ConfigError

T = TypeVar("T")
Action = Callable[[BatchTables], T]


def open_store(place: Path | str, limits: StoreLimits) -> SqliteBatches:
    """Return the store in a file, or at an address. Raises ConfigError if it cannot be used."""
    if isinstance(place, Path):
        return SqliteBatches(place, limits)
    from specq.batches.postgres import PostgresBatches  # imports psycopg

    return PostgresBatches(place, limits)


class BatchStore:
    """A store for asyncio. `write` and `read` raise what the action raises, and BatchStoreError."""

    def __init__(self, place: Path | str, limits: StoreLimits) -> None:
        """Prepare a store in a file, or at the address of a PostgreSQL database."""
        self.place, self.limits = place, limits
        self._writing, self._reading = (ThreadPoolExecutor(1, f"specq-batches-{name}") for name in ("write", "read"))
        self._tables: SqliteBatches | None = None
        self._reader: SqliteBatches | None = None

    @property
    def exists(self) -> bool:
        """Whether anything was ever stored."""
        try:
            return self._tables is not None or isinstance(self.place, str) or self.place.exists()
        except OSError:  # its directory cannot be read
            return False

    async def write(self, action: Action[T]) -> T:
        """Run a transaction. If the caller is cancelled, it is carried out all the same."""
        return await asyncio.get_running_loop().run_in_executor(self._writing, self._write, action)

    async def read(self, action: Action[T]) -> T:
        """Read, without delay by writes."""
        if self._reader is None:
            await self.write(lambda _: None)
        return await asyncio.get_running_loop().run_in_executor(self._reading, self._read, action)

    def _write(self, action: Action[T]) -> T:
        with store_errors():
            if self._tables is None:
                try:
                    self._tables = open_store(self.place, self.limits)
                except ConfigError as error:
                    raise BatchStoreError(str(error), "busy") from None
                self._reader = self._tables.reader()
            return action(self._tables)

    def _read(self, action: Action[T]) -> T:
        with store_errors():
            assert self._reader is not None
            return action(self._reader)

    async def chunks(self, file: int) -> AsyncIterator[bytes]:
        """Yield the chunks of a file."""
        place = -1
        while found := await self.read(lambda tables: tables.chunk(file, place)):  # noqa: B023 - awaited at once
            place, data = found
            yield data

    async def drop(self, file: int) -> None:
        """Delete a hidden file in small steps."""
        while await self.write(lambda tables: tables.drop_part(file)):
            pass

    def close(self) -> None:
        """Finish what was begun, and close the file."""
        for pool in (self._writing, self._reading):
            pool.shutdown()
        for tables in (self._tables, self._reader):
            if tables is not None:
                with contextlib.suppress(BatchStoreError), store_errors():
                    tables.close()
