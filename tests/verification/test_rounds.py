"""What rounds commit under `probabilistic` has the target's distribution, for any step curve: by enumeration,
through the real session tree and scheduler."""

import functools
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from specq.protocol.messages import Open
from specq.protocol.params import SamplingParams
from specq.testing import exact
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions import grafting
from specq.verifier.sessions.session import Session
from specq.verifier.step import node_choice
from specq.verifier.trees import NONE, DraftTrees, reference_choice
from specq.verifier.trees.reference_graft import siblings_from
from tests.each import each
from tests.verification import rounds
from tests.verification.rounds import FIRST_LANE, POINT_LANE, Serving, World, distance, num_draws
from tests.verifier.sessions import graft, make_draft

RESULTS = Path(__file__).parents[2] / "docs" / "results"
EXACT = 1e-9  # total variation
MOST_DRAWS = 120  # of a case's drafters: what keeps it short
CURVES = ("convex", "concave", "stepped", "noisy", "measured")
SHAPES = [(1, 4, 0), (2, 3, 0), (2, 3, 0), (3, 2, 0), (3, 3, 0), (2, 4, 1), (2, 4, 2)]  # siblings, depth, chosen


@functools.cache
def measured(name):
    """A curve of docs/results/."""
    points = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["measured"]["step_ms"]
    return StepCurve([rows for rows, _ in points], [milliseconds / 1000 for _, milliseconds in points])


def curve_of(kind, rng):
    """A random step curve."""
    sizes = np.arange(1, 65)
    if kind == "measured":
        return measured(rng.choice(["calibrate_1", "calibrate_2", "calibrate_bad_line", "calibrate_random"]))
    if kind == "stepped":
        jumps = rng.random(64) < 0.3
        return StepCurve(sizes, 1.0 + np.cumsum(jumps * rng.exponential(0.5, 64)))
    if kind == "noisy":
        return StepCurve(sizes, 1.0 + rng.uniform(0, 0.1) * sizes + rng.normal(0, 0.3, 64).clip(-0.9))
    power = rng.uniform(1.2, 2.5) if kind == "convex" else rng.uniform(0.2, 0.8)
    return StepCurve(sizes, 1.0 + rng.uniform(0.02, 0.4) * sizes**power)


def other_session(number, rng, count=None):
    """A decoding session of another job, with a chain of point masses."""
    session = Session(Open(
        session_id=100 + number, epoch=1, prompt_len=3, tokens_left=50, params=SamplingParams(),
        token_ids=np.array([1, 2, 3], np.int32),
    ), trees=rounds.TREES)  # fmt: skip
    session.kv_len = 2
    count = int(rng.integers(0, 4)) if count is None else count
    graft(session, make_draft(3, 0, list(range(4, 4 + count)), list(range(-1, count - 1))), 0.0)
    for accepted in rng.random(3) < 0.5 if count > 1 else ():
        for lane in session.trees.lanes(session.place).values():
            lane.calibration.observe(np.log(0.5), bool(accepted))
    return session


def case(entropy):
    """A random world, and a verifier to serve it."""
    rng = np.random.default_rng(entropy)
    while True:
        sibling_group, depth, chosen = SHAPES[rng.integers(len(SHAPES))]
        world = World(
            int(rng.integers(2**31)), vocab=3 + int(rng.random() < 0.2), sibling_group=sibling_group, depth=depth,
            num_lanes=1 + int(rng.random() < 0.2), num_points=int(rng.integers(0, 3)),
            points_first=rng.random() < 0.7, chosen=chosen, score=rng.choice(["honest", "own", "any"]),
            sharpness=rng.uniform(0.5, 4),
        )  # fmt: skip
        if 1 < np.prod([num_draws(world, lane) for lane in range(world.num_lanes)]) <= MOST_DRAWS:
            break
    lanes = [FIRST_LANE, FIRST_LANE + 1, POINT_LANE]
    seen = [(rng.choice(lanes), float(np.log(rng.random())), rng.random() < 0.6) for _ in range(rng.integers(0, 20))]
    others = tuple(other_session(i, rng) for i in range(rng.integers(0, 9)))
    serving = Serving(
        curve_of(CURVES[entropy % len(CURVES)], rng),
        max_rows=len(others) + 1 + int(rng.integers(1, 6)) if rng.random() < 0.3 else 64,
        max_chain=int(rng.integers(1, 5)) if rng.random() < 0.2 else 0,
        tokens_left=int(rng.integers(2, 5)) if rng.random() < 0.2 else 50,
        seen=tuple(seen), others=others,
    )  # fmt: skip
    return world, serving


