"""Engines that take no trees: of a session's tree its best chain is verified; nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from specq.protocol.types import DraftDistribution
from specq.testing.toy import ToyEngine, ToyProposer, toy_text
from specq.testing.world import World
from specq.verifier.draft_tree import Node, best_chain, in_order
from tests.verification.test_draft_distributions import (
    DRAFTS,
    LIMIT,
    PAIR_LIMIT,
    SHAPES,
    DrawingProposer,
    MemorylessEngine,
    chi_squares,
)

PROMPT = [5, 6, 7]
DISTRIBUTION = DraftDistribution(np.arange(1, 9, dtype=np.int32), np.ones(8, np.uint16))


def random_nodes(rng: np.random.Generator, count: int) -> list[Node]:
    """Candidates in order, each no likelier than its parent."""
    nodes: list[Node] = []
    for i in range(count):
        parent = nodes[rng.integers(len(nodes))] if nodes and rng.random() < 0.8 else None
        node = Node(0, i, i, parent, parent.position + 1 if parent else 10, 0.0, 0.0)
        node.reach_prob = float(rng.random()) * (parent.reach_prob if parent else 1.0)
        nodes.append(node)
    return nodes


def paths(nodes: list[Node]) -> list[list[Node]]:
    """All chains from the context down."""
    found: list[list[Node]] = [[]]
    for node in nodes:
        found += [[*path, node] for path in found if (path[-1] if path else None) is node.parent]
    return found


@pytest.mark.parametrize("most", [1, 2, 4, 20])
def test_no_other_chain_promises_more(most):
    rng = np.random.default_rng(most)
    for count in range(15):
        nodes = random_nodes(rng, count)
        chain = best_chain(nodes, most)
        assert chain in paths(nodes)
        promised = max(sum(node.reach_prob for node in path) for path in paths(nodes) if len(path) <= most)
        assert sum(node.reach_prob for node in chain) == pytest.approx(promised)
        assert len(chain) <= most


def test_of_drawn_siblings_the_first_is_taken_whatever_they_promise():
    """By its place in the draw, though another's children are likelier; a point mass beside them is never taken."""
    siblings = [Node(0, rank, 3 - rank, None, 10, 0.0, 0.0) for rank in range(3)]
    for rank, node in enumerate(siblings[:2]):
        node.distribution, node.rank, node.reach_prob = DISTRIBUTION, rank, 0.3 - rank / 10
    siblings[2].reach_prob = 0.9
    child = Node(0, 5, 1, siblings[1], 11, 0.0, 0.0)
    child.reach_prob = 0.19
    assert best_chain([*in_order(reversed(siblings)), child], 5) == [siblings[0]]


def test_what_hangs_from_a_drawn_node_does_not_choose_it():
    """The chain goes where most is promised down to the first drawn node: what follows there depends on its token."""
    points = [Node(0, i, i, None, 10, 0.0, 0.0) for i in range(2)]
    drawn = [Node(0, 2 + i, 5, points[i], 11, 0.0, 0.0) for i in range(2)]
    follower = Node(0, 4, 5, drawn[1], 12, 0.0, 0.0)
    for node, reach_prob in zip([*points, *drawn, follower], [0.9, 0.8, 0.7, 0.75, 0.7], strict=True):
        node.reach_prob, node.distribution = reach_prob, DISTRIBUTION if node in drawn or node is follower else None
    assert best_chain([*points, *drawn, follower], 5) == [points[0], drawn[0]]
    drawn[1].distribution = follower.distribution = None
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
