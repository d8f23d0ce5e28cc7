"""`probabilistic` emits the target's distribution exactly; planted bugs do not."""

from itertools import product

import numpy as np
import pytest

from specq.protocol.params import SamplingParams
from specq.testing.conformance.strategies import CUTS, PLANS, ExactConformance
from specq.testing.exact import ExactWorld, drafts, drawing, error, joint_distribution, point, sampled
from specq.verification import host_kernels
from specq.verification.longest import longest_path
from specq.verification.strategies import probabilistic
from tests.each import each
from tests.verification.mutants import mutated_kernels


@pytest.fixture
def portable(monkeypatch):
    """The rule in plain Python, which tests can change."""
    monkeypatch.setattr(host_kernels, "kernels", lambda: None)


def world_of(entropy, vocab=3, support=3, **params):
    own = {"temperature": 1.0, "strategy": "probabilistic"} | params
    return ExactWorld(entropy, vocab, support, SamplingParams(**own))


@pytest.mark.parametrize("name", ["probabilistic"])
class TestExactConformance(ExactConformance):
    """In one step."""


@each(("plan", "support"), product(["chain", "three candidates", "mixed siblings"], [1, 2]))
def test_with_distributions_that_miss_tokens_of_the_target(plan, support):
    assert error(world_of(support, vocab=4, support=support), *PLANS[plan]) < 1e-9


@pytest.mark.usefixtures("way")
@each("plan", ["three candidates", "mixed siblings", "mixed chain"])
def test_in_all_ways_that_a_cpu_has(plan):
    assert error(world_of(8, vocab=4, support=3, top_p=0.95), *PLANS[plan]) < 1e-9


def test_a_greedy_target_is_a_point_mass():
    world = world_of(3, temperature=0.0)
    distribution = joint_distribution(world, *PLANS["chain"])
    assert max(distribution.values()) == pytest.approx(1)
    assert error(world, *PLANS["two candidates"]) < 1e-9


def test_cutting_by_depth_is_exact():
    """What is known before the token is drawn may decide."""
    assert error(world_of(4), *PLANS["tree"], cut=lambda world, prefix: len(prefix) > 1) < 1e-9


# --- two steps: the first verifies a part of the tree, and the rest survives by content ------------------------------

TWO_STEPS = {
    "chain": ((sampled(sampled(sampled())),), 4),
    "candidates": ((sampled(sampled()), sampled(sampled())), 3),
    "three candidates": ((sampled(), sampled(sampled()), sampled(sampled())), 3),
    "bushy": ((sampled(sampled(), sampled()), sampled(sampled(), sampled())), 3),
    "mixed": ((sampled(point()), sampled(sampled()), point(sampled())), 3),
}
# Chosen without looking at a token: how many of each group, how deep, or nothing at all.
BLIND = {
    "the first": lambda ranks, prefix: ranks[prefix] < 1,
    "two of the first group": lambda ranks, prefix: len(prefix) == 1 and ranks[prefix] < 2,
    "the first's children": lambda ranks, prefix: ranks[prefix[:1]] < 1,
    "nothing": lambda ranks, prefix: False,
}


@each(("plan", "first"), product(TWO_STEPS, BLIND))
def test_what_a_step_leaves_out_survives_by_content(plan, first):
    """No token waits for a sampled child that was left out: the target's own takes the place, and where it is the
    child's, the child's subtree is verified next."""
    world = world_of(sum(map(ord, plan + first)), vocab=3)
    assert error(world, *TWO_STEPS[plan], first=BLIND[first]) < 1e-9


@each("first", ["the first", "the first's children"])
def test_two_steps_with_cuts(first):
    assert error(world_of(9, **CUTS["all"]), *TWO_STEPS["candidates"], first=BLIND[first]) < 1e-9