def length_of(world):
    """How many tokens a round may commit."""
    return (len(world.widths) or world.depth) + 1


@each("entropy", range(40))
def test_a_round_has_the_targets_distribution(entropy):
    world, serving = case(entropy)
    assert distance(world, serving, length_of(world)) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("block", range(8))
def test_so_has_each_of_200_more(block):
    for entropy in range(40 + block * 25, 65 + block * 25):
        world, serving = case(entropy)
        assert distance(world, serving, length_of(world)) < EXACT, f"case {entropy}"


@pytest.mark.slow
@pytest.mark.parametrize("entropy", range(300, 360))
def test_two_rounds_have_the_targets_distribution(entropy):
    """What the first round leaves out is verified in the second, if the target's own tokens led there."""
    world, serving = case(entropy)
    assert distance(world, serving, length_of(world), num_rounds=2) < EXACT


def test_cases_are_of_many_kinds():
    """Each kind of curve, of score and of engine; steps in which something is left out, and some in which nothing
    is."""
    cases = [case(entropy) for entropy in range(40)]
    assert {world.score for world, _ in cases} == {"honest", "own", "any"}
    assert {serving.max_chain > 0 for _, serving in cases} == {True, False}
    assert {serving.max_rows < 64 for _, serving in cases} == {True, False}
    assert {world.num_points > 0 for world, _ in cases} == {world.num_lanes > 1 for world, _ in cases} == {True, False}
    assert {world.chosen for world, _ in cases} == {0, 1, 2}
    sizes = list(map(sizes_of, cases))
    all_sizes = set().union(*sizes)
    assert any(taken == live for taken, live in all_sizes)
    assert any(0 < taken < live for taken, live in all_sizes)
    assert sum(len({taken for taken, _ in of_case}) > 1 for of_case in sizes) >= len(cases) / 5  # as the draws have it


def sizes_of(of_case):
    """{(nodes that are verified, nodes that there are)} of a case's first round."""
    world, serving = of_case
    sessions = [rounds.open_session(drafts, serving) for _, drafts in rounds.outcomes(world)]
    return {(rounds.share_of(session, serving).step.tree.num_nodes, session.num_live) for session in sessions}


def test_the_naive_judge_is_the_real_one():
    """The probabilities that it gives are those of the real kernels, found by bisection."""
    for entropy in (1, 2, 3):
        world = World(entropy, sibling_group=2, depth=2, num_points=2)
        bisected = exact.ExactWorld(entropy)
        bisected.logits = lambda prefix, world=world: np.log(world.target(prefix)).astype(np.float32)
        *_, (_, drafts) = rounds.outcomes(world)
        serving = Serving(StepCurve([1, 64], [1.0, 1.0]))
        tree = rounds.share_of(rounds.open_session(drafts, serving), serving).step.tree
        assert tree.num_nodes > 3
        found = real_distribution(bisected, tree)
        expected = rounds.judged(world, tree, ())
        assert max(abs(found.get(text, 0) - p) for text, p in expected.items()) < 1e-6


def real_distribution(world, tree):
    """{tokens: probability} of what the real judge commits of a tree."""
    prefixes = [()]
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        prefixes.append((*prefixes[parent + 1], token))
    drafted = exact.DrawnDraft((), tuple((prefix, False) for prefix in prefixes[1:]))
    found = {}
    with mock.patch.object(exact.DrawnDraft, "tree", return_value=tree):
        (distribution,) = exact.emitted(world, [drafted], 30)
    for probability, text in distribution:
        found[text] = found.get(text, 0.0) + probability
    return found


# --- planted bugs: each must be seen ---------------------------------------------------------------------------------

BIAS = 1e-3


def most_goodput(reach_prob, needed, num_sessions, num_rows, room, curve, saved_s=0.0):
    """The number of nodes with the most goodput, for any dependence between nodes: the rule before decision 0008."""
    tokens = num_sessions + np.concatenate(([0.0], np.cumsum(reach_prob[:room])))
    return int(np.argmax(tokens / curve.times(num_rows, len(tokens))))


