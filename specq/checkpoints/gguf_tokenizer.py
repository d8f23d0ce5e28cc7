"""The tokenizer of a GGUF file as the files of Hugging Face layout.

A token of the vocabulary may appear twice. Its text is encoded as the last of its ids, as in llama.cpp's and
transformers' tables. Each of its ids is decoded to that text. In tokenizer.json the earlier ones end with a mark, which
its decoder removes.

Byte-level BPE ("gpt2" in llama.cpp) splits a text into words by rules. To add one, add its name in llama.cpp
(`tokenizer.ggml.pre`). Add the matching part of the model's own tokenizer.json.

SentencePiece's BPE ("llama" in llama.cpp): the tokenizer of Llama 1 and 2, Mistral and TinyLlama.

SentencePiece joins the two neighbours whose token has the highest score, the leftmost first, until no neighbours make a
token. A character that has no token becomes its bytes (<0x0A>).

tokenizer.json has a list of merges instead of scores. It has all pairs that make a token, in the order of its score.
Scores of a trained vocabulary differ, and then both ways give the same tokens: a token always comes from the same pair,
since the order of the merges inside it does not depend on the text around it. So the order of a token's other pairs is
free. It is that of transformers, so that the checkpoint's own tokenizer.json has the same hash.

Two differences from llama.cpp are intended:

- Of tokens with equal scores, the one with the lower id comes first. Files whose converter did not know the scores have
  one score for all. The ids of most vocabularies are in the order of the merges.
- A merge never makes a control token, as in SentencePiece.

As in transformers, a token is not made if one of its characters has no token of its own.

KINDS has the kinds that are supported. Others are refused. A slightly wrong tokenizer makes worse text, and the cause
stays invisible. To add a kind, add a function that returns its `TokenizerForm`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import orjson

from specq.checkpoints.gguf_config import refusal
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


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a text is split into words, as in tokenizer.json.

    `begins`: a prompt begins with BOS unless the file specifies otherwise.
    """

    splits: tuple[dict[str, Any], ...]
    normalizer: str = ""
    ignore_merges: bool = False
    begins: bool = False


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _by_regex(digits: str) -> tuple[dict[str, Any], ...]:
    """Return the splits of the GPT-4 family. The regex `digits` matches the digits of one word."""
    regex = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return split, _byte_level(use_regex=False)


_GPT2 = _Rule((_byte_level(use_regex=True),))
_EACH_DIGIT = _Rule(({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)))
_LLAMA3 = _Rule(_by_regex(r"\p{N}{1,3}"), ignore_merges=True, begins=True)
_QWEN2 = _Rule(_by_regex(r"\p{N}"), normalizer="NFC")
RULES = {
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _EACH_DIGIT,
    "starcoder": _EACH_DIGIT,
}


def byte_level(file: GgufFile, _vocabulary: Vocabulary) -> TokenizerForm:
    """Return the form of a file's tokenizer. Raises ConfigError for a rule that is not supported."""
    rule = _rule(file)
    return TokenizerForm(
        model={"ignore_merges": rule.ignore_merges, "merges": _merges(file)},
        decoders=[_byte_level(use_regex=True)],
        pre_tokenizer={"type": "Sequence", "pretokenizers": list(rule.splits)},
        normalizer={"type": rule.normalizer} if rule.normalizer else None,
        begins=rule.begins,
    )


def _rule(file: GgufFile) -> _Rule:
    name = file.metadata.get("tokenizer.ggml.pre", "")
    if not isinstance(name, str) or name not in RULES:
        raise refusal(file, "tokenizer.ggml.pre", name, ", ".join(RULES))
    return RULES[name]


def _merges(file: GgufFile) -> list[list[str]]:
    merges = [merge.split(" ") for merge in values(file, "merges", str)]
    wrong = next((pair for pair in merges if len(pair) != 2), None)
    if wrong is not None:
        raise ConfigError(f"{file.path} has the merge {' '.join(wrong)!r}; expected two tokens and a space between")
    return merges


_SPACE = "\u2581"  # how a vocabulary spells a space
_MADE = (TokenKind.NORMAL, TokenKind.USER_DEFINED)  # by merges