@each(("plan", "first"), product(["mixed", "upgraded"], [None, "the first", "two of the first group"]))
def test_a_point_mass_that_is_drawn_becomes_the_sampled_node(plan, first):
    """Point masses were there before: one whose token a sampled group draws is dropped in favour of the sampled node,
    which takes over its children."""
    plans = TWO_STEPS | {"upgraded": ((sampled(), sampled(), point(point()), point(sampled())), 3)}
    how = {} if first is None else {"first": BLIND[first]}
    assert error(world_of(11), *plans[plan], upgraded=True, **how) < 1e-9


def test_the_enumeration_covers_all_draws():
    for plan, _ in PLANS.values():
        assert sum(probability for probability, _ in drafts(world_of(5), plan)) == pytest.approx(1)


# --- planted bugs: each must be seen ---------------------------------------------------------------------------------

BIAS = 1e-3  # what a bug must show at the least; the exact rule stays below 1e-9


def is_caught(plan, **how):
    """Whether one of three worlds shows a bias; coarse bisection suffices for that."""
    return any(error(world_of(entropy), *PLANS[plan], digits=14, **how) > BIAS for entropy in range(3))


@pytest.mark.usefixtures("portable")
@each("plan", ["tree", "mixed chain", "three candidates"])
def test_the_exact_rule_is_not_caught(plan):
    """The results below are not false alarms of the coarse bisection."""
    assert not is_caught(plan)


def is_likely(world, prefix):
    """Whether a node's token has a large part of its draft distribution."""
    ids, weights = world.draft(prefix[:-1])
    return dict(zip(ids, weights, strict=True))[prefix[-1]] >= 0.3 * sum(weights)


@each("plan", ["candidates", "bushy"])
def test_mutant_a_part_chosen_by_content(plan):
    """Which sampled nodes are verified first depends on their own tokens."""

    def is_seen(world):
        how = {"first": lambda ranks, prefix: is_likely(world, prefix), "digits": 14}
        return error(world, *TWO_STEPS[plan], **how) > BIAS

    assert any(is_seen(world_of(entropy)) for entropy in range(3))


def test_mutant_a_point_mass_stays_beside_the_sampled_node(monkeypatch):
    """The token of a rejected sampled node is tried once more, as a point mass, and its sampled sibling is left out."""
    monkeypatch.setattr(drawing, "upgrade", lambda sibling_group: [
        member for member in sibling_group
        if not member[2] or all(member[1] != token for _, token, is_sampled in sibling_group if not is_sampled)
    ])  # fmt: skip
    plan = ((sampled(), sampled(), point()), 2)
    assert any(error(world_of(entropy), *plan, upgraded=True, digits=14) > BIAS for entropy in range(3))


