"""Rows of an EAGLE-3 head on a GPU by kernels of our own: of texts, and of trees that grow below these (`fused_trees`).

Only what imports this needs Triton; `loading.eagle_kernels` says where it runs.
"""

from __future__ import annotations

import torch

from specq.drafting.eagle3.fused_layer import FusedLayer, Rows
from specq.drafting.eagle3.fused_trees import FusedTrees
from specq.drafting.eagle3.gpu_kernels import text_rows_kernel
from specq.drafting.eagle3.network import EagleNetwork, TreeContexts
from specq.engines.torch.top import FEW

TEXT_INTS, POSITIONS = 6, 5  # of a row, see `gpu_kernels`


class FusedEagle:
    """A head. `most_ranked`: tokens behind a row of a tree."""

    most_ranked = FEW

    def __init__(self, network: EagleNetwork, names: torch.Tensor | None) -> None:
        """`names` i32[columns]: the token of each column of the logits, where that is not its number."""
        self._network, self._names, self._layer = network, names, FusedLayer(network)

    def texts(
        self, kept: torch.Tensor, most: int, states: torch.Tensor, given: torch.Tensor, texts: torch.Tensor
    ) -> torch.Tensor:
        """Compute rows of texts, as many of each, and keep their keys and values; return what the last of each gave, f32[texts, hidden].

        kept    [2, places, kv_heads, room, dim]: keys and values of all texts, by place; most: rows of each that are read, the new ones too
        given   i32[2, rows]: which of states [*, hidden] stands before each row's token, and the token; one text's after the other's
        texts   i32[5, texts]: places, first positions, lengths so far, how many rows are computed, and where they begin in `given`
        """
        num_texts, num_rows = texts.shape[1], given.shape[1]
        _, _, heads, room, dim = kept.shape
        ints, spans = texts.new_empty(TEXT_INTS, num_rows), texts.new_empty(num_rows, 3)
        contexts, lasts = texts.new_empty(2, num_texts), texts.new_empty(num_texts)
        seen = self._layer.seen(kept, contexts, most, num_rows // num_texts)
        text_rows_kernel[(num_texts,)](
            given, texts, ints, spans, contexts, lasts, self._network.num_tokens, heads * room, seen.chunk,
            ROWS=num_rows // num_texts, num_warps=1,
        )  # fmt: skip
        cos, sin = self._network.rotations(ints[POSITIONS], torch.float32)
        x, _ = self._layer(Rows(ints, spans, kept[0], kept[1], room * dim, None, 0, 0), states, (cos, sin), seen)
        return x.index_select(0, lasts)

    def trees(self, contexts: TreeContexts, num_nodes: int, num_rows: list[int], *, has_lines: bool) -> FusedTrees:
        """Begin trees; see `FusedTrees`."""
        return FusedTrees(self._layer, self._names, contexts, num_nodes, num_rows, has_lines=has_lines)
