"""Under a grammar `probabilistic` emits the masked target's distribution: by enumeration of all that may be drawn,
through the real session tree, its grammar, forced tokens and the choice of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from specq.protocol import GRAMMAR_LANE, DraftDistribution
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions.session import Session
from specq.verifier.step import node_choice, plan
from specq.verifier.step.node_choice import Chosen
from specq.verifier.trees import NONE
from tests.each import each
from tests.grammar.letters import Automaton
from tests.verification import rounds, test_grown, test_rounds
from tests.verification.rounds import Serving, World, distance
from tests.verification.test_rounds import BIAS, EXACT, length_of


@dataclass(frozen=True)
class MaskedWorld(World):
    """Drafters that know no grammar, and a target that follows one."""

    grammar: Automaton = field(default_factory=partial(Automaton, 0))

    def target(self, prefix: tuple[int, ...]) -> np.ndarray:
        allowed = np.isin(np.arange(self.vocab), list(self.grammar.allows(prefix)))
        weights = super().target(prefix) * allowed
        return weights / weights.sum()


@dataclass(frozen=True)
class KnowingWorld(MaskedWorld):
    """Drafters that draw from what the grammar allows, and send this law."""

    def allowed(self, prefix: tuple[int, ...]) -> list[int]:
        return sorted(self.grammar.allows(prefix))

    def distribution(self, lane: int, prefix: tuple[int, ...]) -> DraftDistribution:
        free = super().distribution(lane, prefix)
        return replace(free, weights=np.where(np.isin(free.ids, self.allowed(prefix)), free.weights, 0))

    def num_children(self, lane: int, prefix: tuple[int, ...]) -> int:
        return min(super().num_children(lane, prefix), len(self.allowed(prefix)))

    def scores_of(self, lane: int, prefix: tuple[int, ...], drawn: Any, distribution: DraftDistribution) -> np.ndarray:
        """What is never drawn may have any score."""
        weights = np.maximum(distribution.weights, 1)
        return super().scores_of(lane, prefix, drawn, replace(distribution, weights=weights))


def masked(world: World, serving: Serving, entropy: int) -> tuple[MaskedWorld, Serving]:
    """Return the same with a random grammar."""
    grammar = Automaton(entropy, world.vocab, num_states=2 + entropy % 3)
    return MaskedWorld(**asdict(world), grammar=grammar), replace(serving, grammar=grammar.session_grammar)


def case(entropy: int) -> tuple[MaskedWorld, Serving]:
    """Return a random world with a grammar, and a verifier to serve it."""
    return masked(*test_rounds.case(entropy), entropy)


def forced_case(entropy: int) -> tuple[MaskedWorld, Serving]:
    """Return a case in which one sampled node pays only with a forced token below it."""
    price = np.random.default_rng(entropy).uniform(0.5, 0.9)
    curve = StepCurve([1, 2, 3, 9], [1, 1 + price, 1 + price, 9])
    return masked(World(entropy, widths=(1 + entropy % 2,), sharpness=2.5), Serving(curve), entropy)


def knowing_case(entropy: int) -> tuple[KnowingWorld, Serving]:
    """Return a case whose drafters draw with the grammar's masks."""
    world, serving = case(entropy)
    return KnowingWorld(**fields_of(world)), serving


def fields_of(world: MaskedWorld) -> dict[str, Any]:
    return {one.name: getattr(world, one.name) for one in fields(world)}


def kinds_of(world: MaskedWorld, serving: Serving) -> set[str]:
    """Return which kinds of nodes are verified in some case."""
    found = set[str]()
    for _, drafts in rounds.outcomes(world):
        session = rounds.open_session(drafts, serving)
        share = rounds.share_of(session, serving)
        t, paths = session.trees, {NONE: ()}
        for node in share.nodes.tolist():
            parent, is_sampled = int(t.parent[node]), t.group[node] != NONE
            paths[node] = (*paths[parent], int(t.token[node]))
            if not world.grammar.is_allowed(paths[node]):
                found.add("forbidden and sampled" if is_sampled else "forbidden")
            if t.lane_id[t.node_lane[node]] == GRAMMAR_LANE and parent != NONE and t.group[parent] != NONE:
                found.add("forced below sampled")
        session.close()
    return found


@each("entropy", range(6))
def test_a_round_has_the_masked_targets_distribution(entropy: int) -> None:
    world, serving = case(entropy)
    assert distance(world, serving, length_of(world)) < EXACT


@each("entropy", [12, 15, 16, 21, 25])
def test_so_has_one_with_forced_tokens_that_decide(entropy: int) -> None:
    world, serving = forced_case(entropy)
    assert distance(world, serving, 4) < EXACT


@each("entropy", range(6))
def test_so_has_one_with_drafters_that_draw_with_masks(entropy: int) -> None:
    """The masked law is the law that they send."""
    world, serving = knowing_case(entropy)
    assert distance(world, serving, length_of(world)) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("block", range(2))
def test_so_has_each_of_50_more(block: int) -> None:
    for entropy in range(40 + block * 25, 65 + block * 25):
        world, serving = case(entropy)
        assert distance(world, serving, length_of(world)) < EXACT, f"case {entropy}"


@pytest.mark.slow
@each("entropy", range(300, 320))
def test_two_rounds_have_the_masked_targets_distribution(entropy: int) -> None:
    """The grammar follows the first round's tokens, and forced ones are drafted again."""
    world, serving = case(entropy)
    assert distance(world, serving, length_of(world), num_rounds=2) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("kind", test_grown.KINDS)
