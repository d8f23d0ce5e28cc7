"""What EAGLE-3 heads of NumPy and of torch have in common: which rows of each text wait, and passes over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from specq.drafting.eagle3.texts import EagleText, taps_of
from specq.protocol import BoolArray, Float32Array, Int32Array, IntpArray
from specq.verification import Logits, places_in_runs
from specq.verifier.sources import Followed

MOST_WAITING = 4096  # waiting rows of a text while no tree is requested; beyond this the oldest are forgotten
MOST_ROWS = 512  # rows of a text in a pass
MOST_BYTES = 2 << 30  # of all ranges of a cache together, though each may have ALWAYS rows
ALWAYS = 1024
LEAST_ROOM = 128  # rows of a range


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


class RowHead:
    """Follows texts, and computes their rows and those below them. To implement it, define the methods that raise.

    layers       the target's layers whose hidden states it reads. See `Tap`.
    width        columns of these hidden states.
    token_ids    i32[columns]: the token of each column of its logits, ascending. None: column i is token i.
    limit_vocab  drafted tokens are below this.
    """

    def __init__(
        self, layers: tuple[int, ...], width: int, token_ids: Int32Array | None, limit_vocab: int, cache: Cache
    ) -> None:
        self.layers, self.width, self.token_ids, self.limit_vocab = layers, width, token_ids, limit_vocab
        self.cache = cache
        self.texts: dict[int, EagleText] = {}

    # --- texts
    # ------------------------------------------------------------------------------------------------------------

    def observe(self, values: Any, followed: Sequence[Followed]) -> None:
        """Store how texts continue; see `TreeHead`."""
        values = self.taken(values)
        for one in followed:
            text = self.texts.get(one.session_id)
            if text is None:
                text = self.texts[one.session_id] = EagleText(self.cache.open(), one.first)
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

    def _follow(self, texts: list[EagleText]) -> None:
        """Compute some rows of each text, in one pass."""
        befores = np.array([text.length for text in texts])
        counts = np.array([min(text.num_waiting, MOST_ROWS) for text in texts])
        parts = [part for text, count in zip(texts, counts.tolist(), strict=True) for part in text.take(count)]
        slots = befores.repeat(counts) + places_in_runs(counts)
        # A row's position is that of the state before its token.
        positions = slots + np.array([text.first for text in texts]).repeat(counts) - 1
        is_seen = np.arange((befores + counts).max()) <= befores[:, None, None] + np.arange(counts.max())[:, None]
        taps = taps_of(parts)
        states = self._project(taps.values, taps.rows)
        token_ids = np.array([token for part in parts for token in part.token_ids])
        places = [text.place for text in texts]
        self._compute(EagleRows(places, counts, states, token_ids, positions, slots, is_seen))

    # --- what an implementation defines
    # -----------------------------------------------------------------------------------

    def taken(self, values: Any) -> Any:
        """Return hidden states [n, width], of the host or a device, in the form in which they wait."""
        raise NotImplementedError

    def _project(self, values: Any, rows: Int32Array) -> Any:
        """Return states [rows, hidden] from these rows of hidden states [n, width]."""
        raise NotImplementedError

    def _compute(self, rows: EagleRows) -> None:
        """Compute rows of texts, and store their KV and the output of each text's last row."""
        raise NotImplementedError

    def run(self, rows: EagleRows) -> list[Any]:
        """Compute rows below texts, whose states are a list, and store their KV; return [rows, hidden] a text."""
        raise NotImplementedError

    def last(self, text: EagleText) -> Any:
        """Return the output of a text's last row, [hidden]."""
        raise NotImplementedError

    def logits(self, states: Sequence[Any]) -> Logits:
        """Return the logits f32[n, columns] behind n rows, given the output of each."""
        raise NotImplementedError

    def copied(self, states: Float32Array) -> Any:
        """Return a copy of hidden states of the host, where the head computes."""
        raise NotImplementedError