@pytest.mark.usefixtures("portable")
class TestMutants:
    """Planted bugs in the rule."""

    @each("plan", ["one", "chain", "two candidates", "tree", "mixed siblings"])
    def test_no_residual(self, plan, monkeypatch):
        """The seed project's rule: accept with min(1, target / draft), else a plain draw from the target."""
        exact_end = probabilistic.end_path

        def end(step, paths, sibling_group):
            exact_end(step, paths, sibling_group)
            paths.num_edits[step] = 0

        monkeypatch.setattr(probabilistic, "end_path", end)
        assert is_caught(plan)

    @each("plan", ["one", "chain", "tree"])
    def test_residual_from_the_wrong_row(self, plan, monkeypatch):
        exact_draw = probabilistic.draw_tokens

        def wrong(paths, which, distributions, places, *others):
            return exact_draw(paths, which, distributions, np.minimum(places + 1, len(distributions.rows) - 1), *others)

        monkeypatch.setattr(probabilistic, "draw_tokens", wrong)
        assert is_caught(plan)

    @each("plan", ["two candidates", "three candidates", "tree"])
    def test_siblings_not_renormalised(self, plan, monkeypatch):
        monkeypatch.setattr(probabilistic, "strike", lambda sibling_group, place: None)
        assert is_caught(plan)

    @each("plan", ["two candidates", "three candidates"])
    def test_duplicates_merged(self, plan, monkeypatch):
        """Siblings drawn independently, each judged by the whole distribution, lose the trial of a duplicate that was
        merged away."""
        monkeypatch.setattr(probabilistic, "strike", lambda sibling_group, place: None)
        assert is_caught(plan, with_replacement=True)

    @each("plan", ["one", "chain", "two candidates", "tree"])
    def test_sampled_nodes_cut_by_their_own_probability(self, plan):
        assert is_caught(plan, cut=lambda world, prefix: not is_likely(world, prefix))

    @each("plan", ["two candidates", "three candidates", "tree"])
    def test_the_likelier_of_the_candidates_first(self, plan, monkeypatch):
        """Siblings judged by their draft probability instead of in draw order."""

        def by_weight(children, drafted):
            own = drafted.weights * (drafted.named[:, :-1] == drafted.named[:, -1:])
            return sorted(children, key=lambda child: -own[child].sum())

        monkeypatch.setattr(probabilistic, "order_of_judgement", by_weight)
        assert is_caught(plan)

    def test_point_masses_judged_before_sampled_siblings(self, monkeypatch):
        monkeypatch.setattr(
            probabilistic,
            "order_of_judgement",
            lambda children, drafted: sorted(children, key=lambda c: drafted.is_sampled[c]),
        )
        assert is_caught("mixed siblings")

    @each("plan", ["tree", "mixed chain"])
    def test_longest_of_n(self, plan, monkeypatch):
        """All nodes are tried, and of the accepted paths the longest is taken: the seed project's choice."""

        def longest(step, paths, drafted, probs):
            first, end = drafted.firsts[step : step + 2].tolist()
            parents, sibling_groups = drafted.parents[first:end], {}
            accepted = np.zeros(end - first, bool)
            for node in range(-1, end - first):
                ordered = probabilistic.order_of_judgement((first + np.flatnonzero(parents == node)).tolist(), drafted)
                sibling_groups[node] = probabilistic.sibling_group_of(ordered, drafted, probs)
                for child in ordered:
                    of_child = drafted.named[child, -1], drafted.uniforms[child], drafted.is_sampled[child]
                    accepted[child - first] = probabilistic.judge_child(sibling_groups[node], *of_child)
            path = longest_path(parents, accepted, np.full(end - first, 0.5))
            paths.nodes[first : first + len(path)], paths.lengths[step] = path, len(path)
            paths.ends[step] = path[-1] if path else -1
            probabilistic.end_path(step, paths, sibling_groups[int(paths.ends[step])])

        monkeypatch.setattr(probabilistic, "walk", longest)
        assert is_caught(plan)


IN_C = {
    "no residual": ("num_edits[step] = group.count, ", "", "two candidates"),
    "siblings not renormalised": ("group->total -= group->weights[place], group->weights[place] = 0;", "", "tree"),
    "accepted by the target alone": ("uniform * own * scale <", "uniform * own <", "two candidates"),
    "point masses first": ("sampled = 1; sampled >= 0 && accepted < 0; sampled--",
                           "sampled = 0; sampled <= 1 && accepted < 0; sampled++", "mixed siblings"),
    "the mass forgotten": ("    group->mass -= taken;\n", "", "three candidates"),
    "a point mass without distribution": (": i == place) * scale", ": 0) * scale", "point masses"),
    "the youngest first": ("for (int64_t i = first; i < end && accepted < 0; i++) {",
                           "for (int64_t i = end - 1; i >= first && accepted < 0; i--) {", "two candidates"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(host_kernels.kernels() is None, reason="no C compiler")
@pytest.mark.parametrize("name", IN_C)
def test_mutants_of_the_kernel(name, tmp_path, monkeypatch):
    before, after, plan = IN_C[name]
    built = mutated_kernels(tmp_path, monkeypatch, before, after)
    monkeypatch.setattr(host_kernels, "kernels", lambda: built)
    assert is_caught(plan)


def test_duplicates_merged_by_the_drafter_are_exact_under_our_rule():
    """What is left of independent draws has the distribution of draws without replacement; only how many there are is
    random."""
    assert error(world_of(6), *PLANS["three candidates"], with_replacement=True) < 1e-9
