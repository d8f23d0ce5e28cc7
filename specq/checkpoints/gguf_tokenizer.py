"""The tokenizer of a GGUF file as the files of Hugging Face layout.

It supports byte-level BPE ("gpt2" in llama.cpp), with the word-splitting rules in RULES. Other kinds (SentencePiece and
so on) are refused. A slightly wrong tokenizer makes worse text, and the cause stays invisible.

A token may appear twice. Its text is encoded as the last of its ids, as in llama.cpp's and transformers' tables. Each
of its ids is decoded to that text. In tokenizer.json the earlier ones end with a mark, which its decoder removes.

To add a rule, add its name in llama.cpp (`tokenizer.ggml.pre`). Add the matching part of the model's own
tokenizer.json.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from specq.checkpoints.gguf_file import GgufFile
from specq.protocol import ConfigError

_KIND = "gpt2"
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # of tokenizer.ggml.token_type; padding of the vocabulary is called unused
_COPY = "\U0010fffd"  # a character of no script: the mark of a token that appears again later
_NAMED = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # key here -> name there


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


def tokenizer_files(file: GgufFile) -> dict[str, str]:
    """Return tokenizer.json and tokenizer_config.json. Raises ConfigError for a tokenizer that is not supported."""
    rule = _rule(file)
    tokens, kinds = _vocabulary(file)
    made = {"tokenizer.json": _tokenizer(file, rule, tokens, kinds), "tokenizer_config.json": _settings(file, tokens)}
    return {name: json.dumps(said, ensure_ascii=False) for name, said in made.items()}


def _rule(file: GgufFile) -> _Rule:
    kind, name = (file.metadata.get(f"tokenizer.ggml.{key}", "") for key in ("model", "pre"))
    if kind != _KIND:
        raise ConfigError(
            f"{file.path} has a tokenizer of kind {kind!r}; supported: {_KIND!r} (byte-level BPE), and not "
            f"llama, t5 (SentencePiece), bert (WordPiece), rwkv"
        )
    if not isinstance(name, str) or name not in RULES:
        raise ConfigError(
            f"{file.path} splits words by the rule {name!r} (tokenizer.ggml.pre); supported: {', '.join(RULES)}"
        )
    return RULES[name]


def _vocabulary(file: GgufFile) -> tuple[dict[int, str], dict[int, int]]:
    """Return tokens and kinds by id, without tokens that only fill the vocabulary. All texts differ: see _COPY."""
    tokens = _list(file, "tokens", str)
    kinds = dict(enumerate(_list(file, "token_type", int)))
    if len(kinds) != len(tokens):
        raise ConfigError(
            f"{file.path} is damaged: it has {len(tokens)} tokens and {len(kinds)} token types; fetch it again"
        )
    named, copies = dict[int, str](), Counter[str]()
    for i in reversed([i for i, kind in kinds.items() if kind != _UNUSED]):
        named[i] = tokens[i] + _COPY * copies[tokens[i]]
        copies[tokens[i]] += 1
    return dict(sorted(named.items())), kinds


def _list(file: GgufFile, key: str, kind: type) -> list[Any]:
    found = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
        raise ConfigError(f"{file.path} has no tokenizer.ggml.{key} that is a list of {kind.__name__}")
    return found


def _tokenizer(file: GgufFile, rule: _Rule, tokens: dict[int, str], kinds: dict[int, int]) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, token, special=kinds[i] == _CONTROL)
            for i, token in tokens.items()
            if kinds[i] in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": rule.normalizer} if rule.normalizer else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(rule.splits)},
        "post_processor": _around(file, rule, tokens),
        "decoder": _decoder(tokens),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rule.ignore_merges,
            "vocab": {token: i for i, token in tokens.items()},
            "merges": _merges(file),
        },
    }


def _decoder(tokens: dict[int, str]) -> dict[str, Any]:
    if not any(token.endswith(_COPY) for token in tokens.values()):
        return _byte_level(use_regex=True)
    unmarked = {"type": "Replace", "pattern": {"String": _COPY}, "content": ""}
    return {"type": "Sequence", "decoders": [unmarked, _byte_level(use_regex=True)]}


def _added(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    ways = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": special, **ways}


def _merges(file: GgufFile) -> list[list[str]]:
    merges = [merge.split(" ") for merge in _list(file, "merges", str)]
    wrong = next((pair for pair in merges if len(pair) != 2), None)
    if wrong is not None:
        raise ConfigError(f"{file.path} has the merge {' '.join(wrong)!r}; expected two tokens and a space between")
    return merges


def _around(file: GgufFile, rule: _Rule, tokens: dict[int, str]) -> dict[str, Any] | None:
    """Return the processor that adds BOS before a prompt and EOS after it, if requested."""
    unsaid = {"bos": rule.begins, "eos": False}
    wanted = [end for end in unsaid if file.metadata.get(f"tokenizer.ggml.add_{end}_token", unsaid[end])]
    ids = {end: i for end in wanted if (i := _special_id(file, end)) in tokens}
    if not ids:
        return None
    ends = {end: [{"SpecialToken": {"id": tokens[i], "type_id": 0}}] for end, i in ids.items()}
    first, second = ({"Sequence": {"id": name, "type_id": at}} for at, name in enumerate("AB"))
    single = [*ends.get("bos", []), first, *ends.get("eos", [])]
    special = {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in ids.values()}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, second], "special_tokens": special}


def _special_id(file: GgufFile, key: str) -> int:
    """Return the id of a token that the file names; -1 if it names none."""
    found = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return found if isinstance(found, int) else -1


def _settings(file: GgufFile, tokens: dict[int, str]) -> dict[str, Any]:
    """Return the names of special tokens and the chat template. A list by name if there is also one for tools."""
    ids = {name: _special_id(file, key) for key, name in _NAMED.items()}
    named = {f"{name}_token": tokens[i] for name, i in ids.items() if i in tokens}
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    found = {name: file.metadata.get(key) for name, key in keys.items()}
    templates = [{"name": name, "template": text} for name, text in found.items() if isinstance(text, str)]
    told = templates if len(templates) > 1 else found["default"]
    return {**named, **({"chat_template": told} if isinstance(told, list | str) else {})}
