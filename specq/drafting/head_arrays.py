"""Read the tensors of draft heads as arrays, from safetensors without torch. Only a pickle of tensors needs torch.

A file is read as a whole and checked, or refused. The module also reads single matrices of a target's checkpoint, for
heads that share them with the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specq.checkpoints import StoredTensor, gguf_tensors, is_gguf, read_gguf
from specq.drafting.head_checks import GGUF_INPUTS, GGUF_OUTPUTS, read_checked
from specq.drafting.head_config import Forms
from specq.protocol import ConfigError, Float32Array

Arrays = dict[str, npt.NDArray[Any]]
# Number formats of safetensors: torch's name, and the type of the stored numbers.
TYPES = {
    "F64": ("float64", np.float64),
    "F32": ("float32", np.float32),
    "F16": ("float16", np.float16),
    "BF16": ("bfloat16", np.uint16),
    "I64": ("int64", np.int64),
    "I32": ("int32", np.int32),
    "I8": ("int8", np.int8),
    "U8": ("uint8", np.uint8),
    "BOOL": ("bool", np.bool_),
}


def read_arrays(directory: Path, names: Sequence[str], reason_against: Callable[[Forms], str], kind: str) -> Arrays:
    """Read a file of heads; see `read_checked`. Values of bfloat16 are returned in float32."""
    return read_checked(directory, names, _read, lambda array: bool(np.isfinite(array).all()), reason_against, kind)


def read_stored(tensors: Mapping[str, StoredTensor], kind: str) -> Arrays:
    """Read some tensors of a checkpoint, in float32. Raises ConfigError for a truncated file, or infinite values."""
    found: Arrays = {}
    for name, one in tensors.items():
        try:
            values = _array({"dtype": one.dtype, "shape": one.shape, "data": one.read()}).astype(np.float32)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{one.path} cannot be read; it may be truncated: {error}") from error
        if not np.isfinite(values).all():
            raise ConfigError(f"{one.path} has values that are not finite, in {name} of {kind}")
        found[name] = values
    return found


def _read(path: Path) -> tuple[Forms, Arrays]:
    if path.suffix != ".safetensors":
        from specq.drafting.head_files import read_file

        forms, tensors = read_file(path)
        return forms, {name: (t.float() if t.is_floating_point() else t).numpy() for name, t in tensors.items()}
    from safetensors import deserialize

    try:
        stored = dict(deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
        forms = {name: (TYPES[one["dtype"]][0], tuple(one["shape"])) for name, one in stored.items()}
        return forms, {name: _array(one) for name, one in stored.items()}
    except Exception as error:  # a damaged file can raise any exception
        raise ConfigError(f"{path} cannot be read; it may be truncated: {error}") from error


def _array(stored: dict[str, Any]) -> npt.NDArray[Any]:
    name, kind = TYPES[stored["dtype"]]
    values = np.frombuffer(stored["data"], kind).reshape(stored["shape"])
    return (values.astype(np.uint32) << 16).view(np.float32) if name == "bfloat16" else values


def output_array(checkpoint: Path) -> Float32Array:
    """Return a checkpoint's output matrix f32[vocab, hidden]; ConfigError if it is not found."""
    if is_gguf(checkpoint):
        return _of_gguf(checkpoint, GGUF_OUTPUTS)
    from specq.drafting.head_files import output_matrix  # a directory's model needs torch in any case

    found: Float32Array = output_matrix(checkpoint).float().numpy()
    return found


def input_array(checkpoint: Path) -> Float32Array:
    """Return a checkpoint's embedding f32[vocab, hidden]; ConfigError if it is not found."""
    if is_gguf(checkpoint):
        return _of_gguf(checkpoint, GGUF_INPUTS)
    from specq.drafting.head_files import input_matrix

    found: Float32Array = input_matrix(checkpoint).float().numpy()
    return found


def _of_gguf(path: Path, names: Sequence[str]) -> Float32Array:
    """Return the first matrix that exists, of these names."""
    file = read_gguf(path)
    return gguf_tensors.dequantise(file, file.tensors[next(name for name in names if name in file.tensors)])
