"""A GGUF file's model for integer arithmetic: its cache file, described as `NativeWeights`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from specq.checkpoints import gguf_config, gguf_tensors, read_gguf
from specq.engines.native.block_cache import BlockFile, open_blocks
from specq.engines.native.panels import PanelMatrix
from specq.engines.native.rotary import frequencies, rotary_tables
from specq.engines.native.weights import DecoderLayer, Linear, NativeWeights
from specq.protocol import ConfigError, Float32Array

LANES, HEAD_LANES = 8, 16  # widths and the size of a head must be multiples of these
_ATTENTION, _MLP = "self_attn.{}_proj", "mlp.{}_proj"


def integer_weights(path: Path, library: ctypes.CDLL, num_positions: int) -> tuple[NativeWeights, str]:
    """Return a file's model for at most `num_positions` positions, and the hash of its tensors.

    Raises ConfigError for a model or tensor that is missing, has a wrong shape, or is not supported.
    """
    file = read_gguf(path)
    config = gguf_config.model_config(file)
    _check_sizes(path, config)
    blocks = open_blocks(path, library)
    of, factor = frequencies(config["rope_parameters"], config["head_dim"], gguf_tensors.rope_factors(file))
    cos, sin = rotary_tables(of, factor, min(num_positions, config["max_position_embeddings"]))
    return _Model(path, config, blocks).weights(cos, sin), blocks.tensors_hash


def _check_sizes(path: Path, config: dict[str, Any]) -> None:
    for key, lanes in (("hidden_size", LANES), ("intermediate_size", LANES), ("head_dim", HEAD_LANES)):
        if config[key] % lanes:
            raise ConfigError(
                f"{path}: {key} is {config[key]}; integer arithmetic needs a multiple of {lanes}. Use arithmetic = "
                f"exact"
            )


@dataclass(frozen=True, slots=True)
class _Model:
    path: Path
    config: dict[str, Any]
    blocks: BlockFile

    def weights(self, cos: Float32Array, sin: Float32Array) -> NativeWeights:
        config, hidden, vocab = self.config, self.config["hidden_size"], self.config["vocab_size"]
        embedding = self._matrix("model.embed_tokens.weight", vocab, hidden)
        is_tied = config["tie_word_embeddings"]
        return NativeWeights(
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            intermediate=config["intermediate_size"],
            eps=config["rms_norm_eps"],
            scale=config["head_dim"] ** -0.5,
            embedding=embedding,
            final_norm=self._needed("model.norm.weight", hidden),
            cos=cos,
            sin=sin,
            layers=[self._layer(f"model.layers.{i}.") for i in range(config["num_hidden_layers"])],
            head=Linear([embedding if is_tied else self._matrix("lm_head.weight", vocab, hidden)]),
        )

    def _layer(self, start: str) -> DecoderLayer:
        config, hidden, wide = self.config, self.config["hidden_size"], self.config["intermediate_size"]
        head_dim = config["head_dim"]
        queries, keys = head_dim * config["num_attention_heads"], head_dim * config["num_key_value_heads"]
        attention, mlp = start + _ATTENTION, start + _MLP
        inputs = {attention.format("q"): queries, attention.format("k"): keys, attention.format("v"): keys}
        return DecoderLayer(
            attn_norm=self._needed(start + "input_layernorm.weight", hidden),
            mlp_norm=self._needed(start + "post_attention_layernorm.weight", hidden),
            q_norm=self._vector(start + "self_attn.q_norm.weight", head_dim),
            k_norm=self._vector(start + "self_attn.k_norm.weight", head_dim),
            qkv=self._linear(inputs, hidden),
            out=self._linear({attention.format("o"): hidden}, queries),
            gate_up=self._linear({mlp.format("gate"): wide, mlp.format("up"): wide}, hidden, interleaves=True),
            down=self._linear({mlp.format("down"): hidden}, wide),
        )

    def _linear(self, outputs: dict[str, int], k: int, *, interleaves: bool = False) -> Linear:
        """Return layers {name: number of outputs} as one. Either all or none have biases, else zeros fill in."""
        weights = [self._matrix(f"{name}.weight", num_rows, k) for name, num_rows in outputs.items()]
        biases = [self._vector(f"{name}.bias", num_rows) for name, num_rows in outputs.items()]
        if all(bias is None for bias in biases):
            return Linear(weights, interleaves=interleaves)
        pairs = zip(biases, outputs.values(), strict=True)
        filled = [np.zeros(size, np.float32) if bias is None else bias for bias, size in pairs]
        return Linear(weights, filled, interleaves)

    def _matrix(self, name: str, num_rows: int, k: int) -> PanelMatrix:
        found = self.blocks.matrices.get(name)
        return found if found is not None and found.shape == (num_rows, k) else self._raise_unfit(name, (num_rows, k))

    def _needed(self, name: str, size: int) -> Float32Array:
        found = self._vector(name, size)
        return self._raise_unfit(name, (size,)) if found is None else found

    def _vector(self, name: str, size: int) -> Float32Array | None:
        found = self.blocks.vectors.get(name)
        return found if found is None or found.size == size else self._raise_unfit(name, (size,))

    def _raise_unfit(self, name: str, shape: tuple[int, ...]) -> NoReturn:
        known = self.blocks.matrices.get(name), self.blocks.vectors.get(name)
        found = next((tensor.shape for tensor in known if tensor is not None), "of no tensor")
        raise ConfigError(
            f"{self.path} does not fit its own metadata: {name} has the shape {found}, and should have {shape}"
        )
