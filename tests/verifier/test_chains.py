"""Engines without tree support: the best chain of a session's tree is verified, and all else stays the same."""

from __future__ import annotations

import numpy as np
import pytest

from specq.testing.toy import ToyEngine, toy_text
from specq.testing.toy_drafters import ToyProposer
from specq.testing.world import World
from specq.verifier.trees import NONE, DraftTrees, reference_choice
from tests.verification.test_draft_distributions import (
    DRAFTS,
    LIMIT,
    PAIR_LIMIT,
    SHAPES,
    DrawingProposer,
    MemorylessEngine,
    chi_squares,
)
from tests.verifier.sessions import Node

PROMPT = [5, 6, 7]
GROUP = 0  # what sampled nodes are drawn from


@pytest.fixture(params=[True, False], ids=["compiled", "reference"])
def trees(request) -> DraftTrees:
    return DraftTrees(is_compiled=request.param)


def make_node(trees: DraftTrees, parent: Node | None, reach_prob: float, group: int = NONE, rank: int = 0) -> Node:
    """A candidate; it is in no session."""
    index = trees.take("nodes")
    trees.parent[index], trees.reach_prob[index] = NONE if parent is None else parent.index, reach_prob
    trees.group[index], trees.rank[index] = group, rank
    return Node(trees, index)


def best_chain(nodes: list[Node], most: int) -> list[Node]:
    """The chain of one session's candidates, between those of two others."""
    if not nodes:
        return []
    trees, indices = nodes[0].trees, [node.index for node in nodes]
    other = make_node(trees, None, 0.5)
    firsts = np.array([0, 1, 1 + len(nodes), 2 + len(nodes)], np.int64)
    firsts, found = trees.operations.best_chains(firsts, np.array([other.index, *indices, other.index], np.int32), most)
    assert found[[0, -1]].tolist() == [other.index] * 2
    assert firsts.tolist() == [0, 1, len(found) - 1, len(found)]
    return [Node(trees, index) for index in found[1:-1].tolist()]


def random_nodes(trees: DraftTrees, rng: np.random.Generator, count: int) -> list[Node]:
    """Candidates in order, each no likelier than its parent: siblings side by side, parents first."""
    parents = [int(rng.integers(i)) if i and rng.random() < 0.8 else -1 for i in range(count)]
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    made: dict[int, Node] = {}
    for i in range(count):
        above = made.get(parents[i])
        made[i] = make_node(trees, above, float(rng.random()) * (above.reach_prob if above else 1.0))
    order: list[int] = [i for i in range(count) if parents[i] < 0]
    for i in order:
        order += [child for child in range(count) if parents[child] == i]
    return [made[i] for i in order]


def paths(nodes: list[Node]) -> list[list[Node]]:
    """All chains from the context down."""
    found: list[list[Node]] = [[]]
    for node in nodes:
        found += [[*path, node] for path in found if (path[-1] if path else None) == node.parent]
    return found


@pytest.mark.parametrize("most", [1, 2, 4, 20])
def test_no_other_chain_promises_more(trees, most):
    rng = np.random.default_rng(most)
    for count in range(15):
        nodes = random_nodes(trees, rng, count)
        chain = best_chain(nodes, most)
        assert chain in paths(nodes)
        promised = max(sum(node.reach_prob for node in path) for path in paths(nodes) if len(path) <= most)
        assert sum(node.reach_prob for node in chain) == pytest.approx(promised)
        assert len(chain) <= most


def test_the_first_drawn_sibling_is_taken_at_any_probability(trees):
    """By its place in the draw, though another's children are likelier; a point mass beside them is never taken."""
    siblings = [make_node(trees, None, 0.3 - rank / 10, GROUP, rank) for rank in range(2)]
    siblings.append(make_node(trees, None, 0.9))
    child = make_node(trees, siblings[1], 0.19)
    in_order = reference_choice.in_order(trees.views, [node.index for node in reversed(siblings)])
    assert in_order == [node.index for node in siblings]
    assert best_chain([*siblings, child], 5) == [siblings[0]]


def test_what_hangs_from_a_drawn_node_does_not_choose_it(trees):
    """The chain goes where most is promised down to the first drawn node: what follows there depends on its token."""
    points = [make_node(trees, None, chance) for chance in (0.9, 0.8)]
    drawn = [make_node(trees, points[i], chance, GROUP) for i, chance in enumerate((0.7, 0.75))]
    follower = make_node(trees, drawn[1], 0.7, GROUP)
    assert best_chain([*points, *drawn, follower], 5) == [points[0], drawn[0]]
    trees.group[[drawn[1].index, follower.index]] = NONE
    assert best_chain([*points, *drawn, follower], 5) == [points[1], drawn[1], follower]


@pytest.mark.parametrize("wrong_every", [0, 2, 3, 7])
def test_the_text_is_the_same_and_chains_pay(wrong_every):
    """The engine itself fails on a tree that is not a chain; what was verified, accepted and dropped still adds up."""
    world = World()
    world.add_verifier(engine=ToyEngine(max_chain=4))
    world.add_drafter(proposer=ToyProposer(wrong_every=wrong_every))
    world.run(0.1)
    job = world.submit(1, PROMPT, max_tokens=60)
    world.run_until(lambda: bool(job.finish))
    assert job.token_ids == toy_text(PROMPT, 60)
    stats = {name: int(value) for name, value in job.stats.items() if isinstance(value, int)}
    assert stats["rounds"] < 45
    assert stats["accepted_tokens"] + stats["rounds"] == 60
    assert stats["accepted_tokens"] <= stats["draft_tokens"] <= 4 * stats["rounds"]
    assert stats["draft_tokens"] + stats["stale"] <= stats["drafted"]


@pytest.mark.slow
@pytest.mark.parametrize(("draft", "shape"), [("good", "best-first"), ("bad", "candidates")])
def test_the_distribution_of_sampled_drafts_stays_the_targets(draft, shape):
    world = World()
    world.add_verifier(engine=MemorylessEngine(max_chain=3))
    world.add_drafter(proposer=DrawingProposer(DRAFTS[draft]), fan_out=3)
    world.run(0.1)
    params = {"strategy": "probabilistic", "temperature": 1.0, "max_tokens": 750}
    jobs = [world.submit(i, PROMPT, speculation=SHAPES[shape], seed=i, **params) for i in (1, 2)]
    world.run_until(lambda: all(job.finish for job in jobs), limit_s=3000)
    singles, pairs = chi_squares([token for job in jobs for token in job.token_ids])
    assert singles < LIMIT
    assert pairs < PAIR_LIMIT
    assert all(int(job.stats["accepted_tokens"]) > 50 for job in jobs)
