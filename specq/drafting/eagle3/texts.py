"""The data of texts for an EAGLE-3 head: which rows of a text are in its cache, and which wait.

For waiting rows it keeps where the target's hidden states before them are. The keys and values of rows in the cache
have a range for each text, in tensors that grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from specq.protocol import Int32Array
from specq.verifier.sources import Followed

LEAST_ROOM = 128  # rows
MOST_BYTES = 2 << 30  # of all ranges together, though each may have ALWAYS rows
ALWAYS = 1024
NOBODY = 0  # the place of no text: padding of a batch reads and writes here


class StateCache:
    """Ranges of equal room, at places. Indices are integers on the cache's device.

    num_moves: how often all ranges moved to other memory.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, hidden: int, like: torch.Tensor) -> None:
        """Start empty. `like`: a tensor with the device and number format."""
        self._rows = like.new_zeros(2, 1, num_kv_heads, LEAST_ROOM, head_dim)  # keys, values
        self._lasts = like.new_zeros(1, hidden)
        self._row_bytes = 2 * num_kv_heads * head_dim * like.element_size()
        self._free: list[int] = []
        self.num_moves = 0

    @property
    def rows(self) -> torch.Tensor:
        """Keys and values of all texts, [2, places, kv_heads, room, dim], until they move."""
        return self._rows

    @property
    def room(self) -> int:
        """How many rows each range has."""
        return self._rows.shape[3]

    @property
    def most_rows(self) -> int:
        """How many rows a text may have, with the current number of texts."""
        return max(MOST_BYTES // (len(self._lasts) * self._row_bytes), ALWAYS)

    def open(self) -> int:
        """Return a free place."""
        if not self._free:
            self.reserve(self.room, 2 * len(self._lasts))
        return self._free.pop()

    def close(self, place: int) -> None:
        """Give a place back."""
        self._free.append(place)

    def reserve(self, num_rows: int, num_places: int = 0) -> None:
        """Make room for texts of `num_rows` rows, and for `num_places` texts."""
        count, room = len(self._lasts), self.room
        if num_rows > room or num_places > count:
            self._free += range(max(num_places, count) - 1, count - 1, -1)
            self._grow(max(num_places, count), max(room, 1 << (num_rows - 1).bit_length()))

    def _grow(self, count: int, room: int) -> None:
        rows, lasts = self._rows, self._lasts
        self._rows = rows.new_zeros(2, count, rows.shape[2], room, rows.shape[4])
        self._rows[:, : rows.shape[1], :, : rows.shape[3]] = rows
        self._lasts = lasts.new_zeros(count, lasts.shape[1])
        self._lasts[: len(lasts)] = lasts
        self.num_moves += 1

    def write(self, places: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [n, kv_heads, dim] of rows, at these places [n] and slots [n] of their ranges."""
        self._rows[0][places, :, slots] = keys
        self._rows[1][places, :, slots] = values

    def read(self, places: torch.Tensor, num_rows: int, num_more: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values [texts, kv_heads, num_rows + num_more, dim] of texts at places [texts].

        Values behind a text's end are meaningless. The `num_more` values are 0.
        """
        found = self._rows[:, :, :, :num_rows].index_select(1, places)
        if num_more:
            found = torch.nn.functional.pad(found, (0, 0, 0, num_more))
        keys, values = found.unbind(0)
        return keys, values

    def keep_lasts(self, places: torch.Tensor, states: torch.Tensor) -> None:
        """Store the output [n, hidden] of the last rows of texts, at these places [n]."""
        self._lasts.index_copy_(0, places, states)

    def lasts(self, places: torch.Tensor) -> torch.Tensor:
        """Return the output of the last rows, [n, hidden]."""
        return self._lasts.index_select(0, places)


MANY_PARTS = 64  # parts of a waiting text; beyond this its hidden states get memory of their own


class WaitingText(NamedTuple):
    """Tokens of a text, each with the row of hidden states [n, width] before it."""

    values: torch.Tensor
    rows: Sequence[int]
    token_ids: Sequence[int]

    def split(self, count: int) -> tuple[WaitingText, WaitingText]:
        """Return the first `count` tokens, and the rest."""
        return (
            WaitingText(self.values, self.rows[:count], self.token_ids[:count]),
            WaitingText(self.values, self.rows[count:], self.token_ids[count:]),
        )


@dataclass(slots=True)
class EagleText:
    """A session's text.

    It has `length` rows in the cache at `place`, and `num_waiting` rows that wait. The first row reads the token at
    `first`.
    """

    place: int
    first: int
    length: int = 0
    waiting: list[WaitingText] = field(default_factory=list)
    num_waiting: int = 0

    @property
    def end(self) -> int:
        return self.first + self.length + self.num_waiting

    def add(self, values: torch.Tensor, one: Followed, most: int) -> None:
        """Add new rows; after a gap forget all before it.

        If more than `most` rows wait, only the later half is kept.
        """
        if one.first > self.end:
            self.begin_at(one.first)
        known = self.end - one.first
        if known >= len(one.rows):
            return
        rows, token_ids = (one.rows[known:], one.token_ids[known:]) if known else (one.rows, one.token_ids)
        self.waiting.append(WaitingText(values, rows, token_ids))
        self.num_waiting += len(rows)
        if self.num_waiting > most:
            self.keep_last(most // 2)
        if len(self.waiting) > MANY_PARTS:
            taps, token_ids = gathered(self.waiting), [token for part in self.waiting for token in part.token_ids]
            self.waiting = [WaitingText(taps, range(len(taps)), token_ids)]

    def begin_at(self, first: int) -> None:
        """Forget all rows; the next row reads the token at `first`."""
        self.first, self.length, self.num_waiting = first, 0, 0
        self.waiting = []

    def keep_last(self, count: int) -> None:
        """Forget all rows but at most the last `count` waiting ones."""
        beyond, end = max(self.num_waiting - count, 0), self.end
        self.take(beyond)
        waiting, num_waiting = self.waiting, self.num_waiting
        self.begin_at(end - num_waiting)
        self.waiting, self.num_waiting = waiting, num_waiting

    def take(self, count: int) -> list[WaitingText]:
        """Return the first `count` waiting rows, which have places in the cache from now on."""
        self.length, self.num_waiting = self.length + count, self.num_waiting - count
        if not self.num_waiting:
            whole, self.waiting = self.waiting, []
            return whole
        taken = list[WaitingText]()
        while count:
            part, rest = self.waiting[0].split(count)
            self.waiting[:1] = [rest] if rest.rows else []
            taken.append(part)
            count -= len(part.rows)
        return taken


def gathered(parts: Sequence[WaitingText]) -> torch.Tensor:
    """Return the hidden states of parts, one after the other, in new memory."""
    return torch.cat([part.values.index_select(0, torch.tensor(part.rows).to(part.values.device)) for part in parts])


class TappedStates(NamedTuple):
    """Hidden states [n, width], and the index of the state before each row, i32[rows]."""

    values: torch.Tensor
    rows: Int32Array


def taps_of(parts: Sequence[WaitingText]) -> TappedStates:
    """Return the hidden states of parts, one after the other. Usually all are of one step, and nothing is copied."""
    values = parts[0].values
    if all(part.values is values for part in parts):
        return TappedStates(values, np.array([row for part in parts for row in part.rows], np.int32))
    found = gathered(parts)
    return TappedStates(found, np.arange(len(found), dtype=np.int32))
