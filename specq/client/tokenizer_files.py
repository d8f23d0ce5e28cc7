"""Fetch tokenizers in pieces. Large ones stay on disk, so that a client fetches each once.

The pieces of a tokenizer may arrive in any order and more than once. `TokenizerPieces` joins them.

Rule: a cached tokenizer is used only if it is the served one. Its hash and its first piece must be the same. The hash
covers vocabulary, merges and added tokens. The first piece holds all the small files. Errors of the disk are ignored.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path

import orjson

from specq.protocol import ConfigError, TokenizerChunk
from specq.text import join_chunks, tokenizer_hash

MIN_PIECES = 2  # a tokenizer of one piece is not faster to load from disk


class TokenizerCache:
    """Tokenizers by their hash, in the folder `tokenizers` of the cache."""

    def __init__(self, cache_dir: Path | None) -> None:
        self._folder = cache_dir / "tokenizers" if cache_dir else None
        self._recalled: dict[str, str] | None = None  # the files found by `recall`

    def recall(self, first: TokenizerChunk) -> dict[str, str] | None:
        """Return the files that begin with this piece, or None."""
        path = self._path(first.model.tokenizer_hash)
        if path is None or first.count < MIN_PIECES or not path.is_file():
            return None
        try:
            data = path.read_bytes()
            files: dict[str, str] = orjson.loads(data)
            same = data.startswith(first.data.tobytes())
            same = same and tokenizer_hash(files["tokenizer.json"]) == first.model.tokenizer_hash
        except (OSError, ValueError, KeyError, TypeError, ConfigError):
            return None
        self._recalled = files if same else None
        return self._recalled

    def keep(self, files: dict[str, str]) -> None:
        """Store a tokenizer, unless it came from the cache. Other processes see the whole tokenizer, or none."""
        if files is self._recalled:
            return
        data = orjson.dumps(files)
        with contextlib.suppress(OSError, ConfigError, KeyError):
            path = self._path(tokenizer_hash(files["tokenizer.json"]))
            if path is None or (path.is_file() and path.read_bytes() == data):
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
            draft.write_bytes(data)
            draft.replace(path)

    def _path(self, name: str) -> Path | None:
        if self._folder is None or not name.isalnum():
            return None
        return self._folder / f"{name}.json"


Recall = Callable[[TokenizerChunk], dict[str, str] | None]


class TokenizerPieces:
    """The pieces of one tokenizer.

    `recall` takes its first piece and returns its files if they are cached.
    """

    def __init__(self, recall: Recall) -> None:
        self._recall, self._pieces = recall, dict[int, TokenizerChunk]()

    def clear(self) -> None:
        """Forget all pieces."""
        self._pieces.clear()

    def add(self, piece: TokenizerChunk) -> dict[str, str] | None:
        """Return the files (name to text) if they are complete, else None.

        Raises ProtocolError if they do not form a tokenizer. A piece of another model starts a new tokenizer.
        """
        if any(other.model != piece.model or other.count != piece.count for other in self._pieces.values()):
            self._pieces.clear()
        self._pieces[piece.index] = piece
        known = self._recall(piece) if piece.index == 0 else None
        if known is None and len(self._pieces) < piece.count:
            return None
        return known or join_chunks(list(self._pieces.values()))
