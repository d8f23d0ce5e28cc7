"""The weights of a Llama-like decoder by transformers' names -> `NativeWeights`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from specq.engines.native.panels import PanelMatrix
from specq.engines.native.weights import BlockWeight, DecoderLayer, Linear, NativeWeights
from specq.protocol import Float32Array

ARCHITECTURES = ("llama", "qwen2", "qwen3")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """A model's weights by transformers' names.

    - names: all names, as `model.layers.0.mlp.up_proj.weight`.
    - values: returns the values of a name in float32.
    - blocks: linear layers in a file's own blocks, as `model.layers.0.mlp.up_proj`. Their values equal the blocks'.
    - panels: for integer arithmetic all matrices, as `model.layers.0.mlp.up_proj.weight`; `values` has the rest.
    """

    names: Collection[str]
    values: Callable[[str], Float32Array]
    blocks: Mapping[str, BlockWeight] = field(default_factory=dict)
    panels: Mapping[str, PanelMatrix] = field(default_factory=dict)

    def matrix(self, name: str) -> Float32Array | PanelMatrix:
        """Return a matrix in panels or in float32."""
        return self.panels[name] if self.panels else self.values(name)

    def linear(self, layers: list[str], *, interleaves: bool = False) -> Linear:
        """Return linear layers as one; in blocks only if all have blocks of one type."""
        given = [self.blocks[layer] for layer in layers if layer in self.blocks]
        is_whole = len(given) == len(layers) and len({block.type for block in given}) == 1
        weights = given if is_whole else [self.matrix(f"{layer}.weight") for layer in layers]
        biases = [f"{layer}.bias" for layer in layers]
        return Linear(weights, [self.values(name) for name in biases if name in self.names], interleaves)

    def norm(self, layer: str) -> Float32Array | None:
        """Return the weights of a norm, None if the model does not have it."""
        name = f"{layer}.weight"
        return self.values(name) if name in self.names else None


def reason_against(config: Mapping[str, Any], head_dim: int) -> str:
    """Return why the kernels cannot run a model with this `config.json`, or ""."""
    if config["model_type"] not in ARCHITECTURES:
        return f"the kernels run {', '.join(ARCHITECTURES)}, not {config['model_type']}"
    if config["hidden_act"] != "silu":
        return f"the kernels have no activation {config['hidden_act']}"
    if config["hidden_size"] % 8 or config["intermediate_size"] % 8 or head_dim % 16:
        return "hidden and intermediate sizes must be multiples of 8, and the size of a head one of 16"
    return ""


def decoder(
    config: Mapping[str, Any], head_dim: int, named: NamedWeights, tables: tuple[Float32Array, Float32Array]
) -> NativeWeights:
    """Return the weights of a model with this `config.json`; `tables` are cosines and sines of positions."""
    embedding = named.matrix(EMBEDDING)
    is_tied = HEAD not in named.names and "lm_head" not in named.blocks
    return NativeWeights(
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        intermediate=config["intermediate_size"],
        eps=config["rms_norm_eps"],
        scale=head_dim**-0.5,
        embedding=embedding,
        final_norm=named.values("model.norm.weight"),
        cos=tables[0],
        sin=tables[1],
        layers=[_layer(f"model.layers.{i}", named) for i in range(config["num_hidden_layers"])],
        head=Linear([embedding]) if is_tied else named.linear(["lm_head"]),
    )


def _layer(layer: str, named: NamedWeights) -> DecoderLayer:
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    return DecoderLayer(
        attn_norm=named.values(f"{layer}.input_layernorm.weight"),
        mlp_norm=named.values(f"{layer}.post_attention_layernorm.weight"),
        q_norm=named.norm(f"{attention}.q_norm"),
        k_norm=named.norm(f"{attention}.k_norm"),
        qkv=named.linear([f"{attention}.{name}_proj" for name in "qkv"]),
        out=named.linear([f"{attention}.o_proj"]),
        gate_up=named.linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], interleaves=True),
        down=named.linear([f"{mlp}.down_proj"]),
    )