def test_so_have_trees_that_grew_by_their_own_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter, which knows no grammar, goes on below forbidden nodes."""
    serving_of = test_grown.serving_of
    for entropy in range(100, 104):
        grammar = Automaton(entropy, 2)
        with monkeypatch.context() as patch:
            patch.setattr(test_grown, "World", partial(MaskedWorld, grammar=grammar))
            patch.setattr(
                test_grown, "serving_of", lambda *of, own=grammar: replace(serving_of(*of), grammar=own.session_grammar)
            )
            assert test_grown.distance(entropy, kind) < EXACT, f"case {entropy}"


def test_cases_have_forbidden_sampled_nodes_and_forced_ones_below_them() -> None:
    """No point mass is verified that the grammar forbids."""
    found = [kinds_of(*case(entropy)) for entropy in range(6)] + [kinds_of(*forced_case(i)) for i in (15, 16, 21)]
    assert sum("forbidden and sampled" in kinds for kinds in found) >= 4
    assert sum("forced below sampled" in kinds for kinds in found) >= 3
    assert not any("forbidden" in kinds for kinds in found)


# --- planted bugs: each must be seen ---------------------------------------------------------------------------------

allowed_nodes, order_of_choice, choose_nodes = node_choice._allowed, node_choice.order_of_choice, plan.choose_nodes
draft_of = rounds.draft_of


def forbidden_of(sessions: Sequence[Session], nodes: Sequence[int]) -> set[int]:
    """Return the nodes that the grammar of their session forbids."""
    found = set[int]()
    for session in sessions:
        if session.grammar is None:
            continue
        paths: dict[int, tuple[int, ...]] = {NONE: ()}
        for node in session.trees.operations.live(session.place):
            paths[node] = (*paths[int(session.trees.parent[node])], int(session.trees.token[node]))
            tokens = list(paths[node])
            if not session.grammar.allowed(tokens, range(-1, len(tokens) - 1))[-1]:
                found.add(node)
    return found.intersection(nodes)


def cut_before_the_step(sessions: Any, firsts: Any, nodes: Any) -> Any:
    """A forbidden sampled node is left out of the step."""
    firsts, nodes = allowed_nodes(sessions, firsts, nodes)
    is_kept = ~np.isin(nodes, list(forbidden_of(sessions, nodes.tolist())))
    return np.append(0, is_kept.cumsum())[firsts], nodes[is_kept]


def score_of_0(sessions: Any, firsts: Any, nodes: Any) -> Any:
    """It counts as impossible in the choice of nodes."""
    firsts, nodes = allowed_nodes(sessions, firsts, nodes)
    sessions[0].trees.reach_prob[list(forbidden_of(sessions, nodes.tolist()))] = 0.0
    return firsts, nodes


def freed_before_the_choice(sessions: Any, num_rows: int, room: int, curve: Any, *rest: Any) -> Chosen:
    """It needs no row of the step, so it is in the step where others would not pay."""
    max_chain, saved_s, even_chains = rest
    chosen = choose_nodes(sessions, num_rows, room, curve, max_chain, saved_s, even_chains)
    trees = sessions[0].trees
    firsts, nodes = node_choice.offered(sessions, max_chain)
    is_free = np.isin(nodes, list(forbidden_of(sessions, nodes.tolist())))
    is_in = np.isin(nodes, chosen.nodes)
    for i in np.flatnonzero(is_free).tolist():
        parent = int(trees.parent[nodes[i]])
        is_in[i] |= parent == NONE or bool(is_in[nodes == parent].any())
    return Chosen(np.append(0, is_in.cumsum())[firsts], nodes[is_in], chosen.tokens)


def sends_the_law_without_masks(world: KnowingWorld, lane: int, sibling_groups: Any) -> Any:
    """Drafters draw with masks, and send the law that they would draw from without."""
    return draft_of(MaskedWorld(**fields_of(world)), lane, sibling_groups)


def forced_ones_known(session: Session, nodes: Sequence[int]) -> list[int]:
    """Whether there are forced tokens below a sampled node decides on that node."""
    found, t = order_of_choice(session, nodes), session.trees
    own = [node for node in found if t.lane_id[t.node_lane[node]] == GRAMMAR_LANE]
    t.depends_on[own] = NONE
    return found


KNOWING = (22, 28)
MUTANTS: dict[str, tuple[Any, str, Any, Any, Sequence[int]]] = {  # each with some cases that show it
    "cut before the step": (node_choice, "_allowed", cut_before_the_step, case, (3, 27)),
    "a score of 0": (node_choice, "_allowed", score_of_0, case, (3, 27)),
    "its row freed before the choice": (plan, "choose_nodes", freed_before_the_choice, case, (14, 25)),
    "the law without masks sent": (rounds, "draft_of", sends_the_law_without_masks, knowing_case, KNOWING),
    "forced tokens known": (node_choice, "order_of_choice", forced_ones_known, forced_case, (12, 25)),
}


@each("mutant", MUTANTS)
def test_mutants_are_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In cases that the rule as it is passes."""
    *patch, made, shown_by = MUTANTS[mutant]
    cases = [(world, serving, max(length_of(world), 3)) for world, serving in map(made, shown_by)]
    assert all(distance(*one) < EXACT for one in cases)
    monkeypatch.setattr(*patch)
    assert all(distance(*one) > BIAS for one in cases)
