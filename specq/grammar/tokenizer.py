"""A model's tokenizer as llguidance has it. All matchers of a process share one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from specq.protocol import ConfigError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@dataclass(frozen=True, slots=True)
class GrammarTokenizer:
    """llguidance's tokenizer, and the ids of the special tokens by their spelling."""

    inner: LLTokenizer
    special: Mapping[str, int]

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text, in which special tokens may stand."""
        return self.inner.tokenize_str(text, parse_special=True)


def build_tokenizer(files: dict[str, str], vocab_size: int, end_ids: tuple[int, ...]) -> GrammarTokenizer:
    """Return the tokenizer of {name: text} of a checkpoint. It holds the GIL: 0.2 s for 49,152 tokens.

    Raises ConfigError if llguidance is not installed or cannot read the files.
    """
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise ConfigError("grammars need the package llguidance: pip install 'llguidance>=1.7,<2'") from None
    if "tokenizer.json" not in files:
        raise ConfigError("the model has no tokenizer.json, so it cannot follow grammars")
    try:
        inner = LLTokenizer(files["tokenizer.json"], n_vocab=vocab_size, eos_token=list(end_ids))
        added = orjson.loads(files["tokenizer.json"]).get("added_tokens", [])
        spelled = {one["content"]: one["id"] for one in added if one["id"] < vocab_size}
    except Exception as error:  # noqa: BLE001 - whatever llguidance raises for files that it does not know
        raise ConfigError(f"llguidance cannot read the model's tokenizer.json: {error}") from None
    return GrammarTokenizer(inner, {text: one for text, one in spelled.items() if inner.is_special_token(one)})
