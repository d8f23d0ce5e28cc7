"""Layers of heads on a GPU by our own kernels, for rows below contexts that are read in place.

Only modules that import this one need Triton. A layer consists of kernels around the vendor's matrix products. Its
arithmetic is that of `specq.drafting.head_layers` except for rounding: the residual stream and the rotations are in
float32. This module never waits for the device, so all of it may be recorded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch.nn.functional import linear

from specq.drafting.head_config import HeadShape
from specq.drafting.head_layers import Rotations
from specq.drafting.trees.gpu_kernels import attend_kept_kernel
from specq.engines.torch.cuda.gpu_kernels.attention import combine_kernel
from specq.engines.torch.cuda.gpu_kernels.rows import add_norm_kernel, rotate_kernel, silu_kernel

LOG2_E = 1.4426950408889634
KEY_BLOCK = 64  # rows of a context that attention reads at a time
FEW_LINES, MOST_LINES = 16, 64  # rows times heads of an attention program
PROGRAMS = 256  # programs that attention should be split into, all contexts together
LEAST_SIDE = 16  # minimum side of a tensor core's product
SILU_BLOCK = 1024
ROTATED_HEADS = 16  # heads that one program rotates
SLOTS, ROTATIONS = 2, 3  # indices among a row's integers


class Seen(NamedTuple):
    """Contexts of rows.

    kept   [2, places, kv_heads, room, dim]: keys and values of texts, by place.
    roots  i32[2, b] or more: places and lengths.
    most   maximum rows of each context.
    chunk  rows of a context that an attention program reads.
    """

    kept: torch.Tensor
    roots: torch.Tensor
    most: int
    chunk: int

    @property
    def num_parts(self) -> int:
        """Return the most chunks of a context."""
        return int(triton.cdiv(self.most, self.chunk))


class Rows(NamedTuple):
    """Rows for a pass, the same number below each context, and the memory that keeps them.

    ints    i32[5, n] or more: see `specq.drafting.trees.gpu_kernels`.
    spans   i32[n, 2].
    keys, values  memory with slots of `dim` numbers. The slots of two heads are `kv_stride` apart.
    paths   i32[n, PATH]: `depth` columns are in use. None: rows see only their context.
    above   how many rows are above those of a context. 0: rows are counted from the first of all.
    """

    ints: torch.Tensor
    spans: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    kv_stride: int
    paths: torch.Tensor | None
    depth: int
    above: int


class LayerKernels:
    """The kernels of layers of one shape."""

    def __init__(self, shape: HeadShape) -> None:
        self.shape = shape
        self._group = shape.num_attention_heads // shape.num_key_value_heads

    def seen(self, kept: torch.Tensor, roots: torch.Tensor, most: int, num_rows: int) -> Seen:
        """Return contexts, cut for `num_rows` rows below each."""
        num_programs = roots.shape[1] * self.shape.num_key_value_heads * self._cut(num_rows)[1]
        wanted = triton.next_power_of_2(triton.cdiv(most * num_programs, PROGRAMS))
        return Seen(kept, roots, most, max(KEY_BLOCK, int(wanted)))

    def _cut(self, num_rows: int) -> tuple[int, int]:
        """Return the lines of an attention program, and the number of blocks for `num_rows` rows."""
        lines = triton.next_power_of_2(max(min(num_rows * self._group, MOST_LINES), self._group, FEW_LINES))
        return int(lines), int(triton.cdiv(num_rows, lines // self._group))

    def compute(
        self, layer: Any, rows: Rows, inputs: torch.Tensor, x: torch.Tensor, rotations: Rotations, seen: Seen, norm: Any
    ) -> torch.Tensor:
        """Compute rows of a layer and keep their keys and values. Return the norm of their output by `norm`, a weight.

        inputs  [n, width]: the input of the layer's attention.
        x       f32[n, hidden]: the residual stream, which the layer adds to.
        rotations  cosines and sines, f32[*, dim / 2].
        """
        queries = self._rotate(layer.self_attn, rows, linear(inputs, layer.self_attn.fused.weight), rotations)
        attended = layer.self_attn.o_proj(self._attend(rows, queries, seen))
        normed = self._add_norm(x, attended, layer.post_attention_layernorm.weight)
        inner = self._silu(linear(normed, layer.mlp.fused.weight))
        return self._add_norm(x, layer.mlp.down_proj(inner), norm)

    def _rotate(self, attention: Any, rows: Rows, qkv: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        """Return rotated queries [n, heads * dim], and store keys and values."""
        shape, absent, has_norms = self.shape, qkv, self.shape.has_head_norms
        norms = (attention.q_norm.weight, attention.k_norm.weight) if has_norms else (absent, absent)
        heads, kv_heads, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        queries = qkv.new_empty(len(qkv), heads * dim)
        rotate_kernel[(len(qkv), triton.cdiv(heads + 2 * kv_heads, ROTATED_HEADS))](
            qkv, absent, absent, *norms, *rotations, rows.ints[ROTATIONS], rows.ints[SLOTS], queries, rows.keys,
            rows.values, rows.kv_stride, shape.rms_norm_eps, HIDDEN=shape.hidden_size, HEADS=heads, KV_HEADS=kv_heads,
            HEAD_DIM=dim, SHARE=ROTATED_HEADS, HAS_BIAS=False, HEAD_NORM=has_norms, SCALED=False, PDL=False,
            num_warps=4,
        )  # fmt: skip
        return queries

    def _attend(self, rows: Rows, queries: torch.Tensor, seen: Seen) -> torch.Tensor:
        """Return the attention of the rows over their contexts and paths, [n, heads * dim]."""
        heads, dim, num_contexts = self.shape.num_attention_heads, self.shape.head_dim, seen.roots.shape[1]
        keys, values = seen.kept
        num_rows = len(queries) // num_contexts
        lines, num_blocks = self._cut(num_rows)
        num_parts = seen.num_parts + (rows.paths is not None)
        partials = queries.new_empty(num_parts * len(queries), heads * dim, dtype=torch.float32)
        sums = queries.new_empty(num_parts * len(queries), heads * 2, dtype=torch.float32)
        attend_kept_kernel[(num_contexts * num_blocks, self.shape.num_key_value_heads, num_parts)](
            queries, keys, values, rows.keys, rows.values, seen.roots, rows.ints,
            rows.ints if rows.paths is None else rows.paths, partials, sums, *keys.stride()[:2], rows.kv_stride,
            LOG2_E * dim**-0.5, rows.depth, seen.chunk, num_rows, HEADS=heads, GROUP=self._group, HEAD_DIM=dim,
            PATH=0 if rows.paths is None else rows.paths.shape[1], LINES=lines, BLOCK=KEY_BLOCK,
            DIM_PAD=max(dim, LEAST_SIDE), num_warps=4, num_stages=2,
        )  # fmt: skip
        attended = torch.empty_like(queries)
        combine_kernel[(len(queries), heads)](
            partials, sums, rows.spans, attended, HEADS=heads, SHARE=1, SHARE_PAD=1, HEAD_DIM=dim, BLOCK=8, PDL=False,
            num_warps=2,
        )  # fmt: skip
        return attended

    def _add_norm(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Add to x f32[n, hidden], in place; return its norm."""
        out, hidden = torch.empty_like(delta), self.shape.hidden_size
        add_norm_kernel[(len(x),)](
            x, delta, weight, out, delta, delta, *delta.stride(), self.shape.rms_norm_eps, HIDDEN=hidden,
            HIDDEN_PAD=triton.next_power_of_2(hidden), ADD=True, PICK=False, SPLIT=False, PDL=False, num_warps=8,
        )  # fmt: skip
        return out

    def _silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_rows, inner = len(gate_up), self.shape.intermediate_size
        out = gate_up.new_empty(num_rows, inner)
        silu_kernel[(num_rows, triton.cdiv(inner, SILU_BLOCK))](
            gate_up, gate_up, out, 0.0, HIDDEN=self.shape.hidden_size, INNER=inner, BLOCK=SILU_BLOCK, SCALED=False,
            PDL=False, num_warps=4,
        )  # fmt: skip
        return out
