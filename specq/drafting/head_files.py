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
from specq.protocol import ConfigError

Tensors = dict[str, torch.Tensor]
Forms = dict[str, tuple[str, tuple[int, ...]]]  # number format and shape, by name


def read_tensors(directory: Path, names: Sequence[str], reason_against: Callable[[Forms], str], kind: str) -> Tensors:
    """Read the first file that exists, of these names.

    reason_against   returns what is wrong with the number formats and shapes, or "".
    kind             what is read, for messages.

    Raises ConfigError if no file exists, the file is damaged, values are not finite, or `reason_against` objects.
    """
    path = next((directory / name for name in names if (directory / name).is_file()), None)
    if path is None:
        raise ConfigError(f"{directory} has neither {' nor '.join(names)}, which hold {kind}")
    tensors = load_pickle(path) if path.suffix != ".safetensors" else _load(path, load_file)
    forms = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    if reason := reason_against(forms):
        raise ConfigError(f"{path} does not fit its config.json: {reason}")
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise ConfigError(f"{path} has values that are not finite, in {broken[0]}")
    return tensors


def load_pickle(path: Path) -> Tensors:
    """Return the named tensors of a pickle; ConfigError if it is damaged or has others."""
    return _load(path, partial(torch.load, map_location="cpu", weights_only=True))


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
