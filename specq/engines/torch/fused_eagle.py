"""Trees of an EAGLE-3 head, level by level, by kernels of our own around the vendor's matrix products: about 15 launches a level, where plain torch takes
some 65. The arithmetic is that of `EagleNetwork`, but for rounding: the residual stream and rotations are in float32.

Contexts are read where they are kept, by place; the keys and values of the trees' rows lie apart, in memory that goes with the trees. Nothing here waits
for the device, so all of it may be recorded.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import triton
from torch.nn.functional import linear

from specq.engines.torch.eagle_network import EagleNetwork, TreeContexts
from specq.engines.torch.fused_top import ranked_in_tiles
from specq.engines.torch.gpu_kernels.attention import combine_kernel
from specq.engines.torch.gpu_kernels.rows import add_norm_kernel, rotate_kernel, silu_kernel
from specq.engines.torch.gpu_kernels.trees import attend_tree_kernel, descend_kernel, enter_kernel
from specq.engines.torch.row_noise import RowNoise
from specq.engines.torch.top import FEW

LOG2_E = 1.4426950408889634
KEY_BLOCK = 64  # rows of a context that attention takes at a time
FEW_LINES, MOST_LINES = 16, 64  # rows times heads that a program of attention takes
PROGRAMS = 256  # that attention should be cut into, all trees together
LEAST_SIDE = 16  # of a tensor core's product
SILU_BLOCK = 1024
ROTATED_HEADS = 16  # that one program rotates
ROW_INTS, SLOTS, TREES = 6, 2, 3  # of a row, see `gpu_kernels.trees`


class FusedTrees:
    """Trees that grow below contexts.

    MOST_RANKED  tokens behind a row
    nodes        i32[4, b, n]: tokens, parents, bits of log-probabilities and of cumulative ones
    """

    MOST_RANKED: ClassVar[int] = FEW

    def __init__(
        self,
        network: EagleNetwork,
        names: torch.Tensor | None,
        contexts: TreeContexts,
        sizes: tuple[int, int, int],
    ) -> None:
        """`names` i32[columns]: the token of each column of the logits, where that is not its number; sizes: how many levels, nodes of a tree and rows
        of a tree there will be."""
        self._network, self._shape, self._names = network, network.shape, names
        self._contexts, self._num_trees = contexts, contexts.roots.shape[1]
        num_levels, num_nodes, self._num_slots = sizes
        heads, dim = self._shape.num_key_value_heads, self._shape.head_dim
        kept = contexts.kept
        self._keys, self._values = kept.new_empty(2, heads, self._num_trees * self._num_slots, dim)
        self.nodes = contexts.roots.new_empty(4, self._num_trees, num_nodes)
        before = torch.arange(-1, num_levels - 1, device=kept.device)[
            :, None
        ]  # a row stands where the state before it does
        self._cos, self._sin = network.rotations(contexts.roots[2] + before, torch.float32)
        self._path = triton.next_power_of_2(num_levels)
        self._chunk = _chunk(contexts.most, self._num_trees * heads)
        self._states, self._normed = contexts.states, network.norm(contexts.states)
        self._above = self._paths = self._spans = self.nodes  # of the rows; there are none above the first
        self._depth, self._num_rows, self._first_node, self._first_slot = 0, 1, 0, 0

    def descend(
        self,
        num_ranked: int,
        columns: torch.Tensor | None,
        behind: torch.Tensor,
        expanded: torch.Tensor | None,
        num_next: int,
    ) -> None:
        """Rank behind the rows, keep the nodes of a level, and compute the rows below it, as many of each tree. The others are as of
        `specq.proposers.eagle_levels.Level`; behind the last level there are no rows."""
        ranked = self._rank(num_ranked)
        num_before, depth = self._num_rows, self._depth
        above, paths = self._above, self._paths
        num_rows = self._num_trees * num_next
        if num_next:
            self._above = above.new_empty(ROW_INTS, num_rows)
            self._paths, self._spans = above.new_empty(num_rows, self._path), above.new_empty(num_rows, 3)
        absent, num_nodes = self.nodes, len(behind)
        descend_kernel[(self._num_trees,)](
            ranked, _or(self._names, absent), _or(columns, absent), behind, _or(expanded, absent),
            self._contexts.roots, above, paths, self.nodes, self._above, self._paths, self._spans,
            0 if self._names is None else len(self._names), self._network.num_tokens, self.nodes.shape[2],
            self._num_slots, self._first_node, self._first_slot, depth, self._chunk,
            ROWS=num_before, COUNT=num_ranked, NODES=num_nodes, NODES_PAD=triton.next_power_of_2(num_nodes),
            NEXT=num_next, NEXT_PAD=triton.next_power_of_2(max(num_next, 1)), PATH=self._path,
            NAMED=self._names is not None, PICKED=columns is not None, SHAPED=expanded is not None,
            IS_FIRST=depth == 0, num_warps=4,
        )  # fmt: skip
        self._first_node += num_nodes
        if num_next:
            self._num_rows, self._depth = num_next, depth + 1
            self._compute(num_before)
            self._first_slot += num_next

    def _rank(self, count: int) -> torch.Tensor:
        """Return i32[b * rows, count, 2]: columns and bits of log-probabilities."""
        inverse, keys = self._contexts.noise
        logits = self._network.lm_head(self._normed)
        return ranked_in_tiles(logits, RowNoise(inverse, keys[:, self._depth :]), count, self._names)

    def _compute(self, num_before: int) -> None:
        """Compute rows below as many of each tree."""
        attention, mlp = self._network.midlayer.self_attn, self._network.midlayer.mlp
        both, x = self._enter(num_before)
        attended = self._attend(self._rotate(linear(both, attention.fused.weight)))
        normed = self._add_norm(x, attention.o_proj(attended), self._network.midlayer.post_attention_layernorm.weight)
        inner = self._silu(linear(normed, mlp.fused.weight))
        self._normed = self._add_norm(x, mlp.down_proj(inner), self._network.norm.weight)
        self._states = x

    def _enter(self, num_before: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the rows read, [rows, 2 * hidden], and f32[rows, hidden] to which the layer adds."""
        hidden, num_rows = self._shape.hidden_size, self._num_trees * self._num_rows
        like, layer = self._contexts.states, self._network.midlayer
        both, x = like.new_empty(num_rows, 2 * hidden), like.new_empty(num_rows, hidden, dtype=torch.float32)
        enter_kernel[(num_rows, 2)](
            self._above, self._network.get_buffer("embedding"), self._states, layer.input_layernorm.weight,
            layer.hidden_norm.weight, both, x, self._shape.rms_norm_eps, ROWS=self._num_rows, ABOVE=num_before,
            HIDDEN=hidden, HIDDEN_PAD=triton.next_power_of_2(hidden), IS_NORMED_KEPT=self._shape.norm_before_residual,
            num_warps=8,
        )  # fmt: skip
        return both, x

    def _rotate(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return rotated queries [rows, heads * dim], and keep keys and values."""
        shape, absent = self._shape, qkv
        heads, kv_heads, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        queries = qkv.new_empty(len(qkv), heads * dim)
        rotate_kernel[(len(qkv), triton.cdiv(heads + 2 * kv_heads, ROTATED_HEADS))](
            qkv, absent, absent, absent, self._cos[self._depth - 1], self._sin[self._depth - 1], self._above[TREES],
            self._above[SLOTS], queries, self._keys, self._values, self._keys.stride(0), 0.0,
            HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=dim, SHARE=ROTATED_HEADS, HAS_BIAS=False, HEAD_NORM=False,
            PDL=False, num_warps=4,
        )  # fmt: skip
        return queries

    def _attend(self, queries: torch.Tensor) -> torch.Tensor:
        """Return what the rows' queries find in their contexts and paths, [rows, heads * dim]."""
        heads, kv_heads, dim = self._shape.num_attention_heads, self._shape.num_key_value_heads, self._shape.head_dim
        group, (keys, values) = heads // kv_heads, self._contexts.kept
        lines = triton.next_power_of_2(max(min(self._num_rows * group, MOST_LINES), group, FEW_LINES))
        num_blocks, num_parts = (
            triton.cdiv(self._num_rows, lines // group),
            1 + triton.cdiv(self._contexts.most, self._chunk),
        )
        partials = queries.new_empty(num_parts * len(queries), heads * dim, dtype=torch.float32)
        weights = queries.new_empty(num_parts * len(queries), heads, dtype=torch.float32)
        attend_tree_kernel[(self._num_trees * num_blocks, kv_heads, num_parts)](
            queries, keys, values, self._keys, self._values, self._contexts.roots, self._paths, partials, weights,
            keys.stride(0), self._keys.stride(0), LOG2_E * dim**-0.5, self._depth, self._chunk,
            ROWS=self._num_rows, HEADS=heads, GROUP=group, HEAD_DIM=dim, PATH=self._path, ROOM=keys.shape[2],
            LINES=lines, BLOCK=KEY_BLOCK, DIM_PAD=max(dim, LEAST_SIDE), num_warps=4, num_stages=2,
        )  # fmt: skip
        attended = torch.empty_like(queries)
        combine_kernel[(len(queries), heads)](
            partials, weights, self._spans, attended, HEADS=heads, SHARE=1, HEAD_DIM=dim, BLOCK=8, PDL=False,
            num_warps=2,
        )  # fmt: skip
        return attended

    def _add_norm(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Add to x f32[rows, hidden], in place; return its norm."""
        out, hidden = torch.empty_like(delta), self._shape.hidden_size
        add_norm_kernel[(len(x),)](
            x, delta, weight, out, delta, self._shape.rms_norm_eps, HIDDEN=hidden,
            HIDDEN_PAD=triton.next_power_of_2(hidden), ADD=True, PICK=False, PDL=False, num_warps=8,
        )  # fmt: skip
        return out

    def _silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_rows, inner = len(gate_up), self._shape.intermediate_size
        out = gate_up.new_empty(num_rows, inner)
        silu_kernel[(num_rows, triton.cdiv(inner, SILU_BLOCK))](
            gate_up, out, INNER=inner, BLOCK=SILU_BLOCK, PDL=False, num_warps=4
        )
        return out


def _or(values: torch.Tensor | None, absent: torch.Tensor) -> torch.Tensor:
    return absent if values is None else values


def _chunk(most: int, num_programs: int) -> int:
    """Return how many rows of its context, at most so many, a program of attention takes, where there are so many programs for each part."""
    return max(KEY_BLOCK, int(triton.next_power_of_2(triton.cdiv(most * num_programs, PROGRAMS))))
