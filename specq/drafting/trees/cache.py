"""The keys and values of texts' rows, for a head in torch: a range for each text, in tensors that grow."""

from __future__ import annotations

import torch

from specq.drafting.trees.texts import ALWAYS, LEAST_ROOM, MOST_BYTES

ALL_HEADS = slice(None)
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

    def write(
        self,
        places: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        heads: slice = ALL_HEADS,
    ) -> None:
        """Store keys and values [n, heads, dim] of rows, at these places [n] and slots [n] of their ranges."""
        self._rows[0][places, heads, slots] = keys
        self._rows[1][places, heads, slots] = values

    def read(
        self, places: torch.Tensor, num_rows: int, num_more: int = 0, heads: slice = ALL_HEADS
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values [texts, heads, num_rows + num_more, dim] of texts at places [texts].

        Values behind a text's end are meaningless. The `num_more` values are 0.
        """
        found = self._rows[:, :, heads, :num_rows].index_select(1, places)
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
