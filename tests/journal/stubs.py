"""A journal that does nothing, for tests of what surrounds it."""

from __future__ import annotations

from typing import Any

from specq.journal import Journal, Kept


class IdleJournal:
    """A journal for one broker without jobs. It takes all records, and forgets them."""

    offset = 0.0

    def write(self, records: Any) -> frozenset[int]:
        return frozenset()

    write_all = Journal.write_all

    def renew(self) -> tuple[str, ...]:
        return ()

    def lost(self) -> frozenset[int]:
        return frozenset()

    def take(self) -> list[Any]:
        return []

    def keep_to(self, most_bytes: int, before: float) -> Kept:
        return Kept(0, is_full=False)

    def note_time(self, noted: Any) -> None:
        """Have no time."""

    def give_back(self, most_bytes: int, *, idle: bool) -> bool:
        return False

    def close(self) -> None:
        """Be gone."""
