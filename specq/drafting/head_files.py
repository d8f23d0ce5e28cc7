"""Read the tensors of draft heads from one file, safetensors or a pickle of tensors.

A file is read as a whole and checked, or refused. The module also reads single matrices of a target's checkpoint, for
heads that share them with the target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from specq.checkpoints import gguf_tensors, is_gguf, read_gguf
from specq.drafting.head_checks import GGUF_INPUTS, GGUF_OUTPUTS, read_checked
from specq.drafting.head_config import Forms
from specq.protocol import ConfigError

Tensors = dict[str, torch.Tensor]


def read_tensors(directory: Path, names: Sequence[str], reason_against: Callable[[Forms], str], kind: str) -> Tensors:
    """Read the first file that exists, of these names; see `read_checked`."""
    return read_checked(directory, names, read_file, lambda one: bool(one.isfinite().all()), reason_against, kind)


def read_file(path: Path) -> tuple[Forms, Tensors]:
    """Return the number formats and shapes of a file's tensors, and the tensors; ConfigError if it is damaged."""
    read = load_file if path.suffix == ".safetensors" else partial(torch.load, map_location="cpu", weights_only=True)
    tensors = _load(path, read)
    return {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}, tensors


def _load(path: Path, read: Callable[[Path], Tensors]) -> Tensors:
    try:
        tensors = read(path)
    except Exception as error:  # a damaged pickle can raise any exception
        raise ConfigError(f"{path} cannot be read; it may be truncated: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ConfigError(f"{path} contains no named tensors")
    return tensors


INPUTS = ("model.embed_tokens.weight", "model.decoder.embed_tokens.weight")
OUTPUTS = ("lm_head.weight", *INPUTS)  # the first that exists


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
