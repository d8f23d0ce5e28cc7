"""The data of texts for an EAGLE-3 head: which rows of a text are in its cache, and which wait.

For waiting rows it keeps where the target's hidden states before them are, in arrays or in tensors of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specq.protocol import Int32Array
from specq.verifier.sources import Followed

MANY_PARTS = 64  # parts of a waiting text; beyond this its hidden states get memory of their own


class WaitingText(NamedTuple):
    """Tokens of a text, each with the row of hidden states [n, width] before it."""

    values: Any
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

    def add(self, values: Any, one: Followed, most: int) -> None:
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


def gathered(parts: Sequence[WaitingText]) -> Any:
    """Return the hidden states of parts, one after the other, in new memory."""
    if isinstance(parts[0].values, np.ndarray):
        return np.concatenate([part.values[np.array(part.rows)] for part in parts])
    import torch

    return torch.cat([part.values.index_select(0, torch.tensor(part.rows).to(part.values.device)) for part in parts])


class TappedStates(NamedTuple):
    """Hidden states [n, width], and the index of the state before each row, i32[rows]."""

    values: Any
    rows: Int32Array


def taps_of(parts: Sequence[WaitingText]) -> TappedStates:
    """Return the hidden states of parts, one after the other. Usually all are of one step, and nothing is copied."""
    values = parts[0].values
    if all(part.values is values for part in parts):
        return TappedStates(values, np.array([row for part in parts for row in part.rows], np.int32))
    found = gathered(parts)
    return TappedStates(found, np.arange(len(found), dtype=np.int32))
