"""Passes of an EAGLE-3 head whose arguments are integers from the host. So they may be recorded.

They compute rows of texts, and whole trees. They use our own kernels if the head's device has them
(`specq.drafting.eagle3.fused`), else torch (`rows`).
"""

from __future__ import annotations

import torch

from specq.drafting.eagle3.levels import Level
from specq.drafting.eagle3.loading import EagleHead, eagle_kernels
from specq.drafting.eagle3.network import TreeContexts
from specq.drafting.eagle3.rows import Rank, Roots, TextRows, compute_rows, grow
from specq.drafting.trees.cache import NOBODY, StateCache
from specq.engines.torch import RowNoise, rank_rows


class Passes:
    """Passes of one head over one cache."""

    def __init__(self, head: EagleHead, cache: StateCache) -> None:
        self._head, self._network, self._cache = head, head.network, cache
        self._kernels, self._names = eagle_kernels(head), head.names

    @property
    def has_kernels(self) -> bool:
        return self._kernels is not None

    def use_torch(self) -> None:
        """Stop using our own kernels, if they turn out not to run."""
        self._kernels = None

    def follow(self, room: int, taps: torch.Tensor, given: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        """Compute rows of texts, the same number of each. Return the output of each text's last row, [texts, hidden].

        This also stores the rows' keys and values, and the last outputs.

        room   maximum rows of each text, including the new ones.
        taps   [*, width]: the target's hidden states before the rows.
        given  i32[2, rows]: the index in taps of the state before each row's token, and the token. One text after the
               other.
        texts  i32[5, texts]: places, first positions, lengths so far, numbers of rows to compute, and their starts in
               `given`.
        """
        states = self._network.project(taps)
        if self._kernels is None:
            lasts = self._follow_plainly(room, states, given.long(), texts.long())
        else:
            lasts = self._kernels.texts(self._cache.rows, room, states, given, texts).to(states.dtype)
        self._cache.keep_lasts(texts[0].long(), lasts)
        return lasts

    def _follow_plainly(
        self, room: int, states: torch.Tensor, given: torch.Tensor, texts: torch.Tensor
    ) -> torch.Tensor:
        befores, token_ids = given
        places, firsts, lengths, counts, starts = texts[:, :, None].unbind(0)  # [texts, 1] each
        at = torch.arange(given.shape[1] // texts.shape[1], device=given.device)
        is_there = at < counts
        which = torch.where(is_there, starts + at, 0)  # [texts, rows]
        slots = torch.where(is_there, lengths + at, 0)
        rows = TextRows(
            texts[0],
            states[befores[which]],
            # Unknown tokens are clipped.
            token_ids[which].clamp(0, self._network.num_tokens - 1),
            (slots + firsts - 1).clamp(min=0),  # position of the state before its token
            torch.where(is_there, places, NOBODY),
            slots,
            torch.arange(room, device=given.device) <= slots[:, :, None],
        )
        found = compute_rows(self._network, self._cache, rows)
        return found.gather(1, (counts - 1).clamp(min=0)[:, :, None].expand(-1, -1, found.shape[2]))[:, 0]

    def grow(self, roots: torch.Tensor, noise: RowNoise, room: int, levels: list[Level]) -> torch.Tensor:
        """Grow trees; return nodes as `specq.drafting.eagle3.rows.grow` does.

        roots   i32[3, b]: places, lengths of at most `room`, and ends.
        noise   with keys i32[b, levels, 2].
        """
        if self._kernels is None or max(level.num_ranked for level in levels) > self._kernels.most_ranked:
            places, lengths, ends = roots.long().unbind(0)
            rank = self._rank(noise, len(places))
            return grow(self._head, self._cache, Roots(places, lengths, ends, room), levels, rank, None)
        num_next = [*(level.num_rows for level in levels[1:]), 0]
        contexts = TreeContexts(self._cache.rows, roots, room, self._cache.lasts(roots[0]), noise)
        has_lines = levels[0].num_kept is not None
        trees = self._kernels.trees(contexts, sum(level.num_nodes for level in levels), num_next, has_lines=has_lines)
        for level, num_rows in zip(levels, num_next, strict=True):
            trees.descend(level.num_ranked, level.columns, level.behind, level.expanded, level.num_kept, num_rows)
        return trees.nodes

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
