"""Parts of a head's layers in torch: those of a Llama or Qwen3, with attention that the caller provides."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from specq.drafting.head_config import HeadShape
from specq.engines.native import inverse_frequencies

# Queries [b, rows, heads, dim], keys and values [b, rows, kv_heads, dim] of the new rows -> [b, rows, heads, dim].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Rotations = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [b, rows, 1, head_dim / 2]
HEAD_DIMS = (8, 16, 32, 64, 128)  # dimensions of a head that our kernels support
OTHER_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class FusedMaps:
    """Linear maps of the same input. After `fuse` they are parts of one matrix."""

    def __init__(self, *parts: nn.Linear) -> None:
        self._parts, self._all = parts, torch.empty(0)
        self._bias: torch.Tensor | None = None
        self._sizes = [part.out_features for part in parts]

    def fuse(self) -> None:
        """Join the matrices."""
        self._all = torch.cat([part.weight.detach() for part in self._parts])
        for part, rows in zip(self._parts, self._all.split(self._sizes), strict=True):  # type: ignore[no-untyped-call]
            part.weight.data = rows
        biases = [part.bias.detach() for part in self._parts if part.bias is not None]
        self._bias = torch.cat(biases) if biases else None

    @property
    def weight(self) -> torch.Tensor:
        """The one matrix; without rows before `fuse`."""
        return self._all

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the output of each map, [..., its size]."""
        if not len(self._all):
            return tuple(part(x) for part in self._parts)
        found: tuple[torch.Tensor, ...] = functional.linear(x, self._all, self._bias).split(self._sizes, -1)  # type: ignore[no-untyped-call]
        return found


class RmsNorm(nn.RMSNorm):
    """torch's RMSNorm in one kernel, in its input's number format even if the weight has another, as in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        with torch.autocast(x.device.type, enabled=False):
            return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Projections to queries, keys and values, and back.

    num_inputs  the width of its input, in hidden sizes.
    has_biases  whether queries, keys and values have biases.
    """

    def __init__(self, shape: HeadShape, num_inputs: int = 1, *, has_biases: bool = False) -> None:
        super().__init__()
        self.head_dim, width = shape.head_dim, num_inputs * shape.hidden_size
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(width, queries, bias=has_biases)
        self.k_proj = nn.Linear(width, keys, bias=has_biases)
        self.v_proj = nn.Linear(width, keys, bias=has_biases)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.fused = FusedMaps(self.q_proj, self.k_proj, self.v_proj)
        self.q_norm, self.k_norm = (
            RmsNorm(shape.head_dim, eps=shape.rms_norm_eps) if shape.has_head_norms else nn.Identity() for _ in range(2)
        )

    def forward(self, x: torch.Tensor, rotations: Rotations, attend: Attend) -> torch.Tensor:
        queries, keys, values = (each.view(*each.shape[:-1], -1, self.head_dim) for each in self.fused(x))
        queries, keys = self.q_norm(queries), self.k_norm(keys)
        attended = attend(rotate(queries, *rotations), rotate(keys, *rotations), values)
        found: torch.Tensor = self.o_proj(attended.flatten(-2))
        return found


class FeedForward(nn.Module):
    """The gated network of a layer."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.fused = FusedMaps(self.gate_proj, self.up_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fused(x)
        found: torch.Tensor = self.down_proj(functional.silu(gate) * up)
        return found


class HeadLayer(nn.Module):
    """A layer of a Llama or Qwen3."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = hidden_norm(shape), hidden_norm(shape)
        self.self_attn, self.mlp = Attention(shape), FeedForward(shape)

    def forward(self, x: torch.Tensor, rotations: Rotations, attend: Attend) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotations, attend)
        found: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


def fuse_maps(network: nn.Module) -> None:
    """Join matrices of a network with the same input, on their current device. Do not move them afterwards."""
    for module in network.modules():
        if isinstance(module, (Attention, FeedForward)):
            module.fused.fuse()


class Positions:
    """The rotations of rows at positions. Frequencies stay in float32."""

    def __init__(self, shape: HeadShape) -> None:
        self._frequencies = torch.from_numpy(inverse_frequencies(shape.rope, shape.head_dim, None))

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotations:
        """Return the rotations of rows at positions i64[b, rows]; `dtype`: that of their states."""
        self._frequencies = self._frequencies.to(positions.device)
        angles = positions[..., None, None] * self._frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)


def hidden_norm(shape: HeadShape) -> RmsNorm:
    """Return a norm of hidden states."""
    return RmsNorm(shape.hidden_size, eps=shape.rms_norm_eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [b, rows, heads, dim] with paired halves, as in Llama."""
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def of_any_shape() -> AbstractContextManager[None]:
    """Return a context without cuDNN's attention.

    Newer versions of torch prefer it on Hopper. But it plans each new shape again, which takes the host tens of
    milliseconds. Passes of fixed shapes may use it.
    """
    found: AbstractContextManager[None] = sdpa_kernel(OTHER_KERNELS)
    return found


def attend_to(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, is_seen: torch.Tensor) -> torch.Tensor:
    """Return the attention [b, rows, heads, dim] of queries of this shape.

    keys, values   [b, kv_heads, n, dim].
    is_seen        bool[b, rows, n].

    The query heads of a key-value head are rows for the kernel. So keys need not be copied.
    """
    num_texts, num_rows, num_heads, dim = queries.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    folded = queries.view(num_texts, num_rows, num_kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    mask = is_seen[:, None, None].expand(-1, -1, group, -1, -1).reshape(num_texts, 1, group * num_rows, -1)
    found = functional.scaled_dot_product_attention(
        folded.reshape(num_texts, num_kv_heads, group * num_rows, dim), keys, values, attn_mask=mask
    )
    return found.reshape(num_texts, num_kv_heads, group, num_rows, dim).permute(0, 3, 1, 2, 4).flatten(2, 3)
