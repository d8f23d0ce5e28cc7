"""Whole trees of an EAGLE-3 head on its device, of which the host says where they begin and with which noise: by kernels of our own where the device has
them (`specq.engines.torch.fused_eagle`), else in torch (`eagle_rows`)."""

from __future__ import annotations

import torch

from specq.engines.torch import EagleHead, RowNoise, TreeContexts, fused_trees, rank_rows
from specq.proposers.eagle_levels import Level
from specq.proposers.eagle_rows import Rank, Roots, grow
from specq.proposers.state_cache import StateCache


class Growth:
    """Grows trees below texts of one cache."""

    def __init__(self, head: EagleHead, cache: StateCache) -> None:
        self._head, self._cache = head, cache
        self._fused = fused_trees(head.network)
        device, names = head.network.fc.weight.device, head.token_ids
        self._names = None if names is None else torch.from_numpy(names).to(device)

    def __call__(self, roots: torch.Tensor, noise: RowNoise, room: int, levels: list[Level]) -> torch.Tensor:
        """Return nodes as of `eagle_rows.grow`. roots i32[3, b]: places, lengths of `room` at most, and ends; noise: with keys i32[b, levels, 2]."""
        if self._fused is None or max(level.num_ranked for level in levels) > self._fused.MOST_RANKED:
            return self._plainly(roots, noise, room, levels)
        num_next = [*(level.num_rows for level in levels[1:]), 0]
        contexts = TreeContexts(self._cache.rows, roots, room, self._cache.lasts(roots[0]), noise)
        num_nodes = sum(len(level.behind) for level in levels)
        trees = self._fused(self._head.network, self._names, contexts, (len(levels), num_nodes, sum(num_next)))
        for level, num_rows in zip(levels, num_next, strict=True):
            trees.descend(level.num_ranked, level.columns, level.behind, level.expanded, num_rows)
        return trees.nodes

    def _plainly(self, roots: torch.Tensor, noise: RowNoise, room: int, levels: list[Level]) -> torch.Tensor:
        places, lengths, ends = roots.long().unbind(0)
        return grow(
            self._head, self._cache, Roots(places, lengths, ends, room), levels, self._rank(noise, len(places)), None
        )

    def _rank(self, noise: RowNoise, num_trees: int) -> Rank:
        inverse, keys = noise

        def rank(logits: torch.Tensor, depth: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            num_rows = logits.shape[1]
            of_rows = RowNoise(
                inverse[:, None].expand(-1, num_rows).reshape(-1),
                keys[:, depth, None].expand(-1, num_rows, -1).reshape(-1, 2),
            )
            tokens, scores = rank_rows(logits.flatten(0, 1), of_rows, count, self._names)
            return tokens.view(num_trees, num_rows, count), scores.view(num_trees, num_rows, count)

        return rank
