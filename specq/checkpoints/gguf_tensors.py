"""The tensors of a GGUF file, dequantised, under the names and in the layout that transformers has for them.

llama.cpp stores the rows of Llama's query and key projections in another order, that of its rotary kernel: a head's first and
second half interleaved. It is undone here. Other architectures keep theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from specq.checkpoints.gguf_config import ROPE_FACTORS
from specq.checkpoints.gguf_file import GgufFile, GgufTensor
from specq.protocol import ConfigError, Float32Array

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
_INTERLEAVED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}  # of Llama; heads by config.json


def tensors(file: GgufFile, config: dict[str, Any]) -> Iterator[tuple[str, Float32Array]]:
    """Yield (name, values) of a file's tensors, for the model of this `config.json`.

    Raises ConfigError for a tensor that such a model does not have, and for one of a type that cannot be dequantised.
    """
    for tensor in file.tensors.values():
        if tensor.name != ROPE_FACTORS:
            name, own = _named(file, tensor.name)
            yield name, _in_order(dequantise(file, tensor), own, config)


def rope_factors(file: GgufFile) -> Float32Array | None:
    """Return what each rotary frequency is divided by, f32[head_dim / 2]; None for none."""
    tensor = file.tensors.get(ROPE_FACTORS)
    return None if tensor is None else dequantise(file, tensor)


def dequantise(file: GgufFile, tensor: GgufTensor) -> Float32Array:
    """Return a tensor's values; raises ConfigError for a type that is not supported."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(tensor.type_id)
    try:
        values = dequantize(tensor.data, kind)
    except NotImplementedError:
        supported = ", ".join(kind.name for kind in _supported_types())
        raise ConfigError(
            f"{file.path}: the tensor {tensor.name} has the type {kind.name}; supported are {supported}"
        ) from None
    return np.asarray(values, np.float32).reshape(tensor.shape)


def _supported_types() -> Iterator[Any]:
    """Yield the types that the gguf package can dequantise: by trying, since it has no list."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    for kind in GGMLQuantizationType:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        yield kind


def _named(file: GgufFile, name: str) -> tuple[str, str]:
    """Return the name that transformers has for a tensor, and the file's own without layer and kind."""
    match = _NAME.fullmatch(name)
    layer, own, kind = match.groups() if match else (None, name, "")
    theirs = (_OUTER if layer is None else _INNER).get(own)
    if theirs is None:
        raise ConfigError(
            f"{file.path} has the tensor {name}, which a {file.architecture} model that is supported has not"
        )
    return (f"{theirs}.{kind}" if layer is None else f"model.layers.{layer}.{theirs}.{kind}"), own


def _in_order(values: Float32Array, own: str, config: dict[str, Any]) -> Float32Array:
    """Return the rows of a projection as transformers has them."""
    if config["model_type"] != "llama" or own not in _INTERLEAVED:
        return values
    heads = values.reshape(config[_INTERLEAVED[own]], -1, 2, *values.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)
