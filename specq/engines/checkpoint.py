"""What a checkpoint says of its model, whichever engine runs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specq.checkpoints import draft_form, is_gguf, read_text
from specq.engines.fingerprint import eos_ids, fingerprint, tensors_hash
from specq.protocol import ConfigError, ModelInfo
from specq.text import num_tokens, tokenizer_hash


def resolve_checkpoint(model: str) -> Path:
    """Return the checkpoint's directory or GGUF file; it is fetched from the hub unless `model` is one."""
    if Path(model).is_dir() or is_gguf(model):
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        directory = Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors"]))
        if not any(directory.glob("*.safetensors")):
            snapshot_download(model, allow_patterns=["*.json", "pytorch_model*.bin"])
    except Exception as error:  # the hub client raises many kinds
        raise ConfigError(f"model {model!r} is neither a directory nor to be had from the hub: {error}") from error
    return directory


def resolve_directory(model: str, needed_by: str) -> Path:
    """Return the checkpoint's directory, for what takes no GGUF files; ConfigError, which names that, for one."""
    if is_gguf(model):
        raise ConfigError(f"{model} is a GGUF file, which {needed_by} does not take; the torch engine does")
    return resolve_checkpoint(model)


def describe(
    checkpoint: Path,
    *,
    engine: str,
    name: str,
    dtype: str,
    vocab_size: int,
    max_length: int,
    kv_slots: int,
    arithmetic: str = "",
    overrides: Mapping[str, Any] | None = None,
) -> ModelInfo:
    """Return what a checkpoint's model is, as an engine runs it.

    arithmetic   which kernels compute, see `ModelInfo`; empty: the engine has one kind
    overrides    its options that change the text
    """
    tokens, tokenizer = _tokenizer(checkpoint, vocab_size)
    tensors = tensors_hash(checkpoint)
    return ModelInfo(
        name=name or _name(checkpoint),
        fingerprint=fingerprint(checkpoint, overrides, tensors=tensors),
        former_fingerprint="" if is_gguf(checkpoint) else tensors,  # older versions read none
        dtype=dtype,
        arithmetic=arithmetic or engine,
        engine=engine,
        vocab_size=vocab_size,
        num_tokens=tokens,
        eos_ids=eos_ids(checkpoint),
        max_length=max_length,
        tokenizer_hash=tokenizer,
        kv_slots=kv_slots,
    )


def _tokenizer(checkpoint: Path, vocab_size: int) -> tuple[int, str]:
    """Return the number of tokens and the hash of a checkpoint's tokenizer, or of the one that it says it is for."""
    if shape := draft_form.draft_shape(checkpoint):
        return shape.num_tokens, shape.tokenizer_hash
    text = read_text(checkpoint, "tokenizer.json")
    return (num_tokens(text), tokenizer_hash(text)) if text else (vocab_size, "")


def _name(checkpoint: Path) -> str:
    return checkpoint.stem if is_gguf(checkpoint) else checkpoint.name
