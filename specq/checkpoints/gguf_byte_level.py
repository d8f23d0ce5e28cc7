"""Byte-level BPE ("gpt2" in llama.cpp): the rules by which a text is split into words.

To add a rule, add its name in llama.cpp (`tokenizer.ggml.pre`). Add the matching part of the model's own
tokenizer.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specq.checkpoints.gguf_config import refusal
from specq.checkpoints.gguf_file import GgufFile
from specq.checkpoints.gguf_vocabulary import TokenizerForm, Vocabulary, values
from specq.protocol import ConfigError


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
