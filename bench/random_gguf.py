"""GGUF files with random blocks of any type, also of types that the gguf package cannot quantise; without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES

Q = gguf.GGMLQuantizationType
Bytes = npt.NDArray[np.uint8]
NO_METADATA: Mapping[str, Any] = MappingProxyType({})
TINY = {  # widths that are no multiples of 256, but of 32; see `write_random` for wider ones
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "intermediate": 96,
    "vocab": 352,
    "context": 600,
}
# For each type: bytes at which half-precision scales stand, and what a weight's size is in units of the first.
_FLOATS = {
    Q.Q4_0: ((0,), 4.6),
    Q.Q4_1: ((0, 2), 4.6),
    Q.Q5_0: ((0,), 9.2),
    Q.Q5_1: ((0, 2), 9.2),
    Q.Q8_0: ((0,), 74.0),
    Q.Q4_K: ((0, 2), 170.0),
    Q.Q5_K: ((0, 2), 340.0),
    Q.Q6_K: ((208,), 1360.0),
}
_LOWEST = {Q.Q4_1: -7.5, Q.Q5_1: -15.5, Q.Q4_K: 7.5, Q.Q5_K: 15.5}  # minimum, in units of the scale


def random_rows(kind: Any, num_rows: int, k: int, rng: np.random.Generator) -> Bytes:
    """Return u8[num_rows, bytes of a row]: weights with a mean square of about 1 / k."""
    if kind not in _FLOATS:
        values = (rng.standard_normal((num_rows, k)) / np.sqrt(k)).astype(np.float32)
        return gguf.quants.quantize(values, kind).view(np.uint8).reshape(num_rows, -1)
    block, num_bytes = GGML_QUANT_SIZES[kind]
    places, size = _FLOATS[kind]
    data = rng.integers(0, 256, (num_rows, k // block, num_bytes), np.uint8)
    scales = (rng.uniform(0.5, 1.5, data.shape[:2]) / (size * np.sqrt(k))).astype(np.float16)
    for place, factor in zip(places, (1.0, _LOWEST.get(kind, 0.0)), strict=False):
        data[..., place : place + 2] = (scales * factor).astype(np.float16)[..., None].view(np.uint8)
    return data.reshape(num_rows, -1)


def write_random(
    path: Path,
    type_of: Callable[[str], Any],
    *,
    shape: Mapping[str, int] = TINY,
    biases: bool = True,
    seed: int = 0,
    metadata: Mapping[str, Any] = NO_METADATA,
) -> Path:
    """Write a Qwen2-like model with an embedding that is its head, and return the path.

    - type_of: the type of each matrix, by its name in the file.
    - shape: sizes; every row must have whole blocks.
    - metadata: more keys of the file, such as those of a tokenizer.
    """
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "qwen2")
    for key, value in {**_keys(shape), **metadata}.items():
        _add(writer, key, value)
    for name, rows, k in _matrices(shape):
        kind = type_of(name)
        writer.add_tensor(name, random_rows(kind, rows, k, rng), raw_dtype=kind)
    for name, size in _vectors(shape, biases):
        values = 1 + rng.standard_normal(size) / 10 if name.endswith("weight") else rng.standard_normal(size) / 10
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _keys(shape: Mapping[str, int]) -> dict[str, Any]:
    own = {
        "block_count": shape["layers"],
        "context_length": shape["context"],
        "embedding_length": shape["hidden"],
        "feed_forward_length": shape["intermediate"],
        "attention.head_count": shape["heads"],
        "attention.head_count_kv": shape["kv_heads"],
        "attention.key_length": shape["head_dim"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    return {f"qwen2.{key}": value for key, value in own.items()}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable[[str, Any], None]] = {str: writer.add_string, float: writer.add_float32}
    kinds |= {list: writer.add_array, int: writer.add_uint32}
    kinds[type(value)](key, value)


def _matrices(shape: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    hidden, wide, head_dim = shape["hidden"], shape["intermediate"], shape["head_dim"]
    queries, keys = head_dim * shape["heads"], head_dim * shape["kv_heads"]
    yield "token_embd.weight", shape["vocab"], hidden
    for i in range(shape["layers"]):
        own = {"attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)}
        own |= {"attn_output": (hidden, queries), "ffn_gate": (wide, hidden), "ffn_up": (wide, hidden)}
        for name, (rows, k) in (own | {"ffn_down": (hidden, wide)}).items():
            yield f"blk.{i}.{name}.weight", rows, k


def _vectors(shape: Mapping[str, int], biases: bool) -> Iterator[tuple[str, int]]:
    yield "output_norm.weight", shape["hidden"]
    for i in range(shape["layers"]):
        yield f"blk.{i}.attn_norm.weight", shape["hidden"]
        yield f"blk.{i}.ffn_norm.weight", shape["hidden"]
        for name, heads in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")) if biases else ():
            yield f"blk.{i}.attn_{name}.bias", shape[heads] * shape["head_dim"]
