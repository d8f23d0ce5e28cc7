"""The levels of a tree before it is grown.

Best-first trees follow EAGLE-2 (Li et al. 2024, arXiv 2406.16858): at each level the BEAM nodes with the highest
cumulative probability are expanded, with WIDTH children each. Of a level with a given size, the likeliest nodes are
kept, and the first BEAM of them expanded.

Each level has the number of ranked tokens, and the indices of tokens that become nodes and rows: arrays, or tensors of
torch (`on_device`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specq.drafting.rank_trees import RankTree
from specq.protocol import IntpArray

WIDTH = 8  # children of an expanded node
BEAM = 4  # nodes of a tree that are expanded at a level


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
    columns: Any
    behind: Any
    expanded: Any
    num_kept: int | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.behind) if self.num_kept is None else self.num_kept


def best_first(depth: int, num_columns: int) -> list[Level]:
    """Return `depth` levels of a tree that grows best first, where `num_columns` tokens can be ranked."""
    count, num_rows, levels = min(WIDTH, num_columns), 1, list[Level]()
    for _ in range(depth):
        behind = np.arange(num_rows).repeat(count)
        levels.append(Level(count, num_rows, None, behind, None))
        num_rows = min(BEAM, num_rows * count)
    return levels


def of_sizes(level_sizes: Sequence[int], num_columns: int) -> list[Level]:
    """Return the levels of a tree that grows best first, with at most that many nodes."""
    count, num_rows, levels = min(WIDTH, num_columns), 1, list[Level]()
    for size in level_sizes:
        behind = np.arange(num_rows).repeat(count)
        num_kept = min(size, len(behind))
        levels.append(Level(count, num_rows, None, behind, None, num_kept))
        num_rows = min(BEAM, num_kept)
    return levels


def of_ranks(tree: RankTree, num_columns: int) -> list[Level]:
    """Return the levels of a shape, without nodes of missing ranks and their descendants."""
    levels = list[Level]()
    expanded: IntpArray = np.array([-1], np.intp)  # the tree's nodes that are a level's rows; -1: the context
    for depth in range(int(tree.depths.max(initial=-1)) + 1):
        own = np.flatnonzero((tree.depths == depth) & (tree.ranks < num_columns) & np.isin(tree.parents, expanded))
        behind = np.array([expanded.tolist().index(parent) for parent in tree.parents[own].tolist()], np.intp)
        count = int(tree.ranks[own].max()) + 1
        chosen = np.flatnonzero(np.isin(own, tree.parents[(tree.depths == depth + 1) & (tree.ranks < num_columns)]))
        levels.append(Level(count, len(expanded), behind * count + tree.ranks[own], behind, chosen))
        expanded = own[chosen]
        if not len(chosen):
            break
    return levels


def levels_of(depth: int, ranks: RankTree | None, level_sizes: Sequence[int], num_columns: int) -> list[Level]:
    """Return the levels of the tree that a `TreeRequest` asks for, where `num_columns` tokens can be ranked."""
    if level_sizes:
        return of_sizes(level_sizes, num_columns)
    return best_first(depth, num_columns) if ranks is None else of_ranks(ranks, num_columns)


def on_device(levels: Sequence[Level], device: Any) -> list[Level]:
    """Return levels with their indices on a device of torch."""
    import torch

    def there(indices: Any) -> Any:
        return None if indices is None else torch.from_numpy(indices).to(device)

    return [
        level._replace(columns=there(level.columns), behind=there(level.behind), expanded=there(level.expanded))
        for level in levels
    ]


def depths_of(levels: list[Level]) -> IntpArray:
    """Return the level of each node, i64[n]."""
    found: IntpArray = np.arange(len(levels)).repeat([level.num_nodes for level in levels])
    return found
