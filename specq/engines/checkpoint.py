"""What a checkpoint directory says of its model, whichever engine runs it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from specq.errors import ConfigError
from specq.text import num_tokens, tokenizer_hash
from specq.types import ModelInfo


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
    directory: Path, *, engine: str, name: str, dtype: str, vocab_size: int, max_length: int, kv_slots: int
) -> ModelInfo:
    """Return what a checkpoint's model is, as an engine runs it."""
    tokenizer = directory / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8") if tokenizer.exists() else ""
    return ModelInfo(
        name=name or directory.name,
        fingerprint=fingerprint(directory),
        dtype=dtype,
        engine=engine,
        vocab_size=vocab_size,
        num_tokens=num_tokens(text) if text else vocab_size,
        eos_ids=_eos_ids(directory),
        max_length=max_length,
        tokenizer_hash=tokenizer_hash(text) if text else "",
        kv_slots=kv_slots,
    )


def fingerprint(directory: Path) -> str:
    """Hash the contents of the weight files, in the order of their names."""
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("pytorch_model*.bin"))
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _eos_ids(directory: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, else of config.json."""
    for file in ("generation_config.json", "config.json"):
        path = directory / file
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return ()
