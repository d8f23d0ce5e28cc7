"""Rows of an EAGLE-3 head on a GPU by our own kernels: of texts, and of trees below them (`FusedEagle`).

Only modules that import this one need Triton. `loading.eagle_kernels` decides where it runs. The layer consists of
kernels around the vendor's matrix products. It needs 11 launches instead of about 55 in plain torch. The arithmetic is
that of `EagleNetwork` except for rounding. The residual stream and the rotations are in float32.

Rows of texts keep their keys and values together with those of their context. Rows of trees keep them apart, in memory
that is freed with the trees (`FusedTrees`). Contexts are read in place. This module never waits for the device, so all
of it may be recorded.
"""

from __future__ import annotations

import torch
import triton

from specq.drafting.eagle3.gpu_kernels import descend_kernel, enter_kernel, text_rows_kernel
from specq.drafting.eagle3.network import EagleNetwork, TreeContexts
from specq.drafting.head_layers import Rotations
from specq.drafting.trees.fused_layers import LayerKernels, Rows, Seen
from specq.engines.torch import RowNoise
from specq.engines.torch.cuda.top import ranked_in_tiles
from specq.engines.torch.top import FEW


class FusedLayer(LayerKernels):
    """A head's layer."""

    def __init__(self, network: EagleNetwork) -> None:
        super().__init__(network.shape)
        self.network = network

    def __call__(
        self, rows: Rows, states: torch.Tensor, rotations: Rotations, seen: Seen
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute rows and keep their keys and values; return their output f32[n, hidden] and its norm.

        states     [*, hidden]: of the rows above.
        rotations  cosines and sines, f32[*, dim / 2].
        """
        both, x = self._enter(rows, states, seen.roots.shape[1])
        return x, self.compute(self.network.midlayer, rows, both, x, rotations, seen, self.network.norm.weight)

    def _enter(self, rows: Rows, states: torch.Tensor, num_contexts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows' input [n, 2 * hidden], and the residual stream f32[n, hidden]."""
        hidden, num_rows, layer = self.shape.hidden_size, rows.ints.shape[1], self.network.midlayer
        is_kept = self.network.shape.norm_before_residual
        both = rows.keys.new_empty(num_rows, 2 * hidden)
        x = both.new_empty(num_rows, hidden, dtype=torch.float32)
        enter_kernel[(num_rows, 2)](
            rows.ints, self.network.get_buffer("embedding"), states, layer.input_layernorm.weight,
            layer.hidden_norm.weight, both, x, self.shape.rms_norm_eps, num_rows // num_contexts, rows.above,
            HIDDEN=hidden, HIDDEN_PAD=triton.next_power_of_2(hidden), IS_NORMED_KEPT=is_kept,
            num_warps=8,
        )  # fmt: skip
        return both, x


TREE_INTS = 7  # integers of a row, see `gpu_kernels`

# Minimum room of every tree, so that the same few kernels grow most trees: levels, and for a level the ranked nodes,
# the kept nodes, and the rows below.
USUAL_LEVELS, USUAL_NODES, USUAL_KEPT, USUAL_ROWS = 8, 32, 8, 4


class FusedTrees:
    """Trees that grow below contexts.

    nodes   i32[4, b, n]: tokens, parents, bits of log-probabilities and of cumulative ones. With lines it is
            i32[4 + levels, b, n], as in `specq.drafting.trees.interface.DeviceNodes`.
    """

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
        """Begin trees below contexts.

        names      i32[columns]: the token of each column of the logits. None: the column number.
        num_nodes  nodes of a tree.
        num_rows   rows of a tree, below each of its levels. 0 below the last.
        """
        self._layer, self._network, self._names, self._noise = layer, layer.network, names, contexts.noise
        self._num_trees, self._num_slots = contexts.roots.shape[1], sum(num_rows)
        kept, shape = contexts.kept, layer.shape
        self._seen = layer.seen(kept, contexts.roots, contexts.most, max(*num_rows, 1))
        num_slots = self._num_trees * self._num_slots
        self._keys, self._values = kept.new_empty(2, shape.num_key_value_heads, num_slots, shape.head_dim)
        self._num_levels = len(num_rows)
        num_planes = 4 + (self._num_levels if has_lines else 0)
        self.nodes = contexts.roots.new_empty(num_planes, self._num_trees, num_nodes)
        before = torch.arange(-1, len(num_rows) - 1, device=kept.device)  # a row stands at the state before it
        self._rotations = self._network.rotations(contexts.roots[2] + before[:, None], torch.float32)
        self._states, self._normed = contexts.states, self._network.norm(contexts.states)
        self._rows = self._paths = self.nodes  # none before the first
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
        """Rank tokens behind the rows, keep the nodes of a level, and compute the rows below it, `num_next` a tree.

        The other arguments are as in `specq.drafting.eagle3.levels.Level`. Behind the last level there are no rows.
        """
        ranked = self._rank(num_ranked)
        above, paths, num_above, depth = self._rows, self._paths, self._num_rows, self._depth
        num_rows, num_ranked_nodes, absent, kept = self._num_trees * num_next, len(behind), self.nodes, num_kept or 0
        sizes = (TREE_INTS, num_rows), (num_rows, self._path), (num_rows, 2)
        self._rows, self._paths, spans = (above.new_empty(*size) for size in sizes)
        descend_kernel[(self._num_trees,)](
            ranked, _or(self._names, absent), _or(columns, absent), behind, _or(expanded, absent), self._seen.roots,
            above, paths, self.nodes, self._rows, self._paths, spans,
            0 if self._names is None else len(self._names), self._network.num_tokens, self.nodes.shape[2],
            self._num_slots, self._first_node, self._first_slot, depth, self._seen.chunk, num_above, num_ranked,
            num_ranked_nodes, kept, num_next, self._num_levels, 1 + self._seen.num_parts,
            NODES_PAD=_padded(num_ranked_nodes, USUAL_NODES), KEPT_PAD=_padded(kept, USUAL_KEPT),
            NEXT_PAD=_padded(num_next, USUAL_ROWS), PATH=self._path, NAMED=self._names is not None,
            PICKED=columns is not None, SHAPED=expanded is not None, IS_FIRST=depth == 0, num_warps=4,
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
    """Return a power of two that is at least `count` and at least `usual`; 0 if `count` is 0."""
    return max(int(triton.next_power_of_2(count)), usual) if count else 0


TEXT_INTS, POSITIONS = 6, 5  # of a row, see `gpu_kernels`


class FusedEagle:
    """A head. `most_ranked`: tokens behind a row of a tree."""

    most_ranked = FEW

    def __init__(self, network: EagleNetwork, names: torch.Tensor | None) -> None:
        """Set the network and its `names`, i32[columns]: the token of each column; None: the column number."""
        self._network, self._names, self._layer = network, names, FusedLayer(network)

    def texts(
        self, kept: torch.Tensor, most: int, states: torch.Tensor, given: torch.Tensor, texts: torch.Tensor
    ) -> torch.Tensor:
        """Compute rows of texts, the same number of each; return each text's last output, f32[texts, hidden].

        This also stores the rows' keys and values.

        kept    [2, places, kv_heads, room, dim]: keys and values of all texts, by place.
        most    maximum rows of each text that are read, including the new ones.
        given   i32[2, rows]: the index in states [*, hidden] of the state before each row's token, and the token. One
                text
                after the other.
        texts   i32[5, texts]: places, first positions, lengths so far, numbers of rows to compute, and their starts in
                `given`.
        """
        num_texts, num_rows = texts.shape[1], given.shape[1]
        _, _, heads, room, dim = kept.shape
        ints, spans = texts.new_empty(TEXT_INTS, num_rows), texts.new_empty(num_rows, 2)
        contexts, lasts = texts.new_empty(2, num_texts), texts.new_empty(num_texts)
        seen = self._layer.seen(kept, contexts, most, num_rows // num_texts)
        text_rows_kernel[(num_texts,)](
            given, texts, ints, spans, contexts, lasts, self._network.num_tokens, heads * room, seen.chunk,
            seen.num_parts, ROWS=num_rows // num_texts, num_warps=1,
        )  # fmt: skip
        cos, sin = self._network.rotations(ints[POSITIONS], torch.float32)
        x, _ = self._layer(Rows(ints, spans, kept[0], kept[1], room * dim, None, 0, 0), states, (cos, sin), seen)
        return x.index_select(0, lasts)

    def trees(self, contexts: TreeContexts, num_nodes: int, num_rows: list[int], *, has_lines: bool) -> FusedTrees:
        """Begin trees; see `FusedTrees`."""
        return FusedTrees(self._layer, self._names, contexts, num_nodes, num_rows, has_lines=has_lines)
