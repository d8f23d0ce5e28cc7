"""`probabilistic` emits the target's law exactly; planted bugs do not."""

import numpy as np
import pytest

from specq.params import SamplingParams
from specq.verification import probabilistic
from specq.verification.families import Families
from specq.verification.longest import longest_path
from tests.verification.exact import World, drafts, error, joint_law, point, sampled

PLANS = {
    "nothing": ((), 1),
    "one": ((sampled(),), 2),
    "chain": ((sampled(sampled()),), 3),
    "two candidates": ((sampled(), sampled()), 2),
    "three candidates": ((sampled(), sampled(), sampled()), 2),
    "tree": ((sampled(sampled()), sampled(sampled())), 3),
    "point masses": ((point(point()), point()), 3),
    "mixed siblings": ((point(), sampled()), 2),
    "mixed chain": ((sampled(point()), point(sampled())), 3),
}
CUTS = {
    "plain": {},
    "top_k": {"top_k": 2},
    "top_p": {"temperature": 1.3, "top_p": 0.7},
    "all": {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
}


def world_of(entropy, vocab=3, support=3, **params):
    return World(entropy, vocab, support, SamplingParams(**{"temperature": 1.0, "strategy": "probabilistic"} | params))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("cuts", CUTS)
def test_the_emitted_law_is_the_targets(plan, cuts):
    world = world_of(sum(map(ord, plan + cuts)), **CUTS[cuts])
    assert error(world, *PLANS[plan]) < 1e-9


@pytest.mark.parametrize("plan", ["chain", "three candidates", "mixed siblings"])
@pytest.mark.parametrize("support", [1, 2])
def test_with_laws_that_miss_tokens_of_the_target(plan, support):
    assert error(world_of(support, vocab=4, support=support), *PLANS[plan]) < 1e-9


def test_a_greedy_target_is_a_point_mass():
    world = world_of(3, temperature=0.0)
    law = joint_law(world, *PLANS["chain"])
    assert max(law.values()) == pytest.approx(1)
    assert error(world, *PLANS["two candidates"]) < 1e-9


def test_cutting_by_depth_is_exact():
    """What is known before the token is drawn may decide."""
    assert error(world_of(4), *PLANS["tree"], cut=lambda world, prefix: len(prefix) > 1) < 1e-9


def test_the_enumeration_covers_all_draws():
    for plan, _ in PLANS.values():
        assert sum(probability for probability, _ in drafts(world_of(5), plan)) == pytest.approx(1)


# --- planted bugs: each must be seen ---------------------------------------------------------------------------------

BIAS = 1e-3  # what a bug must show at the least; the exact rule stays below 1e-9


def is_caught(plan, **how):
    """Whether one of three worlds shows a bias; coarse bisection suffices for that."""
    return any(error(world_of(entropy), *PLANS[plan], digits=14, **how) > BIAS for entropy in range(3))


@pytest.mark.parametrize("plan", ["tree", "mixed chain", "three candidates"])
def test_the_exact_rule_is_not_caught(plan):
    """What follows is no false alarm of the coarse bisection."""
    assert not is_caught(plan)


@pytest.mark.parametrize("plan", ["one", "chain", "two candidates", "tree", "mixed siblings"])
def test_mutant_no_residual(plan, monkeypatch):
    """The seed project's rule: accept with min(1, target / draft), else a plain draw from the target."""
    monkeypatch.setattr(probabilistic, "residual_laws", lambda at, probs, families, residual: probs[np.array(at)])
    assert is_caught(plan)


@pytest.mark.parametrize("plan", ["one", "chain", "tree"])
def test_mutant_residual_from_the_wrong_row(plan, monkeypatch):
    exact = probabilistic.residual_laws

    def wrong(at, probs, families, residual):
        return exact([min(row + 1, len(probs) - 1) for row in at], probs, families, residual)

    monkeypatch.setattr(probabilistic, "residual_laws", wrong)
    assert is_caught(plan)


@pytest.mark.parametrize("plan", ["two candidates", "three candidates", "tree"])
def test_mutant_siblings_not_renormalised(plan, monkeypatch):
    monkeypatch.setattr(probabilistic, "strike", lambda weights, family, column: None)
    assert is_caught(plan)


@pytest.mark.parametrize("plan", ["two candidates", "three candidates"])
def test_mutant_duplicates_merged(plan, monkeypatch):
    """Siblings drawn independently, each judged by the whole law, lose the trial of a duplicate that was merged away."""
    monkeypatch.setattr(probabilistic, "strike", lambda weights, family, column: None)
    assert is_caught(plan, with_replacement=True)


def test_duplicates_merged_by_the_drafter_are_exact_under_our_rule():
    """What is left of independent draws has the law of draws without replacement; only how many there are is random."""
    assert error(world_of(6), *PLANS["three candidates"], with_replacement=True) < 1e-9


@pytest.mark.parametrize("plan", ["one", "chain", "two candidates", "tree"])
def test_mutant_sampled_nodes_cut_by_their_own_probability(plan):
    def is_unlikely(world, prefix):
        ids, weights = world.draft(prefix[:-1])
        return dict(zip(ids, weights, strict=True))[prefix[-1]] < 0.3 * sum(weights)

    assert is_caught(plan, cut=is_unlikely)


@pytest.mark.parametrize("plan", ["two candidates", "three candidates", "tree"])
def test_mutant_the_likelier_of_the_candidates_first(plan, monkeypatch):
    """Siblings judged by their draft probability instead of in draw order."""
    exact = Families.of

    def by_weight(nodes):
        own = (nodes.law_ids == nodes.token_ids[:, None]) * nodes.weights
        order = np.argsort(-own.sum(1), kind="stable")
        ranked = exact(nodes)
        rank_of = np.argsort(order)
        children = {row: sorted(group, key=lambda i: rank_of[i]) for row, group in ranked.children.items()}
        depth = max(map(len, children.values()), default=0)
        by_rank = [np.array([g[r] for g in children.values() if len(g) > r]) for r in range(depth)]
        object.__setattr__(ranked, "children", children)
        object.__setattr__(ranked, "by_rank", by_rank)
        return ranked

    monkeypatch.setattr(Families, "of", staticmethod(by_weight))
    assert is_caught(plan)


@pytest.mark.parametrize("plan", ["mixed siblings"])
def test_mutant_point_masses_judged_before_sampled_siblings(plan, monkeypatch):
    exact = Families.of

    def points_first(nodes):
        ranked = exact(nodes)
        children = {r: sorted(g, key=lambda i: bool(nodes.is_sampled[i])) for r, g in ranked.children.items()}
        depth = max(map(len, children.values()), default=0)
        by_rank = [np.array([g[r] for g in children.values() if len(g) > r]) for r in range(depth)]
        object.__setattr__(ranked, "children", children)
        object.__setattr__(ranked, "by_rank", by_rank)
        return ranked

    monkeypatch.setattr(Families, "of", staticmethod(points_first))
    assert is_caught(plan)


@pytest.mark.parametrize("plan", ["tree", "mixed chain"])
def test_mutant_longest_of_n(plan, monkeypatch):
    """All nodes are tried, and of the accepted paths the longest is taken: the seed project's choice."""

    def longest(judged, first_row, families, accepted):
        first, tree = families.first_nodes[first_row], judged.step.tree
        own = np.array(accepted[first : first + tree.num_nodes], bool)
        return longest_path(tree, own, np.full(tree.num_nodes, 0.5))

    monkeypatch.setattr(probabilistic, "walk", longest)
    assert is_caught(plan)
