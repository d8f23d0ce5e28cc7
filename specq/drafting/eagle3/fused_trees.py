"""Trees of an EAGLE-3 head, level by level: about 15 launches a level (`fused_layer`), where plain torch takes some 65."""

from __future__ import annotations

import torch
import triton

from specq.drafting.eagle3.fused_layer import FusedLayer, Rows
from specq.drafting.eagle3.gpu_kernels import descend_kernel
from specq.drafting.eagle3.network import TreeContexts
from specq.engines.torch import RowNoise
from specq.engines.torch.fused_top import ranked_in_tiles

TREE_INTS = 7  # of a row, see `gpu_kernels`

# What all trees have room for, so that most of them are grown by the same few kernels: levels, and of a level the nodes that are ranked, those that are
# left, and the rows below.
USUAL_LEVELS, USUAL_NODES, USUAL_KEPT, USUAL_ROWS = 8, 32, 8, 4


class FusedTrees:
    """Trees that grow below contexts. `nodes` i32[4, b, n]: tokens, parents, bits of log-probabilities and of cumulative ones; with lines
    i32[4 + levels, b, n], as of `specq.drafting.eagle3.interface.DeviceNodes`."""

    def __init__(
        self,
        layer: FusedLayer,
        names: torch.Tensor | None,
        contexts: TreeContexts,
        num_nodes: int,
        num_rows: list[int],
        *,
        has_lines: bool,
    ) -> None:
        """`names` i32[columns]: the token of each column of the logits, where that is not its number; num_nodes: of a tree; num_rows: of a tree, below
        each of its levels, 0 below the last."""
        self._layer, self._network, self._names, self._noise = layer, layer.network, names, contexts.noise
        self._num_trees, self._num_slots = contexts.roots.shape[1], sum(num_rows)
        kept, shape = contexts.kept, layer.shape
        self._seen = layer.seen(kept, contexts.roots, contexts.most, max(*num_rows, 1))
        num_slots = self._num_trees * self._num_slots
        self._keys, self._values = kept.new_empty(2, shape.num_key_value_heads, num_slots, shape.head_dim)
        self._num_levels = len(num_rows)
        num_planes = 4 + (self._num_levels if has_lines else 0)
        self.nodes = contexts.roots.new_empty(num_planes, self._num_trees, num_nodes)
        before = torch.arange(-1, len(num_rows) - 1, device=kept.device)  # a row stands where the state before it does
        self._rotations = self._network.rotations(contexts.roots[2] + before[:, None], torch.float32)
        self._states, self._normed = contexts.states, self._network.norm(contexts.states)
        self._rows = self._paths = self.nodes  # there are none before the first
        self._path = _padded(len(num_rows), USUAL_LEVELS)
        self._depth, self._num_rows, self._first_node, self._first_slot = 0, 1, 0, 0

    def descend(
        self,
        num_ranked: int,
        columns: torch.Tensor | None,
        behind: torch.Tensor,
        expanded: torch.Tensor | None,
        num_kept: int | None,
        num_next: int,
    ) -> None:
        """Rank behind the rows, keep the nodes of a level, and compute the rows below it, as many of each tree. The others are as of
        `specq.drafting.eagle3.levels.Level`; behind the last level there are no rows."""
        ranked = self._rank(num_ranked)
        above, paths, num_above, depth = self._rows, self._paths, self._num_rows, self._depth
        num_rows, num_ranked_nodes, absent, kept = self._num_trees * num_next, len(behind), self.nodes, num_kept or 0
        sizes = (TREE_INTS, num_rows), (num_rows, self._path), (num_rows, 3)
        self._rows, self._paths, spans = (above.new_empty(*size) for size in sizes)
        descend_kernel[(self._num_trees,)](
            ranked, _or(self._names, absent), _or(columns, absent), behind, _or(expanded, absent), self._seen.roots,
            above, paths, self.nodes, self._rows, self._paths, spans,
            0 if self._names is None else len(self._names), self._network.num_tokens, self.nodes.shape[2],
            self._num_slots, self._first_node, self._first_slot, depth, self._seen.chunk, num_above, num_ranked,
            num_ranked_nodes, kept, num_next, self._num_levels, NODES_PAD=_padded(num_ranked_nodes, USUAL_NODES),
            KEPT_PAD=_padded(kept, USUAL_KEPT), NEXT_PAD=_padded(num_next, USUAL_ROWS), PATH=self._path, NAMED=self._names is not None, PICKED=columns is not None, SHAPED=expanded is not None,
            IS_FIRST=depth == 0, num_warps=4,
        )  # fmt: skip
        self._num_rows, self._depth = num_next, depth + 1
        self._first_node, self._first_slot = self._first_node + (kept or num_ranked_nodes), self._first_slot + num_next
        if num_next:
            rows = Rows(
                self._rows, spans, self._keys, self._values, self._keys.stride(0), self._paths, self._depth, num_above
            )
            cos, sin = self._rotations
            self._states, self._normed = self._layer(rows, self._states, (cos[depth], sin[depth]), self._seen)

    def _rank(self, count: int) -> torch.Tensor:
        """Return i32[b * rows, count, 2]: columns and bits of log-probabilities."""
        inverse, keys = self._noise
        logits = self._network.lm_head(self._normed)
        return ranked_in_tiles(logits, RowNoise(inverse, keys[:, self._depth :]), count, self._names)


def _or(values: torch.Tensor | None, absent: torch.Tensor) -> torch.Tensor:
    return absent if values is None else values


def _padded(count: int, usual: int) -> int:
    """Return a power of two that is at least so many, and at least the usual; 0 for none."""
    return max(int(triton.next_power_of_2(count)), usual) if count else 0
