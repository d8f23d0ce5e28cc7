"""Trees from predictions of each position: the likeliest prefixes, or a shape."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from specq.drafting.rank_trees import likeliest, tree_for
from specq.drafting.trees.interface import Grown, TreeRequest
from specq.drafting.trees.ranked import Ranked, grow_ranked
from specq.protocol import SamplingParams, Speculation

TREES, PLACES, COUNT = 3, 4, 5


def ranked(seed: int = 0) -> Ranked:
    """Return random predictions, likeliest first."""
    random = np.random.default_rng(seed)
    scores = np.log(np.sort(random.dirichlet([0.4] * COUNT, (TREES, PLACES)), -1)[..., ::-1]).astype(np.float32)
    return Ranked(random.permutation(TREES * PLACES * COUNT).reshape(scores.shape).astype(np.int32), scores)


def asked(most: int, depth: int = PLACES, **others: object) -> TreeRequest:
    return TreeRequest(range(TREES), [SamplingParams()] * TREES, depth, None, -np.inf, most=most)._replace(**others)


def paths_of(grown: Grown, tree: int, wanted: np.ndarray | None = None) -> dict[tuple[int, ...], float]:
    """Return the tokens that lead to each wanted node of a tree, and its reach."""
    paths, found = list[tuple[int, ...]](), {}
    for i, (token, parent) in enumerate(zip(grown.token_ids[tree].tolist(), grown.parents[tree].tolist(), strict=True)):
        assert parent < i
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert len(paths[-1]) == grown.depths[i] + 1
        if wanted is None or wanted[tree, i]:
            found[paths[-1]] = float(grown.reach[tree, i])
    return found


def all_paths(predictions: Ranked, tree: int, depth: int = PLACES) -> dict[tuple[int, ...], float]:
    """Return every prefix of tokens, and the sum of its scores."""
    tokens, scores = predictions.token_ids[tree].tolist(), predictions.scores[tree].tolist()
    return {
        tuple(tokens[place][rank] for place, rank in enumerate(ranks)): sum(
            scores[place][rank] for place, rank in enumerate(ranks)
        )
        for length in range(1, depth + 1)
        for ranks in product(range(COUNT), repeat=length)
    }


@pytest.mark.parametrize("most", [1, 3, 16, 60])
@pytest.mark.parametrize("depth", [1, PLACES])
def test_the_likeliest_nodes_are_those_of_all_prefixes(most: int, depth: int) -> None:
    """No other prefix has a higher product of probabilities."""
    predictions = ranked(most)
    grown = grow_ranked(predictions, asked(most, depth))
    wanted = likeliest(grown.reach, most, -np.inf)
    for tree in range(TREES):
        every = all_paths(predictions, tree, depth)
        best = sorted(every, key=lambda path: -every[path])[:most]
        found = paths_of(grown, tree, wanted)
        assert set(found) == set(best)
        assert list(found.values()) == pytest.approx([every[path] for path in found], rel=1e-5)


def test_levels_have_the_sizes_that_are_asked_for() -> None:
    """Each has its likeliest nodes, likeliest first, below nodes of the level above."""
    predictions = ranked()
    grown = grow_ranked(predictions, asked(0, depth=1, level_sizes=(2, 4, 1)))  # whatever the depth
    assert grown.depths.tolist() == [0, 0, 1, 1, 1, 1, 2]
    for tree in range(TREES):
        every, found = all_paths(predictions, tree), paths_of(grown, tree)
        assert [*found][:2] == [(token,) for token in predictions.token_ids[tree, 0, :2].tolist()]
        second = sorted((p for p in every if len(p) == 2 and p[:1] in found), key=lambda path: -every[path])
        assert [*found][2:6] == second[:4]


def test_a_shape_has_its_ranks() -> None:
    """A rank that is not there has no node."""
    predictions, shape = ranked(), ((0, 1, 0), (2,), (COUNT,))
    grown = grow_ranked(predictions, asked(0, ranks=tree_for(Speculation(tree=shape), PLACES)))
    every, first, second, third = all_paths(predictions, 1), *predictions.token_ids[1, :3].tolist()
    expected = {(token,) for token in first[:3]} | {(first[0], second[1]), (first[0], second[1], third[0])}
    found = {path: reach for path, reach in paths_of(grown, 1).items() if np.isfinite(reach)}
    assert found.keys() >= expected
    assert found == pytest.approx({path: every[path] for path in found}, rel=1e-5)
    assert {len(path) for path in found} == {1, 2, 3}
