"""Judging under masks: every strategy judges the masked target, with all other parameters, in halves and at once."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from specq.protocol import NO_TREE, SamplingParams, SessionStep
from specq.testing.conformance.strategies import CUTS, PLANS, WARM
from specq.testing.exact import ExactWorld, error, joint_distribution, sampled
from specq.testing.oracle import RULES
from specq.testing.random_steps import VOCAB, packed_logits, params_of, sampled_trees, split, steps
from specq.verification import STRATEGIES, Judgements, MaskedSteps, ReadyTokenMasks, StepBatch, begun
from specq.verification.begun import begin
from specq.verification.judge import judge_each
from specq.verifier.sessions.history import Past
from tests.each import each
from tests.grammar.letters import Automaton
from tests.verification.begun_rows import begun_rows, check_alike
from tests.verification.steps import tree_of
from tests.verification.test_processors import END_IDS, Case, cases

judge_module = sys.modules[judge_each.__module__]
ALL = (1 << VOCAB) - 1  # the mask of everything
SOME = settings(max_examples=25, deadline=None)
EXACT = 1e-9


def with_masks(batch: Sequence[SessionStep], seed: int) -> tuple[StepBatch, dict[int, np.ndarray]]:
    """Return steps of which most have random masks, and these masks: bool[rows, vocab] by session."""
    rng = np.random.default_rng(seed)
    found = StepBatch.of([replace(step, session_id=i) for i, step in enumerate(batch)])
    allowed = {}
    for i, step in enumerate(batch):
        if rng.random() < 0.8:
            allowed[i] = rng.random((1 + step.tree.num_nodes, VOCAB)) < rng.choice([0.2, 0.6, 1.0])
            allowed[i][np.arange(len(allowed[i])), rng.integers(VOCAB, size=len(allowed[i]))] = True
    found.masks = ReadyTokenMasks({i: words_of(own) for i, own in allowed.items()}, {})
    return found, allowed


def words_of(allowed: np.ndarray) -> np.ndarray:
    """Return masks i32[rows, 1]."""
    return (allowed @ (1 << np.arange(VOCAB)))[:, None].astype(np.int32)


def masked(batch: StepBatch, logits: torch.Tensor, allowed: dict[int, np.ndarray]) -> torch.Tensor:
    """Return logits in which the tokens that are not allowed are impossible."""
    found, first = logits.clone(), 0
    for step in batch.judged():
        count = step.num_judged_rows
        if step.session_id in allowed:
            found[first : first + count][torch.from_numpy(~allowed[step.session_id])] = -torch.inf
        first += count
    return found


def said(judgements: Judgements) -> list[tuple[Any, ...]]:
    """Return what judgements say, and whether there is a fault."""
    return [(one.session_id, one.path, one.token_ids.tolist(), bool(one.fault)) for one in judgements]


def logprobs_of(judgements: Judgements) -> dict[int, list[Any]]:
    """Return log-probabilities by place; the ids of impossible tokens may be any."""
    return {
        i: [one.tokens.tolist(), np.where(np.isfinite(one.top), one.top_ids, -1).tolist(), one.top.tolist()]
        for i, one in judgements.logprobs.items()
    }


def check_naive(names: Sequence[str], is_begun: bool, max_examples: int = 60, phases: Any = tuple(Phase)) -> None:
    """Judge random steps of some strategies, and compare them with naive judges of masked logits."""

    @settings(max_examples=max_examples, deadline=None, phases=phases)
    @given(st.lists(steps(params=params_of(names), tree=sampled_trees()), max_size=4), st.integers(0, 2**32))
    def check(drawn: list[SessionStep], seed: int) -> None:
        batch, allowed = with_masks(drawn, seed)
        logits = packed_logits(batch, seed)
        own = split(batch, masked(batch, logits, allowed))
        expected = [(*RULES[step.params.strategy](step, rows), False) for step, rows in own]
        with begun_rows() if is_begun else nullcontext():
            found = begin(batch, logits).finish() if is_begun else judge_each(batch, logits)
        assert said(found) == [(step.session_id, *rest) for (step, _), rest in zip(own, expected, strict=True)]

    check()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the naive rule divides by what is left, at times nothing
@pytest.mark.parametrize("is_begun", [False, True], ids=["at once", "in halves"])
def test_strategies_judge_the_masked_target(is_begun: bool) -> None:
    """All strategies in one batch, so that few are judged on a device, and one by one."""
    check_naive([*STRATEGIES], is_begun, max_examples=40)
    check_naive(["deterministic"], is_begun, max_examples=20)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", STRATEGIES)
def test_so_does_each_in_all_ways_of_a_cpu(name: str) -> None:
    check_naive([name], is_begun=False, max_examples=80)


def judged_with_and_without(found: list[Case], seed: int, *, is_plain: bool = False) -> list[list[Any]]:
    """Return what is said of masked steps and of steps with masked logits, at once and in halves."""
    batch, allowed = with_masks([replace(case.step, tree=NO_TREE) if is_plain else case.step for case in found], seed)
    logits = packed_logits(batch, seed)
    plain = StepBatch.of([*batch])
    every = [judge_each(batch, logits.clone()), judge_each(plain, masked(batch, logits, allowed))]
    with begun_rows():
        every.append(begin(batch, logits.clone()).finish())
    return [[said(one), logprobs_of(one), one] for one in every]


@SOME
@given(st.lists(cases(), min_size=1, max_size=4), st.integers(0, 2**32), st.booleans())
def test_masks_come_before_all_other_parameters(found: list[Case], seed: int, is_plain: bool) -> None:
    """Penalties, bias, bad tokens and min_tokens. Log-probabilities are those of the masked distribution."""
    by_masks, by_logits, in_halves = judged_with_and_without(found, seed, is_plain=is_plain)
    assert by_masks[:2] == by_logits[:2]
    assert by_masks[0] == in_halves[0]
    check_alike(by_masks[2], in_halves[2])


# --- where nothing is left --------------------------------------------------------------------------------------------


def step_of(session_id: int, tokens: Sequence[int] = (), **params: Any) -> SessionStep:
    own = SamplingParams(**params)
    return SessionStep(
        session_id, 1, np.array([5], np.int32), own, tree_of(tokens), history=Past(own, 2, END_IDS).history([4, 5])
    )


NOTHING_LEFT: dict[str, tuple[dict[str, Any], int, str]] = {  # parameters, the mask, the reason
    "no token": ({}, 0, "the grammar allows no token there, and no end; position 2"),
    "bad tokens": ({"bad_token_ids": ((3,), (7,))}, 1 << 3 | 1 << 7, "grammar allows only .*bad_token_ids"),
    "min_tokens": ({"min_tokens": 4}, 1 << 0, "grammar allows only .*min_tokens"),
    "bias": ({"logit_bias": ((3, -float("inf")),)}, 1 << 3, "grammar allows only .*logit_bias"),
}


@pytest.mark.parametrize("is_begun", [False, True], ids=["at once", "in halves"])
@each(("kind", "temperature", "strategy"), product(NOTHING_LEFT, [0.0, 0.8], ["deterministic", "probabilistic"]))
def test_where_nothing_is_left_the_session_fails_and_no_other(
    kind: str, temperature: float, strategy: str, is_begun: bool
) -> None:
    params, bits, reason = NOTHING_LEFT[kind]
    others = [step_of(i, [1, 2], temperature=temperature, strategy=strategy, seed=i) for i in (0, 2)]
    failing = step_of(1, [], temperature=temperature, strategy=strategy, **params)
    batch = StepBatch.of([others[0], failing, others[1]])
    batch.masks = ReadyTokenMasks({0: np.full((3, 1), ALL, np.int32), 1: np.array([[bits]], np.int32)}, {})
    logits = packed_logits(batch, 3)
    alone = [
        judge_each([step], logits[rows].clone()) for step, rows in zip(others, (slice(3), slice(4, 7)), strict=True)
    ]
    with begun_rows() if is_begun else nullcontext():
        found = begin(batch, logits).finish() if is_begun else judge_each(batch, logits)
    assert said(found)[0::2] == [one for own in alone for one in said(own)]
    assert found[1].fault is not None

    assert re.search(reason, found[1].fault.reason)


def test_the_reason_of_the_masks_is_said() -> None:
    batch = StepBatch.of([step_of(8)])
    batch.masks = ReadyTokenMasks(
        {8: np.zeros((1, 1), np.int32)}, {8: "the grammar is too complex here: too many states"}
    )
    (judgement,) = judge_each(batch, torch.zeros(1, VOCAB))
    assert judgement.fault is not None
    assert judgement.fault.reason == "the grammar is too complex here: too many states; position 2"


@each("strategy", ["deterministic", "probabilistic", "threshold"])
def test_a_row_out_of_reach_may_have_nothing_left(strategy: str) -> None:
    """Of a rejected node."""
    batch = StepBatch.of([step_of(0, [1], strategy=strategy, temperature=0.8)])
    batch.masks = ReadyTokenMasks({0: np.array([[1 << 2], [0]], np.int32)}, {})
    assert said(judge_each(batch, torch.zeros(2, VOCAB))) == [(0, (), [2], False)]


# --- exact ------------------------------------------------------------------------------------------------------------


def world_of(entropy: int, vocab: int = 3, **params: Any) -> ExactWorld:
    """Return a toy target that follows a random grammar; its drafter knows none."""
    return ExactWorld(
        entropy,
        vocab,
        params=replace(WARM, strategy="probabilistic", **params),
        allows=Automaton(entropy, vocab).allows,
    )


def hangs_from_forbidden(world: ExactWorld, prefix: tuple[int, ...]) -> bool:
    assert world.allows is not None
    return any(prefix[i] not in world.allows(prefix[:i]) for i in range(len(prefix) - 1))


def is_forbidden(world: ExactWorld, prefix: tuple[int, ...]) -> bool:
    assert world.allows is not None
    return prefix[-1] not in world.allows(prefix[:-1])


@each("plan", ["chain", "two candidates", "mixed siblings"])
def test_the_emitted_distribution_is_the_masked_targets(plan: str) -> None:
    """With and without what hangs from forbidden nodes."""
    world = world_of(1)
    assert error(world, *PLANS[plan]) < EXACT
    assert error(world, *PLANS[plan], cut=hangs_from_forbidden) < EXACT


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("cuts", CUTS)
def test_so_it_is_with_other_parameters_in_all_ways(cuts: str) -> None:
    for plan in PLANS:
        assert error(world_of(2, **CUTS[cuts]), *PLANS[plan], cut=hangs_from_forbidden) < EXACT, plan


@each("plan", ["one", "two candidates"])
def test_mutant_a_forbidden_sampled_node_is_cut(plan: str) -> None:
    """Before the step, by its token."""
    assert max(error(world_of(i), *PLANS[plan], cut=is_forbidden, digits=14) for i in range(3)) > 1e-2


def test_the_mutant_gives_7_3_where_5_5_is_right() -> None:
    """A target of (.5, .5, 0), and a drafter of (.5, .1, .4)."""

    class World(ExactWorld):
        def logits(self, prefix: tuple[int, ...]) -> np.ndarray:
            return np.array([0, 0, 3], np.float32)

        def draft(self, prefix: tuple[int, ...]) -> tuple[list[int], list[int]]:
            return [0, 1, 2], [50_000, 10_000, 40_000]

    world = World(0, allows=lambda _: (0, 1), params=replace(WARM, strategy="probabilistic"))
    right = joint_distribution(world, (sampled(),), 1)
    wrong = joint_distribution(world, (sampled(),), 1, cut=is_forbidden)
    assert [right[token,] for token in range(3)] == pytest.approx([0.5, 0.5, 0], abs=EXACT)
    assert [wrong[token,] for token in range(3)] == pytest.approx([0.7, 0.3, 0], abs=1e-3)


# --- planted bugs: each must be seen ---------------------------------------------------------------------------------


def one_row_unmasked(monkeypatch: pytest.MonkeyPatch, rows: str) -> None:
    """Forget the mask of the first or the last row of each step."""
    of = ReadyTokenMasks.of

    def forgetful(self: ReadyTokenMasks, judged: StepBatch) -> MaskedSteps:
        found = {place: own.copy() for place, own in of(self, judged).each()}
        for own in found.values():
            own[0 if rows == "first" else -1] = -1
        return MaskedSteps.of(found)

    monkeypatch.setattr(ReadyTokenMasks, "of", forgetful)


def masked_after_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are chosen by the target's own logits."""
    monkeypatch.setattr(judge_module, "mask", lambda *_: None)
    monkeypatch.setattr(begun, "mask", lambda *_: None)