def sentencepiece(file: GgufFile, vocabulary: Vocabulary) -> TokenizerForm:
    """Return the form of a file's tokenizer. Raises ConfigError for a vocabulary that is damaged or not supported."""
    _check_bytes(file, vocabulary)
    begins_with_space = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    to_letter = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    to_space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if begins_with_space else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins_with_space else []
    return TokenizerForm(
        model={
            "unk_token": next((vocabulary.tokens[i] for i in vocabulary.ids_of(TokenKind.UNKNOWN)), None),
            "fuse_unk": True,
            "byte_fallback": True,
            "merges": _scored_merges(vocabulary, _scores(file)),
        },
        decoders=[to_space, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        normalizer={"type": "Sequence", "normalizers": [*prepend, to_letter]},
        special=frozenset({TokenKind.CONTROL, TokenKind.UNKNOWN}),
        begins=True,
        ids={"bos": 1, "eos": 2, "unknown": 0},
    )


def _check_bytes(file: GgufFile, vocabulary: Vocabulary) -> None:
    found = {vocabulary.tokens[i] for i in vocabulary.ids_of(TokenKind.BYTE)}
    needed = {f"<0x{byte:02X}>" for byte in range(256)}
    if found != needed:
        wrong = sorted(found - needed) or sorted(needed - found)
        raise ConfigError(
            f"{file.path}: its {len(found)} tokens of kind byte must be <0x00> to <0xFF>, each once; "
            f"{'unexpected' if found - needed else 'missing'}: {', '.join(wrong[:3])}"
        )


def _scores(file: GgufFile) -> list[float]:
    """Return the score of each id."""
    scores, num_tokens = values(file, "scores", float), len(values(file, "tokens", str))
    if len(scores) != num_tokens or any(map(math.isnan, scores)):
        raise ConfigError(
            f"{file.path} is damaged: it has {num_tokens} tokens and {len(scores)} scores (tokenizer.ggml.scores), "
            f"which must be numbers; fetch it again"
        )
    return scores


def _scored_merges(vocabulary: Vocabulary, scores: list[float]) -> list[list[str]]:
    """Return the pairs of tokens that make a token, the best first."""
    ids = {vocabulary.tokens[i]: i for i in vocabulary.ids_of(*_MADE)}
    lengths = {len(text) for text in ids}
    merges: list[list[str]] = []
    for text in sorted(ids, key=lambda text: (-scores[ids[text]], ids[text])):
        places = (n for n in range(1, len(text)) if n in lengths and len(text) - n in lengths)
        pairs = [(text[:n], text[n:]) for n in places]
        there = ([ids[first], ids[second]] for first, second in pairs if first in ids and second in ids)
        merges += ([vocabulary.tokens[i] for i in pair] for pair in sorted(there))
    return merges


KINDS = {"gpt2": byte_level, "llama": sentencepiece}  # of tokenizer.ggml.model
_ABOUT = "gpt2 (byte-level BPE), llama (SentencePiece's BPE)"
_CHANGES = ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap")
_NAMED = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # key here -> name there


def tokenizer_files(file: GgufFile) -> dict[str, str]:
    """Return tokenizer.json and tokenizer_config.json. Raises ConfigError for a tokenizer that is not supported."""
    kind = file.metadata.get("tokenizer.ggml.model", "")
    if not isinstance(kind, str) or kind not in KINDS:
        raise refusal(file, "tokenizer.ggml.model", kind, _ABOUT)
    for key in _CHANGES:
        if value := file.metadata.get(key):
            raise refusal(file, key, value, "texts that are not changed")
    vocabulary = read_vocabulary(file)
    form = KINDS[kind](file, vocabulary)
    ids = {key: _special_id(file, key, form) for key in _NAMED}
    made = {
        "tokenizer.json": _tokenizer(file, form, vocabulary, ids),
        "tokenizer_config.json": _settings(file, vocabulary, ids),
    }
    return {name: orjson.dumps(said).decode() for name, said in made.items()}


def _special_id(file: GgufFile, key: str, form: TokenizerForm) -> int:
    """Return the id of a token that the file or its kind names; -1 if neither does."""
    found = file.metadata.get(f"tokenizer.ggml.{key}_token_id", form.ids.get(key))
    return found if isinstance(found, int) else -1


def _tokenizer(file: GgufFile, form: TokenizerForm, vocabulary: Vocabulary, ids: dict[str, int]) -> dict[str, Any]:
    plain = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    unused = dict.fromkeys(("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, vocabulary.tokens[i], special=vocabulary.kinds[i] in form.special)
            for i in vocabulary.ids_of(*form.special, TokenKind.USER_DEFINED)
        ],
        "normalizer": form.normalizer,
        "pre_tokenizer": form.pre_tokenizer,
        "post_processor": _around(file, form, vocabulary.tokens, ids),
        "decoder": decoder(form, vocabulary),
        "model": {
            "type": "BPE",
            **unused,
            **plain,
            "vocab": {token: i for i, token in vocabulary.tokens.items()},
            **form.model,
        },
    }


def _added(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    ways = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": special, **ways}


def _around(
    file: GgufFile, form: TokenizerForm, tokens: dict[int, str], special_ids: dict[str, int]
) -> dict[str, Any] | None:
    """Return the processor that adds BOS before a prompt and EOS after it, if requested."""
    unsaid = {"bos": form.begins, "eos": False}
    wanted = [end for end in unsaid if file.metadata.get(f"tokenizer.ggml.add_{end}_token", unsaid[end])]
    ids = {end: i for end in wanted if (i := special_ids[end]) in tokens}
    if not ids:
        return None
    ends = {end: [{"SpecialToken": {"id": tokens[i], "type_id": 0}}] for end, i in ids.items()}
    first, second = ({"Sequence": {"id": name, "type_id": at}} for at, name in enumerate("AB"))
    single = [*ends.get("bos", []), first, *ends.get("eos", [])]
    special = {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in ids.values()}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, second], "special_tokens": special}


def _settings(file: GgufFile, vocabulary: Vocabulary, ids: dict[str, int]) -> dict[str, Any]:
    """Return the names of special tokens and the chat template. A list by name if there is also one for tools."""
    tokens = vocabulary.tokens
    named = {f"{name}_token": tokens[ids[key]] for key, name in _NAMED.items() if ids[key] in tokens}
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    found = {name: file.metadata.get(key) for name, key in keys.items()}
    templates = [{"name": name, "template": text} for name, text in found.items() if isinstance(text, str)]
    told = templates if len(templates) > 1 else found["default"]
    return {**named, **({"chat_template": told} if isinstance(told, list | str) else {})}
