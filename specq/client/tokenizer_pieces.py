"""A tokenizer comes in pieces, in any order, perhaps twice; this joins them."""

from __future__ import annotations

from collections.abc import Callable

from specq.protocol import TokenizerChunk
from specq.text import join_chunks

Recall = Callable[[TokenizerChunk], dict[str, str] | None]


class TokenizerPieces:
    """The pieces of one tokenizer; `recall` returns its files if they are known from before, given its first piece."""

    def __init__(self, recall: Recall) -> None:
        self._recall, self._pieces = recall, dict[int, TokenizerChunk]()

    def clear(self) -> None:
        """Forget all pieces."""
        self._pieces.clear()

    def add(self, piece: TokenizerChunk) -> dict[str, str] | None:
        """Return the files (name to text) if they are whole, else None; raises ProtocolError if they make no tokenizer.

        A piece of another model than the last one starts anew.
        """
        if any(other.model != piece.model or other.count != piece.count for other in self._pieces.values()):
            self._pieces.clear()
        self._pieces[piece.index] = piece
        known = self._recall(piece) if piece.index == 0 else None
        if known is None and len(self._pieces) < piece.count:
            return None
        return known or join_chunks(list(self._pieces.values()))