def unmasked_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities are those of the target without its grammar."""
    mask, with_logprobs, before = judge_module.mask, judge_module.with_logprobs, []

    def kept(placed: Any, logits: np.ndarray) -> None:
        before.append(logits.copy())
        mask(placed, logits)

    monkeypatch.setattr(judge_module, "mask", kept)
    monkeypatch.setattr(judge_module, "with_logprobs", lambda *of: with_logprobs(*of[:-1], before[-1]))


MUTANTS = {
    "the first row": lambda patch: one_row_unmasked(patch, "first"),
    "the last row": lambda patch: one_row_unmasked(patch, "last"),
    "after the choice": masked_after_the_choice,
}


@each("mutant", MUTANTS)
def test_mutants_are_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    for is_begun in (False, True):
        with pytest.raises(AssertionError):
            check_naive(["deterministic"], is_begun, max_examples=30, phases=[Phase.generate])


def test_mutant_logprobs_of_the_unmasked_target(monkeypatch: pytest.MonkeyPatch) -> None:
    unmasked_logprobs(monkeypatch)
    case = Case(step_of(0, [1], logprobs=2), [4, 5], 2)
    assert any(
        by_masks[1] != by_logits[1]
        for by_masks, by_logits, _ in (judged_with_and_without([case], seed) for seed in range(5))
    )
