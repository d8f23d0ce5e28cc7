"""Triton kernels that choose the nodes of trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


@triton.jit
def likeliest(reach, inside, COUNT_PAD: tl.constexpr, NODES_PAD: tl.constexpr):
    """Return i32[COUNT_PAD]: the indices of the largest of reach [NODES_PAD], largest first; 0 when none is left.

    Of equal values the earlier comes first. NaN values and values outside `inside` are chosen last.
    """
    index = tl.arange(0, NODES_PAD)
    reach = tl.where(inside & (reach == reach), reach, float("-inf"))
    is_before = (reach[None, :] == reach[:, None]) & (index[None, :] < index[:, None])
    order = tl.sum(((reach[None, :] > reach[:, None]) | is_before).to(tl.int32), 1)
    place = tl.arange(0, COUNT_PAD)
    return tl.sum(tl.where(order[:, None] == place[None, :], index[:, None], 0), 0)


@triton.jit
def _picked(values, chosen, COUNT: tl.constexpr):
    """Return values [COUNT] at the indices `chosen` [n]."""
    index = tl.arange(0, COUNT)
    return tl.sum(tl.where(index[:, None] == chosen[None, :], values[:, None], 0.0), 0)


@triton.jit(do_not_specialize=["num_places", "count", "num_nodes", "num_levels"])
def grow_ranked_kernel(
    tokens_ptr, scores_ptr, sizes_ptr, nodes_ptr, num_places, count, num_nodes, num_levels,
    SIZE: tl.constexpr, COUNT: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Program tree: the likeliest nodes of each level.

    tokens, scores   i32 and f32[trees, num_places, count]: of each place, likeliest first.
    sizes            i32[num_levels]: nodes of each level, at most SIZE.
    nodes            i32[4 + num_levels, trees, num_nodes]: see `specq.drafting.trees.device_trees`.
    """
    tree, trees = tl.program_id(0), tl.num_programs(0)
    index, place, level = tl.arange(0, SIZE * COUNT), tl.arange(0, SIZE), tl.arange(0, LEVELS)
    behind_all, rank_all = index // COUNT, index % COUNT
    reach = tl.zeros((SIZE,), tl.float32)
    lines = tl.zeros((LEVELS, SIZE), tl.int32)
    num_above, first_above, first = 1, -1, 0
    for depth in range(num_levels):
        size = tl.load(sizes_ptr + depth)
        own = (tree * num_places + depth) * count
        inside = (behind_all < num_above) & (rank_all < count)
        all_scores = tl.load(scores_ptr + own + rank_all, mask=inside, other=float("-inf"))
        chosen = likeliest(_picked(reach, behind_all, SIZE) + all_scores, inside, SIZE, SIZE * COUNT)
        behind, is_node = chosen // COUNT, place < size
        token = tl.load(tokens_ptr + own + chosen % COUNT, mask=is_node, other=0)
        score = tl.load(scores_ptr + own + chosen % COUNT, mask=is_node, other=0.0)
        reach = _picked(reach, behind, SIZE) + score
        is_same = place[:, None] == behind[None, :]
        lines = tl.sum(tl.where(is_same[None, :, :], lines[:, :, None], 0), 1)
        lines = tl.where(level[:, None] < depth, lines, (first + place)[None, :])
        to = nodes_ptr + tree * num_nodes + first + place
        plane = trees * num_nodes
        tl.store(to, token, mask=is_node)
        tl.store(to + plane, first_above + behind, mask=is_node)
        tl.store(to + 2 * plane, score.to(tl.int32, bitcast=True), mask=is_node)
        tl.store(to + 3 * plane, reach.to(tl.int32, bitcast=True), mask=is_node)
        of_line = (to + 4 * plane)[None, :] + level[:, None] * plane
        tl.store(of_line, lines, mask=is_node[None, :] & (level < num_levels)[:, None])
        num_above, first_above, first = size, first, first + size


def grow_ranked(
    token_ids: torch.Tensor, scores: torch.Tensor, sizes: Sequence[int], there: torch.Tensor
) -> torch.Tensor:
    """Return the nodes of each context; see `specq.drafting.trees.device_trees.likeliest_on_device`."""
    num_trees, num_places, count = token_ids.shape
    nodes = token_ids.new_empty(4 + len(sizes), num_trees, sum(sizes))
    grow_ranked_kernel[(num_trees,)](
        token_ids.contiguous(), scores.contiguous(), there, nodes, num_places, count, nodes.shape[2], len(sizes),
        SIZE=max(int(triton.next_power_of_2(max(sizes))), 8), COUNT=max(int(triton.next_power_of_2(count)), 16),
        LEVELS=max(int(triton.next_power_of_2(len(sizes))), 8), num_warps=4,
    )  # fmt: skip
    return nodes
