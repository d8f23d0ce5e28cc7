"""What an EAGLE-3 head knows of texts: which of a text's rows are in its cache, and which wait, with where the target's hidden states before
them are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from specq.protocol import Int32Array
from specq.verifier.sources import Followed

MANY_PARTS = 64  # of a text that waits; beyond them its hidden states get memory of their own


class Waiting(NamedTuple):
    """Tokens of a text, before each of which stands one of these rows of hidden states [n, width]."""

    values: torch.Tensor
    rows: Sequence[int]
    token_ids: Sequence[int]

    def split(self, count: int) -> tuple[Waiting, Waiting]:
        """Return the first so many, and the rest."""
        return (
            Waiting(self.values, self.rows[:count], self.token_ids[:count]),
            Waiting(self.values, self.rows[count:], self.token_ids[count:]),
        )


@dataclass(slots=True)
class EagleText:
    """A session's text: `length` rows in the cache at `place`, the first of which reads the token at `first`, and `num_waiting` that wait."""

    place: int
    first: int
    length: int = 0
    waiting: list[Waiting] = field(default_factory=list)
    num_waiting: int = 0

    @property
    def end(self) -> int:
        return self.first + self.length + self.num_waiting

    def add(self, values: torch.Tensor, one: Followed, most: int) -> None:
        """Take in what is new; behind a gap forget all before it. Of more than `most` rows that wait the later half is kept."""
        if one.first > self.end:
            self.begin_at(one.first)
        known = self.end - one.first
        if known >= len(one.rows):
            return
        rows, token_ids = (one.rows[known:], one.token_ids[known:]) if known else (one.rows, one.token_ids)
        self.waiting.append(Waiting(values, rows, token_ids))
        self.num_waiting += len(rows)
        if self.num_waiting > most:
            self.keep_last(most // 2)
        if len(self.waiting) > MANY_PARTS:
            taps, token_ids = gathered(self.waiting), [token for part in self.waiting for token in part.token_ids]
            self.waiting = [Waiting(taps, range(len(taps)), token_ids)]

    def begin_at(self, first: int) -> None:
        """Forget all; the next row reads the token at `first`."""
        self.first, self.length, self.num_waiting = first, 0, 0
        self.waiting = []

    def keep_last(self, count: int) -> None:
        """Forget all but at most so many rows that wait."""
        beyond, end = max(self.num_waiting - count, 0), self.end
        self.take(beyond)
        waiting, num_waiting = self.waiting, self.num_waiting
        self.begin_at(end - num_waiting)
        self.waiting, self.num_waiting = waiting, num_waiting

    def take(self, count: int) -> list[Waiting]:
        """Return the first rows that wait, so many, which have places in the cache from now on."""
        self.length, self.num_waiting = self.length + count, self.num_waiting - count
        if not self.num_waiting:
            whole, self.waiting = self.waiting, []
            return whole
        taken = list[Waiting]()
        while count:
            part, rest = self.waiting[0].split(count)
            self.waiting[:1] = [rest] if rest.rows else []
            taken.append(part)
            count -= len(part.rows)
        return taken


def gathered(parts: Sequence[Waiting]) -> torch.Tensor:
    """Return the hidden states of parts, one after the other, in memory of their own."""
    return torch.cat([part.values.index_select(0, torch.tensor(part.rows).to(part.values.device)) for part in parts])


class Taps(NamedTuple):
    """Hidden states [n, width], and which of them stand before some rows, i32[rows]."""

    values: torch.Tensor
    rows: Int32Array


def taps_of(parts: Sequence[Waiting]) -> Taps:
    """Return the hidden states of parts, one after the other: as a rule all are of one step, and nothing is copied."""
    values = parts[0].values
    if all(part.values is values for part in parts):
        return Taps(values, np.array([row for part in parts for row in part.rows], np.int32))
    found = gathered(parts)
    return Taps(found, np.arange(len(found), dtype=np.int32))
