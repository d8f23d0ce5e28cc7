"""What a checkpoint directory says of its model, whichever engine runs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specq.engines.fingerprint import eos_ids, fingerprint, tensors_hash
from specq.protocol import ConfigError, ModelInfo
from specq.text import num_tokens, tokenizer_hash


def resolve_directory(model: str) -> Path:
    """Return the checkpoint's directory, fetched from the hub unless `model` is one."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        directory = Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors"]))
        if not any(directory.glob("*.safetensors")):
            snapshot_download(model, allow_patterns=["*.json", "pytorch_model*.bin"])
    except Exception as error:  # the hub client raises many kinds
        raise ConfigError(f"model {model!r} is neither a directory nor to be had from the hub: {error}") from error
    return directory


def describe(
    directory: Path,
    *,
    engine: str,
    name: str,
    dtype: str,
    vocab_size: int,
    max_length: int,
    kv_slots: int,
    overrides: Mapping[str, Any] | None = None,
) -> ModelInfo:
    """Return what a checkpoint's model is, as an engine runs it; `overrides`: its options that change the text."""
    tokenizer = directory / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8") if tokenizer.exists() else ""
    tensors = tensors_hash(directory)
    return ModelInfo(
        name=name or directory.name,
        fingerprint=fingerprint(directory, overrides, tensors=tensors),
        former_fingerprint=tensors,
        dtype=dtype,
        engine=engine,
        vocab_size=vocab_size,
        num_tokens=num_tokens(text) if text else vocab_size,
        eos_ids=eos_ids(directory),
        max_length=max_length,
        tokenizer_hash=tokenizer_hash(text) if text else "",
        kv_slots=kv_slots,
    )
