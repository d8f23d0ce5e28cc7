"""The levels of a tree before it is grown.

Each level has the number of ranked tokens, and the indices on the device of tokens that become nodes and rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from specq.drafting.eagle3.interface import BEAM, WIDTH
from specq.drafting.rank_trees import RankTree
from specq.protocol import IntpArray


class Level(NamedTuple):
    """A level.

    num_ranked  how many tokens are ranked behind each row.
    num_rows  rows of the level. Its nodes stand behind them.
    columns   i64[n]: which of all ranked tokens, [rows * num_ranked], are nodes. None: all.
    behind    i64[n]: the row before each node.
    expanded  i64[rows]: the nodes that are the rows of the next level. None: the likeliest.
    num_kept  how many nodes, the likeliest, are kept. None: all.
    """

    num_ranked: int
    num_rows: int
    columns: torch.Tensor | None
    behind: torch.Tensor
    expanded: torch.Tensor | None
    num_kept: int | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.behind) if self.num_kept is None else self.num_kept


def best_first(depth: int, num_columns: int, device: torch.device) -> list[Level]:
    """Return `depth` levels of a tree that grows best first, where `num_columns` tokens can be ranked."""
    count, num_rows, levels = min(WIDTH, num_columns), 1, list[Level]()
    for _ in range(depth):
        behind = torch.arange(num_rows, device=device).repeat_interleave(count)
        levels.append(Level(count, num_rows, None, behind, None))
        num_rows = min(BEAM, num_rows * count)
    return levels


def of_sizes(level_sizes: Sequence[int], num_columns: int, device: torch.device) -> list[Level]:
    """Return the levels of a tree that grows best first, with at most that many nodes."""
    count, num_rows, levels = min(WIDTH, num_columns), 1, list[Level]()
    for size in level_sizes:
        behind = torch.arange(num_rows, device=device).repeat_interleave(count)
        num_kept = min(size, len(behind))
        levels.append(Level(count, num_rows, None, behind, None, num_kept))
        num_rows = min(BEAM, num_kept)
    return levels


def of_ranks(tree: RankTree, num_columns: int, device: torch.device) -> list[Level]:
    """Return the levels of a shape, without nodes of missing ranks and their descendants."""
    levels = list[Level]()
    expanded: IntpArray = np.array([-1], np.intp)  # the tree's nodes that are a level's rows; -1: the context
    for depth in range(int(tree.depths.max(initial=-1)) + 1):
        own = np.flatnonzero((tree.depths == depth) & (tree.ranks < num_columns) & np.isin(tree.parents, expanded))
        behind = np.array([expanded.tolist().index(parent) for parent in tree.parents[own].tolist()], np.intp)
        count = int(tree.ranks[own].max()) + 1
        chosen = np.flatnonzero(np.isin(own, tree.parents[(tree.depths == depth + 1) & (tree.ranks < num_columns)]))
        columns, rows, kept = (
            torch.from_numpy(index).to(device) for index in (behind * count + tree.ranks[own], behind, chosen)
        )
        levels.append(Level(count, len(expanded), columns, rows, kept))
        expanded = own[chosen]
        if not len(chosen):
            break
    return levels


def depths_of(levels: list[Level]) -> IntpArray:
    """Return the level of each node, i64[n]."""
    found: IntpArray = np.arange(len(levels)).repeat([level.num_nodes for level in levels])
    return found
