"""Trees that a drafter grows best first: which branches it has time for depends on the tokens that it drew in others.

The real drafter drafts, once for each sequence of tokens that it may draw, and the real session and scheduler choose
what is verified; the drafter's calibration and the verifier's are unlike each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from unittest import mock

import numpy as np
import pytest

from specq.drafting import Children, Drafter, Expansion
from specq.drafting.worker.worker import DraftWorker
from specq.protocol import ModelInfo
from specq.protocol.messages import Assign, Draft
from specq.protocol.params import SamplingParams, Speculation
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.step import choice_order, node_choice
from specq.verifier.trees import DraftTrees, reference_graft
from tests.each import each
from tests.verification import rounds
from tests.verification.rounds import CONTEXT, Serving, World
from tests.verification.test_rounds import BIAS, CURVES, EXACT, curve_of, other_session

DEPTH = 4
MOST_EXPANSIONS = 5  # which together draw one of 32 sequences of tokens
INFO = ModelInfo("scripted", "", "", "", 2, 2, (), 100, "")


class Scripted(Drafter):
    """Draws two children from two tokens, in the order that a script says, bit by bit; 0 after its
    end."""

    def __init__(self, world: World, script: Sequence[int]) -> None:
        self.world, self.script, self.info = world, script, INFO
        self.probability, self.num_drawn = 1.0, 0
        self.prefixes: dict[int, tuple[int, ...]] = {-1: ()}

    def open(self, session_id: int, token_ids: np.ndarray, params: SamplingParams, owner: str = "") -> None:
        pass

    def close(self, session_id: int) -> None:
        pass

    def commit(self, session_id: int, token_ids: np.ndarray, path: Sequence[int]) -> None:
        pass

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        return [self._draw(request) for request in requests]

    def _draw(self, request: Expansion) -> Children:
        prefix = self.prefixes[request.node_id]
        distribution = self.world.distribution(0, prefix)
        first = self.script[self.num_drawn] if self.num_drawn < len(self.script) else 0
        self.num_drawn += 1
        shares = distribution.weights / distribution.weights.sum(dtype=np.int64)
        self.probability *= float(shares[first])
        tokens = [first, 1 - first][: len(request.child_ids)]
        self.prefixes |= {node_id: (*prefix, token) for node_id, token in zip(request.child_ids, tokens, strict=True)}
        scores = np.log([float((shares**2).sum()), 1.0])[: len(tokens)].astype(np.float32)
        return Children(np.array(tokens, np.int32), scores, distribution)


@dataclass(frozen=True)
class Drafting:
    """How the drafter drafts: so many passes that expand at most `width` nodes; what it has learned: (score, was
    accepted); which of its messages are lost."""

    passes: int
    width: int
    speculation: Speculation
    seen: tuple[tuple[float, bool], ...] = ()
    lost: int = -1

    def sent(self, world: World, script: Sequence[int]) -> tuple[float, list[Draft], int]:
        """Return the probability of these draws, what is sent then, and how many draws there were."""
        proposer = Scripted(world, script)
        drafter = DraftWorker(proposer, incarnation=1, width=self.width, fan_out=2, max_ahead=DEPTH)
        params = SamplingParams(temperature=1.0, strategy="probabilistic", max_tokens=50)
        context = np.array(CONTEXT, np.int32)
        drafter.handle(Assign(
            session_id=1, epoch=1, lane=0, prompt_len=len(CONTEXT), params=params, speculation=self.speculation,
            token_ids=context,
        ))  # fmt: skip
        for score, accepted in self.seen:
            drafter.acceptance_stats["probabilistic"].calibration.observe(score, accepted)
        drafts = [draft for _ in range(self.passes) for draft in drafter.step()]
        arrived = [draft for i, draft in enumerate(drafts) if i != self.lost]
        return proposer.probability, arrived, proposer.num_drawn

    def outcomes(self, world: World, script: tuple[int, ...] = ()) -> list[tuple[float, list[Draft]]]:
        """Return (probability, drafts) for all that may be drawn. Point masses of another source come last."""
        probability, drafts, num_drawn = self.sent(world, script)
        drafts = [*drafts, rounds.points_of(world)] if world.num_points else drafts
        if num_drawn <= len(script):
            return [(probability, drafts)]
        return [outcome for token in (0, 1) for outcome in self.outcomes(world, (*script, token))]


def random_statistics(rng: np.random.Generator, count: int) -> tuple[tuple[float, bool], ...]:
    """(score, was accepted) of nodes."""
    return tuple((float(np.log(rng.random())), bool(rng.random() < 0.6)) for _ in range(count))


KINDS = ("run-ahead", "bounded", "synchronous", "just in time", "lost")


def drafting_of(kind: str, rng: np.random.Generator) -> Drafting:
    """A random way to draft; `lost`: one of the first messages does not arrive."""
    speculation = {
        "run-ahead": Speculation(),
        "bounded": Speculation(max_nodes=int(rng.integers(3, 8))),
        "synchronous": Speculation(mode="sync", max_nodes=int(rng.integers(3, 5)), max_depth=3),
        "just in time": Speculation(mode="jit", max_depth=3),
        "lost": Speculation(),
    }[kind]
    seen = random_statistics(rng, int(rng.choice([0, 60])))
    if kind == "run-ahead" and rng.random() < 0.2:
        return Drafting(3, 2, speculation, seen)
    num_passes = 20 if kind == "synchronous" else MOST_EXPANSIONS
    return Drafting(num_passes, 1, speculation, seen, int(rng.integers(1, num_passes)) if kind == "lost" else -1)


def serving_of(speculation: Speculation, rng: np.random.Generator) -> Serving:
    """A random verifier: with a curve of a few steps for one session, with room for few nodes, or with other
    sessions."""
    seen = tuple((0, *one) for one in random_statistics(rng, 60))
    which = rng.integers(5)
    if which < 2:
        steps = rng.exponential(0.3, 6) * (rng.random(6) < 0.6)
        curve = StepCurve([1, 2, 3, 4, 5, 6, 7, 9], np.cumsum([1, *steps, 9.0]))
        return Serving(curve, seen=seen, speculation=speculation)
    if which < 4:
        room = int(rng.integers(3, 7))
        return Serving(StepCurve([1, 9], [1, 1.1]), max_rows=room, seen=seen, speculation=speculation)
    others = tuple(other_session(i, rng) for i in range(rng.integers(0, 9)))
    curve = curve_of(CURVES[rng.integers(len(CURVES))], rng)
    return Serving(curve, seen=seen, others=others, speculation=speculation)


def distance(entropy: int, kind: str, num_rounds: int = 1, num_points: int = 0) -> float:
    """The most total variation for one random drafter and several verifiers."""
    rng = np.random.default_rng(entropy)
    seed, sharpness = int(rng.integers(2**31)), rng.uniform(0.5, 3.5)
    world = World(seed, vocab=2, score="honest", sharpness=sharpness, num_points=num_points)
    drafting = drafting_of(kind, rng)
    outcomes = drafting.outcomes(world)
    assert sum(probability for probability, _ in outcomes) == pytest.approx(1.0)
    with mock.patch.object(rounds, "outcomes", return_value=outcomes):
        return max(
            rounds.distance(world, serving_of(drafting.speculation, rng), DEPTH + 1, num_rounds) for _ in range(8)
        )


@each(("kind", "entropy"), product(KINDS, range(8)))
def test_a_tree_that_grew_by_its_own_tokens_is_exact(entropy, kind):
    assert distance(entropy, kind) < EXACT


WITH_POINTS = [("run-ahead", 120), ("lost", 100)]  # cases that show it if nodes of others are known


@each(("kind", "entropy"), WITH_POINTS)
def test_so_is_one_that_another_source_drafts_behind(kind, entropy):
    """A point mass below a sampled node shows whether that one was expanded."""
    assert distance(entropy, kind, num_points=1) < EXACT


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_so_are_many_more_with_another_source(kind):
    for entropy, num_points in product(range(100, 112), (1, 2)):
        assert distance(entropy, kind, num_points=num_points) < EXACT, f"case {entropy}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("entropies", "num_rounds"), [(range(100, 140), 1), (range(500, 505), 2)], ids=["one", "two"])
@pytest.mark.parametrize("kind", KINDS)
def test_so_are_many_more_and_two_rounds(kind, entropies, num_rounds):
    for entropy in entropies:
        assert distance(entropy, kind, num_rounds) < EXACT, f"case {entropy}"


# --- planted bugs: each must be seen; those of the drafter are in tests/drafting/worker/test_drafter.py ---------------


def growth_unseen(order, grown, expanded):
    """Any node may be chosen before any other: the rule before."""


def likely_ones_only(session, nodes):
    """Expansions are seen only where children are likely enough to be chosen."""
    with mock.patch.object(session.trees.operations, "live", return_value=nodes):
        return order_of_choice(session, nodes)


def rounds_as_they_grew(t, grown, first_after_loss, *, is_sync):
    """Treat a synchronous round as an asynchronous one."""
    return expanded_before(t, grown, first_after_loss, is_sync=False)


def loss_unseen(t, lane, first_id, size):
    """Ignore a gap in the node ids."""
    t.newest_id[lane] = max(t.newest_id[lane], first_id + size - 1)


order_of_choice, expanded_before = node_choice.order_of_choice, choice_order._expanded_before
MUTANTS = {  # each with the kind of drafting, and some cases, that show it: those whose bias is large
    "growth unseen": (choice_order._Order, "wait_for_growth", growth_unseen, "run-ahead", (35, 44)),
    "likely ones only": (node_choice, "order_of_choice", likely_ones_only, "run-ahead", (60, 738)),
    "rounds as they grew": (choice_order, "_expanded_before", rounds_as_they_grew, "synchronous", (35, 134)),
    "loss unseen": (reference_graft, "note", loss_unseen, "lost", (100, 321)),
}
SHOWN_FLOOR = 0.02  # of the chances that are considered: the more nodes are not, the more it shows who forgets them


@each(("kind", "entropy"), WITH_POINTS)
def test_a_mutant_that_knows_the_nodes_of_others_is_seen(kind, entropy, monkeypatch):
    monkeypatch.setattr(choice_order._Order, "let_others_wait", lambda *_, **__: None)
    assert distance(entropy, kind, num_points=1) > BIAS


@each("mutant", MUTANTS)
def test_mutants_are_seen(mutant, monkeypatch):
    """In cases that the rule as it is passes."""
    *patch, kind, shown_by = MUTANTS[mutant]
    monkeypatch.setattr(rounds, "TREES", DraftTrees(is_compiled=False))
    monkeypatch.setattr(node_choice, "FLOOR", SHOWN_FLOOR)
    assert all(distance(entropy, kind) < EXACT for entropy in shown_by)
    monkeypatch.setattr(*patch)
    assert all(distance(entropy, kind) > BIAS for entropy in shown_by)
