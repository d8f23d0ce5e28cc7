"""Trees of a head that grow best first, or in a given shape, beside all trees that there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specq.drafting.eagle3.levels import BEAM, WIDTH
from specq.drafting.rank_trees import likeliest, tree_for
from specq.drafting.trees.interface import Grown
from specq.drafting.trees.ranked import Ranked
from specq.protocol import (
    Speculation,
)
from specq.testing.growth import grow_best_first, grow_shape

# --- trees
# ----------------------------------------------------------------------------------------------------------------


class Chances:
    """A head whose children have random chances, by the node's path."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.paths: list[list[tuple[int, ...]]] = [[(seed,)] for seed in seeds]
        self.num_levels = 0

    def ranked(self, count: int) -> Ranked:
        self.num_levels += 1
        scores = [[children(path)[:count] for path in of_context] for of_context in self.paths]
        found = np.array(scores, np.float32)
        return Ranked(np.broadcast_to(np.arange(count, dtype=np.int32), found.shape), found)

    def expand(self, parents: Any, token_ids: Any) -> None:
        self.paths = [
            [(*paths[parent], token) for parent, token in zip(behind, tokens, strict=True)]
            for paths, behind, tokens in zip(self.paths, parents.tolist(), token_ids.tolist(), strict=True)
        ]


def children(path: tuple[int, ...]) -> Any:
    chances = np.random.default_rng(list(path)).dirichlet(np.full(WIDTH, 0.5))
    return np.log(np.sort(chances)[::-1])


def reach_of(path: tuple[int, ...]) -> float:
    """The log-probability of a path, its first item the context's seed."""
    return float(sum(children(path[:i])[path[i]] for i in range(1, len(path))))


def found_paths(grown: Grown, wanted: Any, seeds: Sequence[int]) -> list[set[tuple[int, ...]]]:
    """The paths of the wanted nodes of each tree, those above each among them; reach and scores as the chances are."""
    found = []
    for i, seed in enumerate(seeds):
        paths: list[tuple[int, ...]] = []
        for node in range(grown.token_ids.shape[1]):
            parent = int(grown.parents[i, node])
            assert parent < node
            paths.append((*(paths[parent] if parent >= 0 else (seed,)), int(grown.token_ids[i, node])))
            assert grown.reach[i, node] == pytest.approx(reach_of(paths[-1]), abs=1e-4)
            assert grown.scores[i, node] == pytest.approx(children(paths[-1][:-1])[paths[-1][-1]], abs=1e-4)
        own = {path for path, is_wanted in zip(paths, wanted[i], strict=True) if is_wanted}
        assert all(path[:-1] in own for path in own if len(path) > 2)
        found.append(own)
    return found


def plainly_best(seed: int, depth: int, most: int, floor: float) -> set[tuple[int, ...]]:
    """EAGLE-2's tree by sorting lists of paths."""
    level, every = [(seed,)], list[tuple[int, ...]]()
    for _ in range(depth):
        below = [(*path, token) for path in level for token in range(WIDTH)]
        every += below
        level = sorted(below, key=lambda path: -reach_of(path))[:BEAM]
        if reach_of(level[0]) < floor:
            break
    return {path for path in sorted(every, key=lambda path: -reach_of(path))[:most] if reach_of(path) >= floor}


@pytest.mark.parametrize("most", [1, 7, 30, 1000])
def test_the_likeliest_nodes_are_grown(most: int) -> None:
    """Against the plain way, several trees at once."""
    seeds, floor = [1, 2, 3, 4], float(np.log(0.02))
    grown = grow_best_first(Chances(seeds), len(seeds), 4, floor)
    wanted = likeliest(grown.reach, most, floor)
    assert found_paths(grown, wanted, seeds) == [plainly_best(seed, 4, most, floor) for seed in seeds]


def test_levels_below_the_floor_are_not_computed() -> None:
    """Where all that was found is less likely than the floor."""
    chances = Chances([1])
    floor = float(np.log(0.3))
    grow_best_first(chances, 1, 8, floor)
    assert chances.num_levels < 8
    every = Chances([1])
    grow_best_first(every, 1, 8)
    assert every.num_levels == 8


def test_a_shape_is_grown_as_it_is() -> None:
    """Each node with its own path's chances; of too many the likeliest."""
    tree = tree_for(Speculation(tree=((0, 0, 0), (0, 2), (1, 1, 0), (3,))), 8)
    wanted_paths = {(0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (0, 0, 0), (1, 1, 0)}
    seeds = [5, 6]
    chances = Chances(seeds)
    grown = grow_shape(chances, 2, tree)
    wanted = likeliest(grown.reach, 99, -np.inf)
    assert found_paths(grown, wanted, seeds) == [{(seed, *path) for path in wanted_paths} for seed in seeds]
    assert chances.num_levels == 3
    wanted = likeliest(grown.reach, 4, -np.inf)
    for seed, found in zip(seeds, found_paths(grown, wanted, seeds), strict=True):
        best = sorted(((seed, *path) for path in wanted_paths), key=lambda path: -reach_of(path))[:4]
        assert found == set(best)
