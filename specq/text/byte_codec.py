"""A tokenizer as an exact map between bytes and token ids, for pieces within a text.

`TextCodec` is for readable text and whole prompts. Here half a character is two or three bytes. No token is added
before or after a text, and the text is not normalised. The bytes of the ids from `encode` are the input bytes, except
bytes without a token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

import orjson

from specq.protocol import ConfigError
from specq.text.codec import TextCodec, build_tokenizer, parse_tokenizer, vocabulary_of
from specq.text.token_texts import TokenTexts

_STRAY = re.compile("([\udc80-\udcff]+)")  # bytes that are not UTF-8, as the error handler "surrogateescape" shows them
_KEPT_NORMALIZERS = {"Replace"}  # the space as a letter, which is undone below; others change or add text


class ByteCodec:
    """The tokenizer of one model.

    - tokens: the bytes of each id. None for an id without bytes (a special token, an unknown word, a gap).
    - special: the special tokens' ids by their text.
    - ends: the ids that begin and end a text, by role ("bos_token", "eos_token"), if named.
    - before: the special tokens that the model requires before a text.
    """

    def __init__(self, files: dict[str, str]) -> None:
        codec = TextCodec(files)
        _check_kinds(codec.tokens.kinds)
        content = parse_tokenizer(files["tokenizer.json"])
        added = content.get("added_tokens") or []
        self.special = {str(token["content"]): int(token["id"]) for token in added if token.get("special")}
        self.ends = {
            role: self.special[text]
            for role, text in codec.special_tokens.items()
            if role in ("bos_token", "eos_token") and text in self.special
        }
        self.before = [token_id for token_id in codec.encode("") if codec.tokens[token_id].is_special]
        if self.before and self.before[-1] == self.ends.get("eos_token") != self.ends.get("bos_token"):
            self.before.pop()  # it comes after a text
        self.tokens = _tokens(content, codec.tokens)
        byte_tokens = {codec.tokens[i].data[0]: i for i in range(len(self.tokens)) if codec.tokens[i].is_byte}
        self._ids = _by_bytes(self.tokens, frozenset(byte_tokens.values()) | _copies(content))
        self._byte_ids = {byte: byte_tokens.get(byte, self._ids.get(bytes([byte]))) for byte in range(256)}
        self._tokenizer = build_tokenizer(orjson.dumps(_within(content)).decode())
        self._tokenizer.encode_special_tokens = True  # text that is spelled like a special token is plain text

    @property
    def num_tokens(self) -> int:
        """The number of tokens, including those without bytes."""
        return sum(token is not None for token in self.tokens) + len(self.special)

    def id_of(self, token: bytes) -> int | None:
        """Return the id of the token with these bytes, or None."""
        return self._ids.get(token)

    def decode(self, token_ids: Iterable[int]) -> bytes:
        """Return the bytes of some ids. Ids without bytes, and those outside the vocabulary, add no bytes."""
        tokens = self.tokens
        return b"".join(tokens[i] or b"" for i in token_ids if 0 <= i < len(tokens))

    def encode(self, data: bytes) -> list[int]:
        """Return the ids of some bytes: text as the tokenizer splits it, other bytes one by one."""
        token_ids: list[int] = []
        for i, run in enumerate(_STRAY.split(data.decode("utf-8", "surrogateescape"))):
            if i % 2:
                token_ids += self._one_by_one(run.encode("utf-8", "surrogateescape"))
            elif run:
                token_ids += self._cut(run)
        return token_ids

    def _cut(self, text: str) -> list[int]:
        """Return the ids of a text; if they are not exact, those of its halves."""
        token_ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        data = text.encode()
        if self.decode(token_ids) == data:
            return token_ids
        if len(text) == 1:
            return self._one_by_one(data)
        middle = len(text) // 2
        return self._cut(text[:middle]) + self._cut(text[middle:])

    def _one_by_one(self, data: bytes) -> list[int]:
        """Return one id for each byte that has one."""
        return [token_id for byte in data if (token_id := self._byte_ids[byte]) is not None]


def whole_characters(data: bytes) -> int:
    """Return the length of these bytes without an incomplete character at the end."""
    for size in range(1, min(4, len(data)) + 1):
        byte = data[-size]
        if byte & 0xC0 == 0x80:
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return len(data) - size if length > size else len(data)
    return len(data)


# --- what a tokenizer.json says -------------------------------------------------------------------------------------

_METASPACE = "Metaspace"
_WITH_BYTES = {"ByteLevel", _METASPACE, "ByteFallback", "Replace"}  # decoders


def _check_kinds(kinds: AbstractSet[str]) -> None:
    """Raise ConfigError for tokenizers whose tokens have no bytes of their own."""
    if not kinds & _WITH_BYTES:
        named = ", ".join(sorted(kinds)) or "none"
        raise ConfigError(
            f"tokens of this tokenizer have no bytes of their own (decoder: {named}); "
            "byte-level ones and SentencePiece's have"
        )


def _parts(part: Any, list_name: str) -> list[dict[str, Any]]:
    """Return the parts of a component, which may be one part or a sequence."""
    if not isinstance(part, dict):
        return []
    inner = part.get(list_name)
    return [own for each in inner for own in _parts(each, list_name)] if isinstance(inner, list) else [part]


def _tokens(content: dict[str, Any], texts: TokenTexts) -> list[bytes | None]:
    """Return the bytes of each id; None for special and unknown ones."""
    vocabulary = vocabulary_of(content)
    ids = [*vocabulary.values(), *(token["id"] for token in content.get("added_tokens") or [])]
    found = [texts[token_id] for token_id in range(1 + max(ids, default=-1))]
    tokens = [None if token.is_special else token.data or None for token in found]
    unknown = content["model"].get("unk_token")
    unknown_id = content["model"].get("unk_id", vocabulary.get(unknown) if unknown else None)
    if unknown_id is not None:
        tokens[unknown_id] = None
    return tokens


def _copies(content: dict[str, Any]) -> frozenset[int]:
    """Return the ids of tokens whose text is encoded as another id.

    `specq.checkpoints.gguf_tokenizer` marks them, and the decoder first removes the mark.
    """
    first = next(iter(_parts(content.get("decoder"), "decoders")), {})
    if (first.get("type"), first.get("content")) != ("Replace", ""):
        return frozenset()
    mark = str(first["pattern"].get("String") or "")
    return frozenset(i for text, i in vocabulary_of(content).items() if mark and text.endswith(mark))


def _by_bytes(tokens: list[bytes | None], last: frozenset[int]) -> dict[bytes, int]:
    """Return the ids by their bytes. Of several ids the first is used; ids in `last` are used only without another."""
    ids: dict[bytes, int] = {}
    for token_id in sorted(range(len(tokens)), key=lambda i: (i in last, i)):
        token = tokens[token_id]
        if token is not None:
            ids.setdefault(token, token_id)
    return ids


def _within(content: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer that splits a piece of a text without a prefix and without normalisation."""
    normalizers = [
        part for part in _parts(content.get("normalizer"), "normalizers") if part.get("type") in _KEPT_NORMALIZERS
    ]
    splitters = [_without_prefix(part) for part in _parts(content.get("pre_tokenizer"), "pretokenizers")]
    return content | {
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splitters} if splitters else None,
        "post_processor": None,
    }


def _without_prefix(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") == _METASPACE:
        kept = {key: value for key, value in part.items() if key != "add_prefix_space"}
        return kept | {"prepend_scheme": "never"}
    return part | {"add_prefix_space": False} if "add_prefix_space" in part else part
