"""Single matrices of a target's checkpoint, without the rest of it: for heads that share them with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from specq.checkpoints import gguf_tensors, is_gguf, read_gguf
from specq.protocol import ConfigError

INPUTS = ("model.embed_tokens.weight", "model.decoder.embed_tokens.weight")
OUTPUTS = ("lm_head.weight", *INPUTS)  # the first that is there
GGUF_INPUTS = ("token_embd.weight",)
GGUF_OUTPUTS = ("output.weight", *GGUF_INPUTS)


def output_matrix(checkpoint: Path) -> torch.Tensor:
    """Return a checkpoint's output matrix [vocab, hidden]; ConfigError if it is not found."""
    return _matrix(checkpoint, OUTPUTS, GGUF_OUTPUTS, "output matrix")


def input_matrix(checkpoint: Path) -> torch.Tensor:
    """Return a checkpoint's embedding [vocab, hidden]; ConfigError if it is not found."""
    return _matrix(checkpoint, INPUTS, GGUF_INPUTS, "embedding")


def _matrix(checkpoint: Path, names: tuple[str, ...], gguf_names: tuple[str, ...], what: str) -> torch.Tensor:
    if is_gguf(checkpoint):
        file = read_gguf(checkpoint)
        name = next(name for name in gguf_names if name in file.tensors)
        return torch.tensor(gguf_tensors.dequantise(file, file.tensors[name]))
    index = checkpoint / "model.safetensors.index.json"
    of_file: dict[str, Any] = json.loads(index.read_text("utf-8"))["weight_map"] if index.is_file() else {}
    for name in names:
        path = checkpoint / of_file.get(name, "model.safetensors")
        if path.is_file() and (found := _tensor(path, name)) is not None:
            return found
    raise ConfigError(
        f"{checkpoint} has no {', '.join(names)} in safetensors; heads that share the target's {what} need it"
    )


def _tensor(path: Path, name: str) -> torch.Tensor | None:
    with safe_open(path, framework="pt") as file:
        found: torch.Tensor | None = file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118 - no mapping
    return found
