"""The tensors of heads that lie in one file, safetensors or a pickle of tensors: read whole and checked, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from specq.protocol import ConfigError

Tensors = dict[str, torch.Tensor]
Forms = dict[str, tuple[str, tuple[int, ...]]]  # number format and shape, by name


def read_tensors(directory: Path, names: Sequence[str], reason_against: Callable[[Forms], str], kind: str) -> Tensors:
    """Read the first of these files that is there; ConfigError if none is, if it is damaged, for values that are not finite, and where
    `reason_against` says what is wrong with the number formats and shapes. kind: what is read, for messages."""
    path = next((directory / name for name in names if (directory / name).is_file()), None)
    if path is None:
        raise ConfigError(f"{directory} has neither {' nor '.join(names)}, which hold {kind}")
    try:
        is_safe = path.suffix == ".safetensors"
        tensors: Tensors = load_file(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises whatever its bytes lead to
        raise ConfigError(f"{path} cannot be read; it may have been cut off: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ConfigError(f"{path} holds no tensors by name")
    forms = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    if reason := reason_against(forms):
        raise ConfigError(f"{path} does not fit its config.json: {reason}")
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise ConfigError(f"{path} has values that are not finite, in {broken[0]}")
    return tensors
