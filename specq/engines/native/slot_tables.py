"""The tables and tokens of sessions in a KV pool. A table has the slot of each position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from specq.protocol import Int32Array, IntpArray
from specq.verification import ends_of

LEAST_ROOM = 64  # least length of a session's range


class TableMemory:
    """The tables of all sessions, and their tokens, in one array each.

    A session has a range of both arrays. The range moves when it is full.

    - offsets, rooms, lengths: i64[places], start, size and used length of each place's range.
    - ahead: i64[places], number of staged tokens of a step in flight. num_ahead is their sum.
    - known: i64[places], number of known tokens, with or without a slot. 0 if only tokens with a slot are known.
    - slots, token_ids: i32[size].
    """

    def __init__(self) -> None:
        self.offsets, self.rooms, self.lengths, self.ahead, self.known = (np.zeros(0, np.intp) for _ in range(5))
        self.num_ahead = 0
        self.slots, self.token_ids = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self._size = 0  # the part of the arrays that has ever been in use
        self._free_places: list[int] = []
        self._free_ranges: dict[int, list[int]] = {}  # offsets by size

    def open(self, length: int) -> int:
        """Return a place with room for `length` tokens."""
        if not self._free_places:
            first, more = len(self.offsets), max(4, len(self.offsets))
            columns = self.offsets, self.rooms, self.lengths, self.ahead, self.known
            grown = (np.concatenate([column, np.zeros(more, np.intp)]) for column in columns)
            self.offsets, self.rooms, self.lengths, self.ahead, self.known = grown
            self._free_places = list(range(first + more - 1, first - 1, -1))
        place = self._free_places.pop()
        self.lengths[place] = self.known[place] = 0
        self._reserve(place, length)
        return place

    def close(self, place: int) -> None:
        """Free a place."""
        self.num_ahead -= int(self.ahead[place])
        self.ahead[place] = 0
        self._free_ranges.setdefault(int(self.rooms[place]), []).append(int(self.offsets[place]))
        self._free_places.append(place)

    def behind(self, places: IntpArray, counts: IntpArray) -> IntpArray:
        """Return array positions after each place's range in use, `counts` of each, i64[sum of counts].

        They also come after the tokens of a step in flight. Ranges grow if needed.
        """
        return self.at(places, self.ends(places), counts)

    def at(self, places: IntpArray, starts: IntpArray, counts: IntpArray) -> IntpArray:
        """Return array positions in each place's range from `starts` on, `counts` of each, i64[sum of counts].

        Ranges grow if needed.
        """
        ends = starts + counts
        short = ends > self.rooms[places]
        if np.count_nonzero(short):
            for i in short.nonzero()[0].tolist():
                self._move(int(places[i]), int(ends[i]))
        firsts = self.offsets[places] + starts
        if np.count_nonzero(counts == 1) == len(counts):
            return firsts
        of_counts = ends_of(counts)
        found: IntpArray = (firsts - of_counts + counts).repeat(counts) + np.arange(of_counts[-1])
        return found

    def ends(self, places: IntpArray) -> IntpArray:
        """Return each range's used length, i64[places], including tokens of a step in flight."""
        return self.lengths[places] + self.ahead[places] if self.num_ahead else self.lengths[places]

    def _move(self, place: int, length: int) -> None:
        """Move a place's range to a larger one."""
        first, room = int(self.offsets[place]), int(self.rooms[place])
        used = int(max(self.lengths[place] + self.ahead[place], self.known[place]))
        self._reserve(place, length)
        start = self.offsets[place]
        for column in (self.slots, self.token_ids):
            column[start : start + used] = column[first : first + used]
        self._free_ranges.setdefault(room, []).append(first)

    def _reserve(self, place: int, length: int) -> None:
        """Give a place a range for `length` tokens. Sizes are powers of two, so that ranges can be reused."""
        room = max(LEAST_ROOM, 1 << (length - 1).bit_length())
        free = self._free_ranges.get(room)
        if free:
            self.offsets[place] = free.pop()
        else:
            self.offsets[place] = self._size
            self._size += room
            if self._size > len(self.slots):
                more = np.zeros(max(self._size - len(self.slots), len(self.slots)), np.int32)
                self.slots, self.token_ids = np.concatenate([self.slots, more]), np.concatenate([self.token_ids, more])
        self.rooms[place] = room


class SlotTables(Sequence[Int32Array]):
    """The tables of some sessions: views of one array, until it grows."""

    def __init__(self, slots: Int32Array, offsets: IntpArray, rooms: IntpArray) -> None:
        self._slots, self._offsets, self._rooms = slots, offsets, rooms

    @property
    def addresses(self) -> IntpArray:
        """Where each table begins in memory, i64[sessions]; valid as long as this object exists."""
        base: int = self._slots.__array_interface__["data"][0]
        return base + self._slots.itemsize * self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> Int32Array: ...
    @overload
    def __getitem__(self, index: slice) -> SlotTables: ...
    def __getitem__(self, index: int | slice) -> Int32Array | SlotTables:
        if isinstance(index, slice):
            return SlotTables(self._slots, self._offsets[index], self._rooms[index])
        first = int(self._offsets[index])
        return self._slots[first : first + int(self._rooms[index])]
