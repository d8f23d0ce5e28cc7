"""The texts of a head that reads a target's hidden states: which rows of a text are in its cache, and which wait.

Each token of a text has a row, which belongs to the hidden states before it. For waiting rows a text keeps where these
states are, in arrays or in tensors of torch. A rejected draft has no row: only the tokens of a text have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from specq.protocol import Int32Array, IntpArray
from specq.verification import places_in_runs
from specq.verifier.sources import Followed

MOST_WAITING = 4096  # waiting rows of a text while no tree is requested; beyond this the oldest are forgotten
MOST_ROWS = 512  # rows of a text in a pass
MOST_BYTES = 2 << 30  # of all ranges of a cache together, though each may have ALWAYS rows
ALWAYS = 1024
LEAST_ROOM = 128  # rows of a range
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
class FollowedText:
    """A session's text.

    It has `length` rows in the cache at `place`, and `num_waiting` rows that wait. The first row belongs to the token
    at `first`. `last_token`: the token at the end.
    """

    place: int
    first: int
    length: int = 0
    last_token: int = -1
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
        self.last_token = token_ids[-1]
        self.num_waiting += len(rows)
        if self.num_waiting > most:
            self.keep_last(most // 2)
        if len(self.waiting) > MANY_PARTS:
            taps, token_ids = gathered(self.waiting), [token for part in self.waiting for token in part.token_ids]
            self.waiting = [WaitingText(taps, range(len(taps)), token_ids)]

    def begin_at(self, first: int) -> None:
        """Forget all rows; the next row belongs to the token at `first`."""
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


class NewRows(NamedTuple):
    """New rows of n texts, one text after the other, each with its place in the cache.

    texts      the texts, which have these rows from now on.
    counts     i64[n]: how many rows each text has.
    slots      i64[rows]: where each row is kept, in its text's range of the cache.
    positions  i64[rows]: of the token before each row's own, to which its hidden states belong.
    parts      the tokens of the rows, and their hidden states.
    """

    texts: list[FollowedText]
    counts: IntpArray
    slots: IntpArray
    positions: IntpArray
    parts: list[WaitingText]

    @property
    def places(self) -> IntpArray:
        """The place of each row's text, i64[rows]."""
        return np.array([text.place for text in self.texts]).repeat(self.counts)

    @classmethod
    def of(cls, texts: list[FollowedText]) -> NewRows:
        """Take waiting rows of these texts, as many of each as a pass takes."""
        befores = np.array([text.length for text in texts])
        counts = np.array([min(text.num_waiting, MOST_ROWS) for text in texts])
        parts = [part for text, count in zip(texts, counts.tolist(), strict=True) for part in text.take(count)]
        slots = befores.repeat(counts) + places_in_runs(counts)
        firsts = np.array([text.first for text in texts]).repeat(counts)
        return cls(texts, counts, slots, slots + firsts - 1, parts)


class Cache(Protocol):
    """The keys and values of texts' rows: a range for each text, at a place.

    most_rows: how many rows a text may have, with the current number of texts.
    """

    @property
    def most_rows(self) -> int: ...

    def open(self) -> int:
        """Return a free place."""
        ...

    def close(self, place: int) -> None:
        """Give a place back."""
        ...

    def reserve(self, num_rows: int) -> None:
        """Make room for texts of `num_rows` rows."""
        ...


class TextHead:
    """Follows texts. To implement it, define the methods that raise.

    layers  the target's layers whose hidden states it reads. See `Tap`.
    width   columns of these hidden states.
    """

    def __init__(self, layers: tuple[int, ...], width: int, cache: Cache) -> None:
        self.layers, self.width, self.cache = layers, width, cache
        self.texts: dict[int, FollowedText] = {}

    def observe(self, values: Any, followed: Sequence[Followed]) -> None:
        """Store how texts continue; see `TreeHead`."""
        values = self.taken(values)
        for one in followed:
            text = self.texts.get(one.session_id)
            if text is None:
                text = self.texts[one.session_id] = FollowedText(self.cache.open(), one.first)
            text.add(values, one, MOST_WAITING)

    def known(self, session_id: int) -> int:
        """Return up to where a text is known; see `TreeHead`."""
        text = self.texts.get(session_id)
        return text.end if text is not None else 0

    def close(self, session_id: int) -> None:
        """Forget a session; see `TreeHead`."""
        text = self.texts.pop(session_id, None)
        if text is not None:
            self.cache.close(text.place)

    def follow(self, session_ids: Sequence[int]) -> None:
        """Compute the waiting rows of known sessions."""
        texts, most_rows = [self.texts[session_id] for session_id in session_ids], self.cache.most_rows
        for text in texts:
            if text.num_waiting and text.length + text.num_waiting > most_rows:
                text.keep_last(most_rows // 2)
        self.cache.reserve(max(text.length + text.num_waiting for text in texts))
        while waiting := [text for text in texts if text.num_waiting]:
            self._follow(waiting)

    def taken(self, values: Any) -> Any:
        """Return hidden states [n, width], of the host or a device, in the form in which they wait."""
        raise NotImplementedError

    def _follow(self, texts: list[FollowedText]) -> None:
        """Compute some rows of each text, in one pass."""
        raise NotImplementedError
