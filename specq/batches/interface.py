"""The interface of the store of files and batches, and its limits.

The store is apart from the broker's journal: an upload never waits for the journal, and never fills it
([decision 19](docs/decisions/0019-files-and-batches-have-a-store-of-their-own.md)).

Every call is one short transaction. The store's time is like the journal's (`specq.journal.interface`): it never
decreases and counts while the machine is up. It decides when files are forgotten, batches expire and leases run out.

A batch is run by one gateway, its holder, for as long as its lease lasts. Rule: every write for a running batch names
the holder, and a former holder's is refused (`lost`).

A running batch has two hidden files, one for answers and one for errors. The result of line N is their chunk N. So a
result has its place before the file is shown, and is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from specq.batches.lines import LineReason
from specq.batches.values import LineResult, NewBatch, Purpose, Status, StoredBatch, StoredFile
from specq.protocol import SpecqError

CHUNK_BYTES = 1 << 18  # of an uploaded file
LEASE_S = 6.0  # time after which another gateway runs a silent gateway's batches
MOST_OPEN = 100  # batches of an owner that have not ended
MOST_FILES = 10_000  # of an owner
MOST_ENDED = 1000  # batches of an owner that have ended; the oldest are forgotten


class BatchStoreError(SpecqError):
    """The store cannot do what was asked.

    - `code`: `busy` (it cannot be read or written now), `full` (no room), `too_large` (one file), `lost` (another
      gateway runs the batch), `conflict` (another request had this key).
    """

    def __init__(self, message: str, code: Literal["busy", "full", "too_large", "lost", "conflict"]) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """The limits of a store: bytes of all files, of one owner's and of one upload; seconds for which files are kept.

    Uploads leave a quarter of the bytes for results.
    """

    num_bytes: int
    owner_bytes: int
    file_bytes: int
    keep_s: int

    @property
    def upload_bytes(self) -> int:
        """Return the bytes that all files may have after an upload."""
        return self.num_bytes * 3 // 4


class BatchTables(Protocol):
    """An open store. One thread at a time. Each method may raise BatchStoreError (`busy`)."""

    limits: StoreLimits

    def now(self) -> float:
        """Return the store's time."""

    # --- files ------------------------------------------------------------------------------------------------------

    def new_file(self, owner: str, name: str, within_s: float) -> int:
        """Create a hidden file and return its number. It is forgotten unless it is finished `within_s` seconds.

        Raises BatchStoreError (`full`).
        """

    def append(self, file: int, place: int, data: bytes) -> None:
        """Add chunk number `place` to a hidden file. Raises BatchStoreError (`full`)."""

    def finish_file(self, file: int, name: str, keep_s: float) -> StoredFile:
        """Show a file, which is kept for `keep_s` seconds."""

    def find_file(self, owner: str, file_id: str) -> StoredFile | None:
        """Return an owner's file."""

    def list_files(
        self, owner: str, limit: int, after: int = 0, purpose: Purpose | None = None, *, newest_first: bool = True
    ) -> list[StoredFile]:
        """Return an owner's files. `after`: the number of the last one before them; 0: from the begin."""

    def hide(self, file: int) -> bool:
        """Hide a file that will be dropped. False: a batch that has not ended reads it."""

    def drop_part(self, file: int) -> bool:
        """Delete a part of a hidden file. False: it is gone."""

    def chunk(self, file: int, after: int) -> tuple[int, bytes] | None:
        """Return the next chunks of a file behind place `after`, joined, with the place of the last one.

        They have about CHUNK_BYTES. None: there are no more.
        """

    # --- batches ----------------------------------------------------------------------------------------------------

    def new_batch(self, new: NewBatch, input_file: StoredFile, key: str = "") -> StoredBatch:
        """Create a batch, in the state `validating`. Raises BatchStoreError (`full`, `conflict`).

        `key`: the owner's name of this request. With the same one, the same request returns its batch, and another
        one is a `conflict`.
        """

    def find_batch(self, owner: str, batch_id: str) -> StoredBatch | None:
        """Return an owner's batch."""

    def list_batches(self, owner: str, limit: int, after: int = 0) -> list[StoredBatch]:
        """Return an owner's batches, newest first. `after`: the number of the last one before them."""

    def cancel_batch(self, owner: str, batch_id: str) -> StoredBatch | None:
        """Ask for the end of a batch, and return it. An ended or ending one is not changed."""

    def claim(self, holder: str) -> list[StoredBatch]:
        """Become, or stay, the holder of all unfinished batches that have no other holder, and return these."""

    def release(self, holder: str) -> None:
        """Give all batches of a holder back."""

    def begin_batch(self, batch: int, holder: str, total: int) -> StoredBatch:
        """Note that a batch's lines are valid and run from now on."""

    def fail_batch(self, batch: int, holder: str, reasons: Sequence[LineReason]) -> StoredBatch:
        """End a batch whose file cannot be used."""

    def done_lines(self, batch: StoredBatch) -> set[int]:
        """Return the lines that have a result."""

    def add_results(self, batch: int, holder: str, results: Sequence[LineResult]) -> None:
        """Write results. Lines that have one already keep it."""

    def finalize(self, batch: int, holder: str) -> StoredBatch:
        """Note that all lines have a result, unless the batch is being cancelled. Return the batch."""

    def end_batch(self, batch: int, holder: str, status: Status) -> StoredBatch:
        """End a batch: show the files of its results that are not empty."""

    # --- upkeep -----------------------------------------------------------------------------------------------------

    def is_full(self) -> bool:
        """Return whether there is no room for more results."""

    def tidy(self) -> bool:
        """Do one small step: forget what is too old, return space. False: there was no work."""

    def close(self) -> None:
        """Close the store."""
