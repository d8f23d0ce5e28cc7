"""The tensors of a GGUF file, dequantised or in blocks, under transformers' names and in its layout.

llama.cpp stores the rows of Llama's query and key projections in the order of its rotary kernel. A head's first and
second half are interleaved. This module restores transformers' order. Other architectures need no change.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from specq.checkpoints.gguf_config import ROPE_FACTORS
from specq.checkpoints.gguf_file import GgufFile, GgufTensor
from specq.protocol import ConfigError, Float32Array

_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens"
_OUTER = {"token_embd": _EMBEDDING, "output_norm": "model.norm", "output": _HEAD}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
# Of each type that is read in blocks: the bytes of a block, and how many half floats it begins with.
SCALES = {"Q4_1": (20, 2), "Q8_0": (34, 1)}
_INTERLEAVED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}  # of Llama; heads by config.json


def tensors(file: GgufFile, config: dict[str, Any]) -> Iterator[tuple[str, Float32Array]]:
    """Yield (name, values) of a file's tensors, for the model of this `config.json`.

    Raises ConfigError for an unknown tensor, an unsupported type, and values that are not finite.
    """
    for name, own, tensor in _tensors(file):
        yield name, _in_order(dequantise(file, tensor), own, config)


def by_name(file: GgufFile) -> dict[str, GgufTensor]:
    """Return a file's tensors by transformers' names. Raises ConfigError for an unknown tensor."""
    return {name: tensor for name, _, tensor in _tensors(file)}


def values(file: GgufFile, tensor: GgufTensor, config: dict[str, Any]) -> Float32Array:
    """Return a tensor's values in transformers' order. Raises like `dequantise`."""
    found: Float32Array = _in_order(dequantise(file, tensor), _named(file, tensor.name)[1], config)
    return found


def matrices(file: GgufFile, config: dict[str, Any]) -> Iterator[tuple[str, GgufTensor, npt.NDArray[np.uint8]]]:
    """Yield (name, tensor, rows) of a file's matrices, rows u8[rows, bytes of a row] in transformers' order.

    Raises ConfigError for an unknown tensor.
    """
    for name, own, tensor in _tensors(file):
        if len(tensor.shape) == 2:
            yield name, tensor, _in_order(tensor.data, own, config)


def vectors(file: GgufFile, config: dict[str, Any]) -> Iterator[tuple[str, Float32Array]]:
    """Yield (name, values) of a file's norms and biases. Raises like `tensors`."""
    for name, own, tensor in _tensors(file):
        if len(tensor.shape) == 1:
            yield name, _in_order(dequantise(file, tensor), own, config)


def _tensors(file: GgufFile) -> Iterator[tuple[str, str, GgufTensor]]:
    """Yield (transformers' name, the file's own without layer and kind, tensor)."""
    for tensor in file.tensors.values():
        if tensor.name != ROPE_FACTORS:
            yield *_named(file, tensor.name), tensor


def type_name(tensor: GgufTensor) -> str:
    """Return GGUF's name of a tensor's type."""
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(tensor.type_id).name


def blocks(
    file: GgufFile, config: dict[str, Any], types: Collection[str]
) -> Iterator[tuple[str, str, npt.NDArray[np.uint8]]]:
    """Yield (layer, type, rows) of linear layers in these block types; rows are u8[rows, bytes of a row].

    A head that is tied to the embedding has the embedding's blocks. Raises ConfigError for blocks whose scales are not
    finite numbers.
    """
    for name, tensor, rows in matrices(file, config):
        layer, kind = name.removesuffix(".weight"), type_name(tensor)
        if kind not in types:
            continue
        _check_scales(file, tensor, kind)
        if layer != _EMBEDDING:
            yield layer, kind, rows
        elif config["tie_word_embeddings"]:
            yield _HEAD, kind, rows


def _check_scales(file: GgufFile, tensor: GgufTensor, kind: str) -> None:
    """Raise ConfigError unless all scales of a tensor's blocks are finite; see `SCALES`."""
    num_bytes, num_scales = SCALES[kind]
    halves = np.ascontiguousarray(tensor.data.reshape(-1, num_bytes)[:, : 2 * num_scales]).view(np.float16)
    if not np.isfinite(halves).all():
        raise _damaged(file, tensor)


def _damaged(file: GgufFile, tensor: GgufTensor) -> ConfigError:
    return ConfigError(f"{file.path} is damaged: the tensor {tensor.name} has values that are not finite")


def matrix_types(file: GgufFile) -> set[str]:
    """Return GGUF's names of the types of a file's matrices."""
    return {type_name(tensor) for tensor in file.tensors.values() if len(tensor.shape) == 2}


def check_tensors(file: GgufFile) -> None:
    """Raise ConfigError for an unknown tensor or an unsupported type. It reads no values."""
    kinds = {tensor.type_id: tensor for tensor in file.tensors.values()}
    for tensor in kinds.values():
        block = tensor.data[:1, : tensor.data.shape[1]]
        dequantise(file, GgufTensor(tensor.name, tensor.shape[-1:], tensor.type_id, np.zeros_like(block)))
    for name in file.tensors.keys() - {ROPE_FACTORS}:
        _named(file, name)


def rope_factors(file: GgufFile) -> Float32Array | None:
    """Return the divisor of each rotary frequency, f32[head_dim / 2]; None for none."""
    tensor = file.tensors.get(ROPE_FACTORS)
    return None if tensor is None else dequantise(file, tensor)


def dequantise(file: GgufFile, tensor: GgufTensor) -> Float32Array:
    """Return a tensor's values in memory of their own, so that the file may be cut later.

    Raises ConfigError for an unsupported type, and for values that are not finite.
    """
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(tensor.type_id)
    try:
        with np.errstate(invalid="ignore"):  # infinity times 0
            numbers = dequantize(tensor.data, kind)
    except NotImplementedError:
        supported = ", ".join(kind.name for kind in _supported_types())
        raise ConfigError(
            f"{file.path}: the tensor {tensor.name} has the type {kind.name}; supported: {supported}"
        ) from None
    if not np.isfinite(numbers).all():
        raise _damaged(file, tensor)
    found = np.asarray(numbers, np.float32).reshape(tensor.shape)
    return found.copy() if np.may_share_memory(found, tensor.data) else found


def _supported_types() -> Iterator[Any]:
    """Yield the types that the gguf package can dequantise. It has no list, so each type is tried."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    for kind in GGMLQuantizationType:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        yield kind


def _named(file: GgufFile, name: str) -> tuple[str, str]:
    """Return transformers' name of a tensor, and the file's own name without layer and kind."""
    match = _NAME.fullmatch(name)
    layer, own, kind = match.groups() if match else (None, name, "")
    theirs = (_OUTER if layer is None else _INNER).get(own)
    if theirs is None:
        raise ConfigError(f"{file.path} has the tensor {name}, which a {file.architecture} model does not have")
    return (f"{theirs}.{kind}" if layer is None else f"model.layers.{layer}.{theirs}.{kind}"), own


def _in_order(numbers: npt.NDArray[Any], own: str, config: dict[str, Any]) -> npt.NDArray[Any]:
    """Return the rows of a projection in transformers' order. A row is values, or bytes of blocks."""
    if config["model_type"] != "llama" or own not in _INTERLEAVED:
        return numbers
    heads = numbers.reshape(config[_INTERLEAVED[own]], -1, 2, *numbers.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(numbers.shape)
