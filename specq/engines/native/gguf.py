"""A GGUF file -> the weights of a Llama-like decoder, without a model of transformers.

The reference for such a model is arithmetic on exactly the values in memory. These are the dequantised values in
float32, or rounded to bfloat16. The format is part of the fingerprint, so the two are two models. With exact values the
kernels read the file's own blocks of the types BLOCK_TYPES. Other types are expanded to four bytes a weight.

In integer arithmetic products are those of the file's own blocks with activations in 8 bits (kernels/activations.h).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from specq.checkpoints import GgufFile, gguf_config, gguf_tensors, read_gguf
from specq.engines.native.block_cache import BlockFile, open_blocks
from specq.engines.native.decoder import HEAD, NamedWeights, decoder
from specq.engines.native.forward import ALONE, Threads
from specq.engines.native.rotary import rope_tables
from specq.engines.native.weights import BLOCK_TYPES, BlockWeight, NativeWeights
from specq.protocol import ConfigError, Float32Array

FLOAT32, BFLOAT16 = "float32", "bfloat16"


def values_format(path: Path, dtype: str, *, on_host: bool) -> str:
    """Return the format that the torch engine rounds a file's values to, for its `dtype`. FLOAT32 keeps them all."""
    if dtype != "auto":
        return dtype
    reads_blocks = on_host and gguf_tensors.matrix_types(read_gguf(path)) <= BLOCK_TYPES.keys()
    return FLOAT32 if reads_blocks else BFLOAT16


def gguf_weights(path: Path, values: str, num_slots: int) -> NativeWeights:
    """Return a file's weights, FLOAT32 or BFLOAT16, for texts of at most `num_slots` tokens.

    Raises ConfigError if something is missing or not supported.
    """
    file = read_gguf(path)
    config = gguf_config.model_config(file)
    found = gguf_tensors.by_name(file)
    check_shapes(path, needed_shapes(config), {name: tensor.shape for name, tensor in found.items()})

    def values_of(name: str) -> Float32Array:
        numbers = gguf_tensors.values(file, found[name], config)
        return numbers if values == FLOAT32 else rounded(numbers)

    blocks = _blocks(file, config) if values == FLOAT32 else {}
    return _decoder(file, config, NamedWeights(found, values_of, blocks), num_slots)


def integer_weights(
    path: Path, library: ctypes.CDLL, num_slots: int, threads: Threads = ALONE
) -> tuple[NativeWeights, BlockFile]:
    """Return a file's weights for integer arithmetic, and the cache file that has them.

    `library`: the kernels of that arithmetic. `threads` write the cache file if needed. Raises ConfigError if something
    is missing or not supported.
    """
    file = read_gguf(path)
    config = gguf_config.model_config(file)
    blocks = open_blocks(path, library, threads)
    shapes = {name: one.shape for name, one in (blocks.matrices | blocks.vectors).items()}
    check_shapes(path, needed_shapes(config), shapes)
    named = NamedWeights(shapes, blocks.vectors.__getitem__, panels=blocks.matrices)
    return _decoder(file, config, named, num_slots), blocks


def _decoder(file: GgufFile, config: dict[str, Any], named: NamedWeights, num_slots: int) -> NativeWeights:
    length, head_dim = min(config["max_position_embeddings"], num_slots), config["head_dim"]
    tables = rope_tables(config["rope_parameters"], head_dim, gguf_tensors.rope_factors(file), length)
    return decoder(config, head_dim, named, tables)


def _blocks(file: GgufFile, config: dict[str, Any]) -> dict[str, BlockWeight]:
    """Return by name the linear weights that the kernels read in the file's blocks."""
    found = gguf_tensors.blocks(file, config, BLOCK_TYPES)
    return {name: BlockWeight(kind, np.array(rows)) for name, kind, rows in found}


def rounded(numbers: Float32Array) -> Float32Array:
    """Return finite numbers rounded to the nearest bfloat16, to even in a tie, as float32."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    found: Float32Array = ((bits + (((bits >> 16) & 1) + 0x7FFF)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return found


def needed_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a model with this `config.json` has, by transformers' names."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = (config[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    matrices = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), hidden)
    if config["model_type"] == "qwen3":
        norms |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), head_dim)
    own: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in matrices.items()}
    own |= {f"{name}.weight": (size,) for name, size in norms.items()}
    own |= {f"{name}.bias": (matrices[name][0],) for name in matrices if _has_bias(config, name)}
    found = {f"model.layers.{i}.{name}": own[name] for i in range(config["num_hidden_layers"]) for name in own}
    outer = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    head = {} if config["tie_word_embeddings"] else {HEAD: (config["vocab_size"], hidden)}
    return found | outer | head


def _has_bias(config: dict[str, Any], layer: str) -> bool:
    if config["model_type"] == "qwen2":
        return layer[-6:] in ("q_proj", "k_proj", "v_proj")
    in_mlp = config["mlp_bias"] and config["model_type"] == "llama"
    return bool(in_mlp if layer.startswith("mlp") else config["attention_bias"])


def check_shapes(path: Path, needed: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    """Raise ConfigError unless these are exactly the model's tensors, in its shapes."""
    wrong = sorted(name for name in needed.keys() | found.keys() if needed.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"{path} does not fit its own metadata: {name} has the shape {found.get(name, 'of no tensor')}, and "
            f"should have {needed.get(name, 'none')} ({len(wrong)} tensors are wrong or missing)"
        )
