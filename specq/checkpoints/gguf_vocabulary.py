"""The vocabulary of a GGUF file: its tokens by id, and their kinds.

A token may appear twice. Its text is encoded as the last of its ids, as in llama.cpp's and transformers' tables. Each
of its ids is decoded to that text. In tokenizer.json the earlier ones end with a mark, which its decoder removes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from specq.checkpoints.gguf_file import GgufFile
from specq.protocol import ConfigError

_COPY = "\U0010fffd"  # a character of no script: the mark of a token that appears again later


class TokenKind(IntEnum):
    """The kinds of tokens (`tokenizer.ggml.token_type`). Padding of the vocabulary is called unused."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file.

    - tokens: by id, without tokens that only fill the vocabulary. All texts differ.
    - kinds: the kind of each id.
    - has_copies: whether tokens end with the mark.
    """

    tokens: dict[int, str]
    kinds: dict[int, int]
    has_copies: bool

    def ids_of(self, *kinds: TokenKind) -> list[int]:
        """Return the ids of these kinds, ascending."""
        return [i for i in self.tokens if self.kinds[i] in kinds]


@dataclass(frozen=True, slots=True)
class TokenizerForm:
    """What a kind of tokenizer has in tokenizer.json, apart from the tokens.

    - model: the model's parts that differ from those of plain BPE.
    - decoders: they turn tokens into text, in this order.
    - special: the kinds of tokens that texts leave out.
    - begins: a prompt begins with BOS unless the file specifies otherwise.
    - ids: special tokens that this kind has if the file does not name them.
    """

    model: dict[str, Any]
    decoders: list[dict[str, Any]]
    pre_tokenizer: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None
    special: frozenset[TokenKind] = frozenset({TokenKind.CONTROL})
    begins: bool = False
    ids: Mapping[str, int] = field(default_factory=dict)


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """Return a file's vocabulary. Raises ConfigError if it has none, or if tokens and kinds differ in number."""
    tokens, kinds = values(file, "tokens", str), dict(enumerate(values(file, "token_type", int)))
    if len(kinds) != len(tokens):
        raise ConfigError(
            f"{file.path} is damaged: it has {len(tokens)} tokens and {len(kinds)} token types; fetch it again"
        )
    unused = int(TokenKind.UNUSED)  # comparing with a member takes several times as long
    named = {i: tokens[i] for i, kind in kinds.items() if kind != unused}
    has_copies = len(set(named.values())) < len(named)
    return Vocabulary(_marked(named) if has_copies else named, kinds, has_copies)


def _marked(tokens: dict[int, str]) -> dict[int, str]:
    """Return the tokens; if a text appears again later, with the mark at its end once for each time."""
    named, copies = dict[int, str](), Counter[str]()
    for i, text in reversed(tokens.items()):
        named[i] = text + _COPY * copies[text]
        copies[text] += 1
    return dict(sorted(named.items()))


def num_gguf_tokens(file: GgufFile) -> int:
    """Return one more than the largest id of a token, without padding. Raises like `read_vocabulary`."""
    kinds = values(file, "token_type", int)
    return next((i + 1 for i in range(len(kinds) - 1, -1, -1) if kinds[i] != TokenKind.UNUSED), 0)


def same_tokenizer(first: GgufFile, second: GgufFile) -> bool:
    """Return whether two files have the same tokens, kinds, merges and scores, apart from padding."""
    size = num_gguf_tokens(first)

    def identity(file: GgufFile) -> list[Any]:
        lists = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "scores"))
        others = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "merges"))
        return [*(found[:size] if isinstance(found, list) else found for found in lists), *others]

    return size == num_gguf_tokens(second) and identity(first) == identity(second)


def values(file: GgufFile, key: str, kind: type) -> list[Any]:
    """Return a list of the tokenizer. Raises ConfigError if it is missing, or has values of another type."""
    found = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
        raise ConfigError(f"{file.path} has no tokenizer.ggml.{key} that is a list of {kind.__name__}")
    return found


def decoder(form: TokenizerForm, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the decoder of a tokenizer.json. It first removes the mark of copies, if there are any."""
    unmarked = {"type": "Replace", "pattern": {"String": _COPY}, "content": ""}
    parts = [*([unmarked] if vocabulary.has_copies else []), *form.decoders]
    return parts[0] if len(parts) == 1 else {"type": "Sequence", "decoders": parts}
