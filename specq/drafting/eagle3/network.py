"""The network of an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840): one decoder layer over [embedding; state].

Row i of a context reads token i + 1 and the state behind token i, stands at position i, and predicts token i + 2. That
state comes from the target's hidden states (`project`), or, beyond the target's tokens, from the head's own row before.
The caller provides the attention between rows. In training it covers a whole text at once, in drafting a context and a
path of a tree. `fuse` joins matrices with the same input into one. Drafting does this, because a few rows are bound by
memory reads.

Parameters have the names of `specq.drafting.eagle3.form`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from specq.drafting.eagle3 import form as eagle_form
from specq.engines.native import inverse_frequencies
from specq.engines.torch import RowNoise

# Queries [b, rows, heads, dim], keys and values [b, rows, kv_heads, dim] of the new rows -> [b, rows, heads, dim].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Rotations = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [b, rows, 1, head_dim / 2]


class TreeContexts(NamedTuple):
    """Contexts of b trees, for a device that grows them without the host.

    kept    [2, places, kv_heads, room, dim]: keys and values of texts, by place.
    roots   i32[3, b]: places, lengths, and the position of the token behind each.
    most    maximum rows of each context.
    states  [b, hidden]: the output of their last rows.
    noise   of each context, with keys i32[b, levels, 2].
    """

    kept: torch.Tensor
    roots: torch.Tensor
    most: int
    states: torch.Tensor
    noise: RowNoise


class _Fused:
    """Linear maps of the same input. After `fuse` they are parts of one matrix."""

    def __init__(self, *parts: nn.Linear) -> None:
        self._parts, self._all = parts, torch.empty(0)
        self._sizes = [part.out_features for part in parts]

    def fuse(self) -> None:
        """Join the matrices."""
        self._all = torch.cat([part.weight.detach() for part in self._parts])
        for part, rows in zip(self._parts, self._all.split(self._sizes), strict=True):  # type: ignore[no-untyped-call]
            part.weight.data = rows

    @property
    def weight(self) -> torch.Tensor:
        """The one matrix; without rows before `fuse`."""
        return self._all

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the output of each map, [..., its size]."""
        if not len(self._all):
            return tuple(part(x) for part in self._parts)
        found: tuple[torch.Tensor, ...] = functional.linear(x, self._all).split(self._sizes, -1)  # type: ignore[no-untyped-call]
        return found


class RmsNorm(nn.RMSNorm):
    """torch's RMSNorm in one kernel, in its input's number format even if the weight has another, as in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        with torch.autocast(x.device.type, enabled=False):
            return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _Attention(nn.Module):
    """Projections to queries, keys and values, from [embedding; state], and back."""

    def __init__(self, shape: eagle_form.EagleShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.fused = _Fused(self.q_proj, self.k_proj, self.v_proj)
        self.q_norm, self.k_norm = (
            RmsNorm(shape.head_dim, eps=shape.rms_norm_eps) if shape.has_head_norms else nn.Identity() for _ in range(2)
        )

    def forward(self, both: torch.Tensor, rotations: Rotations, attend: Attend) -> torch.Tensor:
        queries, keys, values = (x.view(*x.shape[:-1], -1, self.head_dim) for x in self.fused(both))
        queries, keys = self.q_norm(queries), self.k_norm(keys)
        attended = attend(_rotate(queries, *rotations), _rotate(keys, *rotations), values)
        found: torch.Tensor = self.o_proj(attended.flatten(-2))
        return found


class _FeedForward(nn.Module):
    def __init__(self, shape: eagle_form.EagleShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.fused = _Fused(self.gate_proj, self.up_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fused(x)
        found: torch.Tensor = self.down_proj(functional.silu(gate) * up)
        return found


class _Layer(nn.Module):
    def __init__(self, shape: eagle_form.EagleShape) -> None:
        super().__init__()
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (_norm(shape) for _ in range(3))
        self.self_attn, self.mlp = _Attention(shape), _FeedForward(shape)
        self._norm_before_residual = shape.norm_before_residual

    def forward(
        self,
        states: torch.Tensor,
        embedded: torch.Tensor,
        rotations: Rotations,
        attend: Attend,
    ) -> torch.Tensor:
        normed = self.hidden_norm(states)
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        x = (normed if self._norm_before_residual else states) + self.self_attn(both, rotations, attend)
        found: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


class EagleNetwork(nn.Module):
    """A head; `embedding` [vocab, hidden] is not trained."""

    def __init__(self, shape: eagle_form.EagleShape, embedding: torch.Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(eagle_form.NUM_TAPS * shape.target_hidden_size, shape.hidden_size, bias=False)
        self.midlayer, self.norm = _Layer(shape), _norm(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("embedding", embedding, persistent=False)
        frequencies = torch.from_numpy(inverse_frequencies(shape.rope, shape.head_dim, None))
        self._frequencies = frequencies.to(embedding.device)  # not a buffer, because it stays in float32

    @property
    def num_tokens(self) -> int:
        """How many tokens it can read."""
        return len(self.get_buffer("embedding"))

    def project(self, taps: torch.Tensor) -> torch.Tensor:
        """Return states [..., hidden] from the target's hidden states [..., layers * target's hidden]."""
        found: torch.Tensor = self.fc(taps.to(self.fc.weight.dtype))
        return found

    def fuse(self) -> None:
        """Join matrices with the same input, on their current device. Do not move them afterwards."""
        self.midlayer.self_attn.fused.fuse()
        self.midlayer.mlp.fused.fuse()

    def rotations(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotations:
        """Return the rotations of rows at positions i64[b, rows]; `dtype`: that of their states."""
        self._frequencies = self._frequencies.to(positions.device)
        angles = positions[..., None, None] * self._frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(
        self, states: torch.Tensor, token_ids: torch.Tensor, rotations: Rotations, attend: Attend
    ) -> torch.Tensor:
        """Return the next states [b, rows, hidden].

        states      [b, rows, hidden].
        token_ids   i64[b, rows]: the tokens after the states.
        rotations   of the rows' positions.
        """
        embedding: torch.Tensor = self.get_buffer("embedding")
        embedded = functional.embedding(token_ids, embedding).to(states.dtype)
        found: torch.Tensor = self.midlayer(states, embedded, rotations, attend)
        return found

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., draft tokens] of the token after next, given the output of `forward`."""
        found: torch.Tensor = self.lm_head(self.norm(states))
        return found


def _norm(shape: eagle_form.EagleShape) -> RmsNorm:
    return RmsNorm(shape.hidden_size, eps=shape.rms_norm_eps)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [b, rows, heads, dim] with paired halves, as in Llama."""
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
