"""Keys and values of the rows of many texts, for a head of one layer: a range for each text, in one tensor that grows."""

from __future__ import annotations

import torch

from specq.protocol import IntpArray

LEAST_ROOM = 128  # rows
MOST_BYTES = 2 << 30  # of all ranges together, though each may have ALWAYS rows
ALWAYS = 1024


class StateCache:
    """Ranges of equal room, at places; `like`: a tensor of the device and number format."""

    def __init__(self, num_kv_heads: int, head_dim: int, like: torch.Tensor) -> None:
        self._values = like.new_zeros(0, LEAST_ROOM, 2, num_kv_heads, head_dim)
        self._row_bytes = 2 * num_kv_heads * head_dim * like.element_size()
        self._free: list[int] = []

    @property
    def most_rows(self) -> int:
        """How many rows a text may have, at so many texts as there are."""
        return max(MOST_BYTES // (max(len(self._values), 1) * self._row_bytes), ALWAYS)

    def open(self) -> int:
        """Return a free place."""
        if not self._free:
            count, room = self._values.shape[:2]
            self._grow(max(1, 2 * count), room)
            self._free = list(range(len(self._values) - 1, count - 1, -1))
        return self._free.pop()

    def close(self, place: int) -> None:
        """Give a place back."""
        self._free.append(place)

    def reserve(self, num_rows: int) -> None:
        """Make room for a text of so many rows."""
        count, room = self._values.shape[:2]
        if num_rows > room:
            self._grow(count, 1 << (num_rows - 1).bit_length())

    def _grow(self, count: int, room: int) -> None:
        grown = self._values.new_zeros(count, room, *self._values.shape[2:])
        grown[: len(self._values), : self._values.shape[1]] = self._values
        self._values = grown

    def write(self, places: IntpArray, rows: IntpArray, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep keys and values [n, kv_heads, dim] of these rows of the texts at these places, i64[n] both."""
        at = tuple(torch.from_numpy(index).to(keys.device, non_blocking=True) for index in (places, rows))
        self._values[at] = torch.stack([keys, values], 1)

    def read(self, places: IntpArray, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values [texts, num_rows, kv_heads, dim]; what stands behind a text's end means nothing. They may change
        with the next `write`."""
        if len(places) == 1:
            found = self._values[int(places[0])][None, :num_rows]
        else:
            at = torch.from_numpy(places).to(self._values.device, non_blocking=True)
            found = self._values[:, :num_rows].index_select(0, at)
        keys, values = found.unbind(2)
        return keys, values
