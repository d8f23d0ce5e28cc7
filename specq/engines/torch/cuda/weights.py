"""A transformers decoder's weights in the layout of the fused path: merged projections, no second copy.

The merged tensors replace the model's own tensors, which become views of them. The model still runs as before, and the
memory is that of one checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specq.engines.torch.rotary import has_tables, rotary_tables

ARCHITECTURES = ("llama", "qwen2", "qwen3")
HEAD_DIMS = (16, 32, 64, 128, 256)
MAX_GROUP = 64  # query heads per key-value head
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; norms [hidden], q_norm and k_norm [head_dim] or None.

    - qkv: [(heads + 2 * kv_heads) * head_dim, hidden]; qkv_bias likewise or None.
    - out: [hidden, heads * head_dim].
    - gate_up: [2 * intermediate, hidden], the gate's rows first.
    - down: [hidden, intermediate].
    """

    attn_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole decoder; embedding and head [vocab, hidden], cos and sin f32[positions, head_dim / 2]."""

    layers: list[LayerWeights]
    embedding: torch.Tensor
    final_norm: torch.Tensor
    head: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    attention_scale: float

    @property
    def hidden(self) -> int:
        return self.embedding.shape[1]

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def supports(model: Any) -> bool:
    """Return whether the fused path can run this transformers model on any device: Llama's layer plan, common sizes."""
    config = model.config
    if config.model_type not in ARCHITECTURES or config.hidden_act != "silu" or model.dtype not in DTYPES:
        return False
    attention = model.model.layers[0].self_attn
    group = config.num_attention_heads // config.num_key_value_heads
    biases = (attention.o_proj.bias, model.model.layers[0].mlp.down_proj.bias, model.lm_head.bias)
    fits = attention.head_dim in HEAD_DIMS and group <= MAX_GROUP
    return fits and has_tables(model.model) and set(biases) == {None}


def merge(model: Any, num_slots: int) -> DecoderWeights:
    """Merge a model's projections in place; no session is longer than num_slots."""
    config, decoder = model.config, model.model
    cos, sin = rotary_tables(decoder, num_slots)
    attention = decoder.layers[0].self_attn
    return DecoderWeights(
        layers=[_merge_layer(layer) for layer in decoder.layers],
        embedding=decoder.embed_tokens.weight.detach(),
        final_norm=decoder.norm.weight.detach(),
        head=model.lm_head.weight.detach(),
        cos=cos.float().contiguous(),
        sin=sin.float().contiguous(),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        intermediate=config.intermediate_size,
        eps=config.rms_norm_eps,
        attention_scale=attention.scaling,
    )


def _merge_layer(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    q_norm, k_norm = (None if norm is None else norm.weight.detach() for norm in norms)
    return LayerWeights(
        attn_norm=layer.input_layernorm.weight.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        qkv=_merge_parameters(projections, "weight"),
        qkv_bias=None if attention.q_proj.bias is None else _merge_parameters(projections, "bias"),
        q_norm=q_norm,
        k_norm=k_norm,
        out=attention.o_proj.weight.detach(),
        gate_up=_merge_parameters([mlp.gate_proj, mlp.up_proj], "weight"),
        down=mlp.down_proj.weight.detach(),
    )


def _merge_parameters(linears: list[Any], name: str) -> torch.Tensor:
    """Concatenate a parameter of some linear layers, and make theirs views of the result."""
    own = [getattr(linear, name).detach() for linear in linears]
    merged = torch.cat(own)
    for linear, part in zip(linears, torch.split(merged, [len(tensor) for tensor in own]), strict=True):
        setattr(linear, name, torch.nn.Parameter(part, requires_grad=False))
    return merged