def younger_siblings_known(session, nodes):
    """Whether an earlier sibling is verified depends on the chance of a later one, and so on the earlier one's
    token."""
    nodes, t = order_of_choice(session, nodes), session.trees.views
    for node in nodes:
        while (earlier := t.depends_on[node]) != NONE and t.parent[earlier] == t.parent[node]:
            t.depends_on[node] = t.depends_on[earlier]
    return nodes


def descendants_known(session, nodes):
    """Whether a node is verified depends on what hangs from it."""
    nodes = order_of_choice(session, nodes)
    session.trees.depends_on[nodes] = NONE
    return nodes


def uncapped(t, siblings, reach_prob):
    """A later sibling may be likelier than the earlier one, and be offered without it."""
    nodes = reference_choice.in_order(t, siblings)
    for node in nodes:
        t.reach_prob[node] = reach_prob * reference_choice.probability(t, node)
    return nodes


def known_within_the_room(reach_prob, needed, num_sessions, num_rows, room, curve, saved_s=0.0):
    """The nodes that are looked at are those among the first `room`, of which there are fewer the more is unknown."""
    return best_count(reach_prob[:room], needed[:room], num_sessions, num_rows, room, curve, saved_s)


def chain_by_promise(t, nodes, most):
    """Of point masses that is taken which promises most, drawn nodes and what hangs from these included: the rule
    before decision 0008, for engines that take no trees."""
    chain, above = [], NONE
    while len(chain) < most and (siblings := [node for node in nodes if t.parent[node] == above]):
        first = siblings[:1] if t.group[siblings[0]] != NONE else siblings
        above = max(first, key=lambda node: promise(t, node, most - len(chain)))
        chain.append(above)
    return chain


def promise(t, node, most):
    children = siblings_from(t, t.first_child[node]) if most > 1 else []
    return t.reach_prob[node] + max((promise(t, child, most - 1) for child in children), default=0.0)


best_count, order_of_choice = node_choice.best_count, node_choice.order_of_choice
MUTANTS = {
    "the most goodput": (node_choice, "best_count", most_goodput),
    "descendants known": (node_choice, "order_of_choice", descendants_known),
    "later siblings known": (node_choice, "order_of_choice", younger_siblings_known),
    "a later sibling first": (reference_choice, "weighed", uncapped),
    "what a drafter says": (grafting, "predicted_scores", lambda draft: draft.scores),
    "a chain by all it promises": (reference_choice, "best_chain", chain_by_promise),
    "known within the room": (node_choice, "best_count", known_within_the_room),
}


def cases_for(mutant):
    """What shows it: some of the random cases, or such as are made for it."""
    rng = np.random.default_rng(0)
    if mutant in ("the most goodput", "descendants known"):  # seven rows are cheap, the eighth is not, as was measured
        others = tuple(other_session(i, rng, count=0) for i in range(6))
        for entropy in range(40):
            yield World(entropy, widths=(1, 1, 1, 1), sharpness=2.5), Serving(measured("calibrate_2"), others=others)
    elif mutant == "later siblings known":  # the first does not pay by itself; with the second only if that is likely
        for entropy in range(20):
            price = rng.uniform(0.5, 0.7)
            yield World(entropy, vocab=4, widths=(2,)), Serving(StepCurve([1, 2, 3, 9], [1, 1 + price, 1 + price, 9]))
    elif mutant == "a chain by all it promises":
        for entropy in range(20):
            yield World(entropy, chosen=1, widths=(2, 1, 1)), Serving(StepCurve([1, 9], [1, 1]), max_chain=3)
    elif mutant == "known within the room":  # the first pays with the other session's node only
        for entropy in range(20):
            others = (other_session(0, rng, count=1),)
            curve = StepCurve([2, 3, 9], [1, 1.5, 1.5])
            yield World(entropy, widths=(1, 1), sharpness=3.0), Serving(curve, max_rows=4, others=others)
    else:
        yield from map(case, range(40))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_seen(mutant, monkeypatch):
    """In cases that the rule as it is passes."""
    monkeypatch.setattr(rounds, "TREES", DraftTrees(is_compiled=False))
    if MUTANTS[mutant][1] == "weighed":
        monkeypatch.setattr(node_choice, "FLOOR", 0.2)  # the order is kept anyway; what is not offered is left out
    cases = list(cases_for(mutant))
    assert all(distance(world, serving, length_of(world)) < EXACT for world, serving in cases)
    monkeypatch.setattr(*MUTANTS[mutant])
    assert any(distance(world, serving, length_of(world)) > BIAS for world, serving in cases)
