"""The small texts of a model, under their names in Hugging Face layout.

Rule: all code reads these texts here, independent of a model's layout.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from specq.checkpoints.gguf_config import generation_config, model_config
from specq.checkpoints.gguf_file import GgufFile, forget_headers, gguf_parts, is_gguf, read_gguf
from specq.checkpoints.gguf_tokenizer import tokenizer_files
from specq.protocol import ConfigError, shown

# Fields of a config.json that must be at least 1, under the names that most architectures use.
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip


def read_text(model: Path, name: str) -> str | None:
    """Return one of a model's texts, None if it has none of that name.

    Raises ConfigError for a text that is not UTF-8, and for an unusable GGUF file.
    """
    if is_gguf(model):
        return _made_of(read_gguf(model)).get(name)
    path = model / name
    try:
        return path.read_text("utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from None


def read_json(model: Path, name: str) -> dict[str, Any]:
    """Return the JSON object of a text, {} if there is no text. Raises ConfigError if it is not a JSON object."""
    text = read_text(model, name)
    try:
        said = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{model / name} is not valid JSON: {error}") from None
    if not isinstance(said, dict):
        raise ConfigError(f"{model / name} holds {type(said).__name__}, but must be a JSON object")
    return said


def read_config(model: Path) -> dict[str, Any]:
    """Return the content of config.json, {} if there is none. Raises ConfigError for an impossible size."""
    said = read_json(model, "config.json")
    for name in SIZES:
        size = said.get(name)
        if size is not None and not (isinstance(size, int) and size >= 1):
            raise ConfigError(f"{model / 'config.json'}: {name} is {shown(size)}, but must be an integer of at least 1")
    return said


def weight_bytes(model: Path) -> int:
    """Return the total size of a model's weight files, in bytes; 0 for none.

    For a GGUF file these are all its parts. For a directory these are the safetensors files, else the pickles.
    """
    if is_gguf(model):
        found = gguf_parts(model)
    else:
        found = [*model.glob("*.safetensors")] or [*model.glob("*.bin"), *model.glob("*.pt")]
    return sum(file.stat().st_size for file in found)


def forget_gguf() -> None:
    """Free what was read of GGUF files: tens of megabytes for a large vocabulary."""
    _made_of.cache_clear()
    forget_headers()


@lru_cache(maxsize=2)
def _made_of(file: GgufFile) -> dict[str, str]:
    """Return the texts made from a GGUF file's metadata."""
    made = {"config.json": model_config(file), "generation_config.json": generation_config(file)}
    return {**{name: json.dumps(said) for name, said in made.items()}, **tokenizer_files(file)}
