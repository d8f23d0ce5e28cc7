"""What each token of a tokenizer is: its spelling in the vocabulary, its bytes, its text.

Rule: the tokenizer's own decoder is the reference. All code that shows or compares single tokens uses this module. A
byte-level decoder joins bytes. Any other decoder decodes a token between two others. Several (SentencePiece's) drop a
space where a text begins or ends.

The module also turns a tokenizer's files into messages and back. They are cut into pieces. So a small message never
waits behind a large one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson
from tokenizers import Tokenizer

from specq.protocol import ModelInfo, ProtocolError, TokenizerChunk

_BEFORE, _AFTER = "a", "b"  # tokens that no decoder changes
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextPiece(NamedTuple):
    """The text that some tokens add: `sure`, then `followed` if a token comes after them, else `last`."""

    sure: str = ""
    followed: str = ""
    last: str = ""


NO_PIECE = TextPiece()


@dataclass(frozen=True, slots=True)
class Token:
    """One token.

    - spelling: as in the vocabulary ("\u0120the", "\u2581the", "<0x0A>"), like transformers' `convert_ids_to_tokens`.
      "": there is no such token.
    - data: its bytes within a text; for a special token those of its spelling.
    - is_special: whether texts leave it out.
    - is_byte: whether it stands for one byte, which makes characters with the bytes beside it.
    - piece: what it adds to a text when it is not at the beginning. Empty if only the bytes count.
    """

    spelling: str = ""
    data: bytes = b""
    is_special: bool = False
    is_byte: bool = False
    piece: TextPiece = NO_PIECE

    @property
    def text(self) -> str:
        """The token's text. Bytes that are not whole characters are U+FFFD, as in vLLM."""
        return self.data.decode("utf-8", "replace")


class TokenTexts:
    """The tokens of one tokenizer by id.

    - kinds: the types of its decoder's parts.
    - is_byte_level: whether tokens are bytes, and a text is the bytes of its tokens.
    - special: the texts of the special tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._decoder = tokenizer, tokenizer.decoder
        parts = _parts(orjson.loads(self._decoder.__getstate__())) if self._decoder else []
        self.kinds = frozenset(str(part.get("type")) for part in parts)
        self.is_byte_level = "ByteLevel" in self.kinds
        self._replaced = [
            (str(part["pattern"].get("String", "")), str(part["content"]))
            for part in parts
            if part["type"] == "Replace"
        ]
        self.special = frozenset(
            token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
        )
        self._num_after = len(self._decoded([_BEFORE, _AFTER])) - len(_BEFORE)  # characters
        self._tokens: dict[int, Token] = {}

    def __getitem__(self, token_id: int) -> Token:
        """Return a token. An id that the tokenizer does not have gives a token without a spelling."""
        token = self._tokens.get(token_id)
        if token is None:
            token = self._tokens[token_id] = self._make(token_id)
        return token

    def _make(self, token_id: int) -> Token:
        spelling = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if not spelling:
            return Token()
        if spelling in self.special:
            return Token(spelling, self._without_marks(spelling).encode(), is_special=True)
        if self.is_byte_level:
            return Token(spelling, _read_byte_level(self._without_marks(spelling)))
        if "ByteFallback" in self.kinds and (byte := _BYTE_TOKEN.fullmatch(self._without_marks(spelling))):
            return Token(spelling, bytes([int(byte[1], 16)]), is_byte=True)
        piece = self.piece([spelling])
        return Token(spelling, (piece.sure + piece.followed).encode(), piece=piece)

    def _without_marks(self, spelling: str) -> str:
        """Return a spelling without what its decoder removes, and for byte-level ones after all its replacements."""
        for pattern, content in self._replaced:
            if pattern and (self.is_byte_level or not content):
                spelling = spelling.replace(pattern, content)
        return spelling

    def piece(self, spellings: Sequence[str], *, is_first: bool = False) -> TextPiece:
        """Return what tokens that are not byte-level add to a text together. `is_first`: they begin the text."""
        before, start = ([], 0) if is_first else ([_BEFORE], len(_BEFORE))
        last = self._decoded([*before, *spellings])[start:]
        followed = self._decoded([*before, *spellings, _AFTER])[start : -self._num_after]
        if followed == last:
            return TextPiece(last)
        sure = common_start(followed, last)
        return TextPiece(sure, followed[len(sure) :], last[len(sure) :])

    def _decoded(self, spellings: list[str]) -> str:
        return str(self._decoder.decode(spellings)) if self._decoder else " ".join(spellings)


def common_start(first: str, second: str) -> str:
    """Return the common beginning of two texts."""
    if first.startswith(second):
        return second
    differing = (i for i, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return first[: next(differing, len(first))]


def _parts(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a decoder, which may be one part or a sequence."""
    inner = decoder.get("decoders")
    return [own for each in inner for own in _parts(each)] if isinstance(inner, list) else [decoder]


def _characters() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary (GPT-2 moves unprintable bytes up)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _characters()


def _read_byte_level(spelling: str) -> bytes:
    """Return the bytes of a spelling. One with other characters, as in added tokens, is plain text."""
    try:
        return bytes([_BYTES[character] for character in spelling])
    except KeyError:
        return spelling.encode()


CHUNK_BYTES = 1 << 20


def tokenizer_chunks(model: ModelInfo, files: dict[str, str]) -> Iterator[TokenizerChunk]:
    """Yield the pieces of the files (name -> text) of a model's tokenizer, in order."""
    data, model = orjson.dumps(files), model.of_before()  # no reader needs more, and an older one refuses it
    count = -(-len(data) // CHUNK_BYTES)
    for index in range(count):
        piece = data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        yield TokenizerChunk(model=model, index=index, count=count, data=np.frombuffer(piece, np.uint8))


def join_chunks(chunks: Sequence[TokenizerChunk]) -> dict[str, str]:
    """Return the files of a complete set of pieces in any order. Raises ProtocolError if they are not complete."""
    ordered = sorted(chunks, key=lambda chunk: chunk.index)
    if [chunk.index for chunk in ordered] != list(range(ordered[0].count if ordered else 1)):
        raise ProtocolError("pieces of the tokenizer are missing")
    try:
        files = orjson.loads(b"".join(chunk.data.tobytes() for chunk in ordered))
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"the tokenizer is not valid JSON: {error}") from None
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise ProtocolError("the tokenizer is not a JSON object of texts")
    return files
