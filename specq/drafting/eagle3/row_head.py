"""What EAGLE-3 heads of NumPy and of torch have in common: which rows of each text wait, and passes over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specq.drafting.trees.texts import Cache, FollowedText, NewRows, TextHead, taps_of
from specq.protocol import BoolArray, Float32Array, Int32Array, IntpArray
from specq.verification import Logits


class EagleRows(NamedTuple):
    """Rows of n texts for one pass.

    places     the texts' places in the cache.
    counts     i64[n]: how many rows each text has. The following fields list the rows one text after the other.
    states     [rows, hidden]: the state before each row's token.
    token_ids, positions   i64[rows].
    slots      i64[rows]: where each row is kept, in its text's range of the cache.
    is_seen    bool[n, most rows, slots]: which part of the range each row sees, itself included.
    """

    places: Sequence[int]
    counts: IntpArray
    states: Any
    token_ids: IntpArray
    positions: IntpArray
    slots: IntpArray
    is_seen: BoolArray


class RowHead(TextHead):
    """Follows texts, and computes their rows and those below them. To implement it, define the methods that raise.

    token_ids    i32[columns]: the token of each column of its logits, ascending. None: column i is token i.
    limit_vocab  drafted tokens are below this.
    """

    def __init__(
        self, layers: tuple[int, ...], width: int, token_ids: Int32Array | None, limit_vocab: int, cache: Cache
    ) -> None:
        super().__init__(layers, width, cache)
        self.token_ids, self.limit_vocab = token_ids, limit_vocab

    def _follow(self, texts: list[FollowedText]) -> None:
        befores = np.array([text.length for text in texts])
        rows = NewRows.of(texts)
        ends = befores + rows.counts
        is_seen = np.arange(ends.max()) <= befores[:, None, None] + np.arange(rows.counts.max())[:, None]
        taps = taps_of(rows.parts)
        states = self._project(taps.values, taps.rows)
        token_ids = np.array([token for part in rows.parts for token in part.token_ids])
        places = [text.place for text in texts]
        self._compute(EagleRows(places, rows.counts, states, token_ids, rows.positions, rows.slots, is_seen))

    # --- what an implementation defines -------------------------------------------------------------------------------

    def _project(self, values: Any, rows: Int32Array) -> Any:
        """Return states [rows, hidden] from these rows of hidden states [n, width]."""
        raise NotImplementedError

    def _compute(self, rows: EagleRows) -> None:
        """Compute rows of texts, and store their KV and the output of each text's last row."""
        raise NotImplementedError

    def run(self, rows: EagleRows) -> list[Any]:
        """Compute rows below texts, whose states are a list, and store their KV; return [rows, hidden] a text."""
        raise NotImplementedError

    def last(self, text: FollowedText) -> Any:
        """Return the output of a text's last row, [hidden]."""
        raise NotImplementedError

    def logits(self, states: Sequence[Any]) -> Logits:
        """Return the logits f32[n, columns] behind n rows, given the output of each."""
        raise NotImplementedError

    def copied(self, states: Float32Array) -> Any:
        """Return a copy of hidden states of the host, where the head computes."""
        raise NotImplementedError
