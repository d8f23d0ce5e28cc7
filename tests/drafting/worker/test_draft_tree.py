"""The columns of a session's drafted tree, beside the same tree as a table of paths."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from specq.drafting import Children
from specq.drafting.worker.draft_nodes import ROOT, DraftTree, NewChain
from specq.protocol.types import DraftDistribution

Path = tuple[int, ...]


def chain(parent: int, sizes: list[int], first_id: int, width: int = 3, *, is_drawn: bool = False) -> NewChain:
    """Return a chain with these numbers of nodes, whose values follow from their ids."""
    levels = []
    for level, size in enumerate(sizes):
        ids = np.arange(size, dtype=np.int32) + first_id + level * width
        drawn = DraftDistribution(ids, np.full(size, 100, np.uint16)) if is_drawn and size else None
        levels.append(Children(ids + 1000, np.log(0.5 + 0.001 * ids, dtype=np.float32), drawn))
    token_ids = [token for one in levels for token in one.token_ids.tolist()]
    predicted = [score for one in levels for score in one.scores.tolist()]
    child_ids = range(first_id, first_id + len(sizes) * width)
    return NewChain(parent, levels, child_ids, width, token_ids, predicted, [0.5] * len(token_ids), predicted)


def by_path(tree: DraftTree) -> dict[Path, tuple[Any, ...]]:
    """Return what a tree says of each node, by the tokens that lead to it, in the order of its columns."""
    found: dict[Path, tuple[Any, ...]] = {}
    paths: dict[int, Path] = {ROOT: ()}
    for node in range(1, len(tree) + 1):
        paths[node] = (*paths[tree.parents[node]], tree.token_ids[node])
        assert (len(paths[node]), len(tree.path(node))) == (tree.depth(node),) * 2
        assert tree.below(tree.parents[node])[tree.rank(node)] == node
        drawn = tree.drawn_from.get(node)
        found[paths[node]] = (
            *(tree.node_ids[node], tree.predicted[node], tree.scores[node], tree.log_reach_probs[node]),
            *(tree.wire_ids[node], node in tree.children, None if drawn is None else drawn.ids.tolist()),
        )
    return found


def grown(seed: int) -> DraftTree:
    """Return a tree of up to eight random chains."""
    draws, tree = random.Random(seed), DraftTree()
    for turn in range(draws.randint(1, 8)):
        places = [node for node in range(len(tree) + 1) if node not in tree.children]
        if places:
            sizes = [draws.randint(1, 3) for _ in range(draws.randint(1, 3))]
            sizes[-1] = draws.choice([0, sizes[-1]])
            tree.add(chain(draws.choice(places), sizes, 100 * turn, is_drawn=draws.random() < 0.5), 1000)
    tree.wire_ids[1:] = range(len(tree))
    return tree


@pytest.mark.parametrize("seed", range(30))
def test_what_is_below_the_new_context_stays_as_it_is(seed: int) -> None:
    """Its nodes keep their values and their order, and all others are gone, for any node that becomes the context."""
    for node in range(1, len(grown(seed)) + 1):
        tree = grown(seed)
        before, token, path = by_path(tree), tree.token_ids[node], tree.path(node)
        (own,) = [one for one in before if len(one) == len(path) and one[-1] == token]
        expected = {one[len(own) :]: values for one, values in before.items() if one[: len(own)] == own and one != own}
        reach, is_expanded = tree.log_reach_probs[node], node in tree.children
        tree.move_root(node)
        assert list(by_path(tree).items()) == list(expected.items())
        assert (tree.log_reach_probs[ROOT], ROOT in tree.children) == (reach, is_expanded)
        assert (tree.node_ids[ROOT], tree.wire_ids[ROOT], tree.parents[ROOT]) == (-1, -1, ROOT)


@pytest.mark.parametrize(("room", "num_expanded"), [(1, 1), (3, 1), (4, 2), (6, 2), (7, 3), (9, 3)])
def test_a_chain_is_cut_to_the_room_there_is(room: int, num_expanded: int) -> None:
    """The first nodes stay, level by level. Below the last level with a node nothing counts as expanded."""
    whole, cut = DraftTree(), DraftTree()
    whole.add(chain(ROOT, [3, 3, 3], 0), 9)
    cut.add(chain(ROOT, [3, 3, 3], 0), room)
    assert (len(cut), len(cut.children)) == (room, num_expanded)
    assert cut.node_ids == whole.node_ids[: room + 1]
    assert cut.log_reach_probs == whole.log_reach_probs[: room + 1]


def test_a_level_without_nodes_expands_its_node() -> None:
    """The drafter was asked, and has nothing to say."""
    tree = DraftTree()
    tree.add(chain(ROOT, [1, 0], 0), 9)
    assert (len(tree), list(tree.children), tree.by_level()) == (1, [ROOT, 1], [ROOT, 1])
