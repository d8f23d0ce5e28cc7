"""A model's tokenizer as llguidance has it. All matchers of a process share one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specq.protocol import ConfigError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def build_tokenizer(files: dict[str, str], vocab_size: int, end_ids: tuple[int, ...]) -> LLTokenizer:
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
        return LLTokenizer(files["tokenizer.json"], n_vocab=vocab_size, eos_token=list(end_ids))
    except Exception as error:  # noqa: BLE001 - whatever it raises for files that it does not know
        raise ConfigError(f"llguidance cannot read the model's tokenizer.json: {error}") from None
