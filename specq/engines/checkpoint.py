"""What a checkpoint says of its model, whichever engine runs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specq.checkpoints import draft_form, gguf_in, gguf_name, is_gguf, read_config, read_text
from specq.engines.ends import added_ends, end_tokens, former_ends
from specq.engines.fingerprint import fingerprint, tensors_hash
from specq.protocol import ConfigError, ModelInfo
from specq.text import TOKENIZER_FILES, load_tokenizer_files, num_tokens, tokenizer_hash


def resolve_checkpoint(model: str) -> Path:
    """Return the checkpoint's directory or GGUF file; it is fetched from the hub unless `model` is one."""
    found = local_checkpoint(model)
    if found is not None:
        return found
    directory = _fetched(model, "*.json", "*.jinja", "*.safetensors")
    if not any(directory.glob("*.safetensors")):
        _fetched(model, "*.json", "pytorch_model*.bin")
    return directory


def local_checkpoint(model: str) -> Path | None:
    """Return the checkpoint's directory, its GGUF file, or the one that its directory holds; None for a hub name."""
    path = Path(model)
    if path.is_dir():
        return gguf_in(path) or path
    return path if is_gguf(path) else None


def tokenizer_files(model: str) -> dict[str, str]:
    """Return a model's tokenizer files as name -> text; of one that is on the hub these alone are fetched. Empty if it
    has none."""
    return load_tokenizer_files(local_checkpoint(model) or _fetched(model, *TOKENIZER_FILES))


def _fetched(model: str, *patterns: str) -> Path:
    """Return the directory of a model's files from the hub that fit the patterns."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns)))
    except Exception as error:  # the hub client raises many kinds
        raise ConfigError(
            f"model {model!r} is neither a name of `specq models` nor a directory, and it cannot be had from the hub: {error}"
        ) from error


def resolve_directory(model: str, needed_by: str) -> Path:
    """Return the checkpoint's directory, for what takes no GGUF files; raises as `check_no_gguf` does."""
    check_no_gguf(model, needed_by)
    return resolve_checkpoint(model)


def check_no_gguf(model: str, needed_by: str, name: str = "") -> None:
    """Raise ConfigError, which names what takes no GGUF files, for one. `name`: under which the model was asked for."""
    if is_gguf(model):
        shown = f"{name} ({model})" if name and name != model else model
        raise ConfigError(
            f"{shown} is a GGUF file, which {needed_by} does not take: choose a directory in Hugging Face layout or a "
            "hub name, or the torch engine"
        )


def read_info(checkpoint: Path, name: str = "") -> ModelInfo:
    """Return what a checkpoint's files say of its model, whose weights are not read: so neither fingerprint, nor number
    format, nor KV. ConfigError for files that are of no use."""
    said = read_config(checkpoint)
    num_masks = draft_form.num_places(checkpoint) - 1 if draft_form.draft_shape(checkpoint) is None else 0
    vocab_size = int(said.get("vocab_size") or 0) - num_masks
    tokens, tokenizer = _tokenizer(checkpoint, vocab_size)
    return ModelInfo(
        name=name or _name(checkpoint),
        fingerprint="",
        dtype="",
        engine="",
        vocab_size=vocab_size,
        num_tokens=tokens,
        eos_ids=tuple(end_tokens(checkpoint)),
        max_length=int(said.get("max_position_embeddings") or 0),
        tokenizer_hash=tokenizer,
    )


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
    tensors: str = "",
) -> ModelInfo:
    """Return what a checkpoint's model is, as an engine runs it.

    arithmetic   which kernels compute, see `ModelInfo`; empty: the engine has one kind
    overrides    its options that change the text
    tensors      its `tensors_hash`, where that is known already
    """
    tokens, tokenizer = _tokenizer(checkpoint, vocab_size)
    tensors, added = tensors or tensors_hash(checkpoint), added_ends(checkpoint)
    former = fingerprint(checkpoint, overrides, tensors=tensors, ends=former_ends(checkpoint)) if added else tensors
    return ModelInfo(
        name=name or _name(checkpoint),
        fingerprint=fingerprint(checkpoint, overrides, tensors=tensors),
        former_fingerprint=former,
        dtype=dtype,
        arithmetic=arithmetic or engine,
        engine=engine,
        vocab_size=vocab_size,
        num_tokens=tokens,
        eos_ids=tuple(end_tokens(checkpoint)),
        added_eos_ids=added,
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
    return gguf_name(checkpoint) if is_gguf(checkpoint) else checkpoint.name
