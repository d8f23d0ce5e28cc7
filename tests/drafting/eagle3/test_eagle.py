"""An EAGLE-3 head as a source: its input rows, its trees, and texts that equal the target's for any drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specq.drafting import Pending
from specq.drafting.eagle3.source import EagleSource
from specq.drafting.trees.interface import Grown, TreeRequest
from specq.drafting.trees.ranked import Ranked
from specq.protocol import (
    EAGLE,
    LANES,
    SamplingParams,
    Speculation,
)
from specq.testing.conformance.sources import LENGTH, Serving
from specq.testing.growth import Growth
from specq.testing.toy import toy_text
from specq.testing.toy_drafters import ToyTrees
from specq.verifier import StepCurve, Verifier
from tests.drafting.medusa.test_medusa import (
    TappedMemoryless,
    _open,
    kept,
    num_accepted,
    origins_with,
    random_heads,
    tiny,
)
from tests.verification.test_draft_distributions import LIMIT, PAIR_LIMIT, chi_squares

__all__ = ["random_heads", "tiny"]  # fixtures


ASYNC = Speculation()


CURVE = StepCurve([1, 64], [0.005, 0.006])


def serving(head: ToyTrees, tree: tuple[tuple[int, ...], ...] = (), **options: Any) -> tuple[Serving, EagleSource]:
    source = EagleSource(head, 5, tree)
    return Serving([source], lambda verifier: None, **options), source


# --- rounds
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("wrong_every", [0, 2, 3, 5])
@pytest.mark.parametrize("max_step_rows", [4, 512])
def test_the_head_is_given_each_row_of_a_text(mode: str, wrong_every: int, max_step_rows: int) -> None:
    """The prompt's, in chunks of any size, and those of the accepted path, wherever in the tree it ended: the toy head
    fails on any other. Each round but the prompt's own has drafts, where there is room."""
    head = ToyTrees(wrong_every=wrong_every)
    started, source = serving(head, max_step_rows=max_step_rows)
    context = list(range(3, 12))
    for i in range(3):
        started.open(i, seed=i, mode=mode, context=context)
    assert started.finish() == {i: toy_text(context, LENGTH, i) for i in range(3)}
    assert kept(started, source)
    assert len(head.num_started) > LENGTH / 6
    stats = started.verifier.sessions[0].stats
    num_rounds = LENGTH - num_accepted(stats)
    if max_step_rows < 512:
        return
    assert LENGTH / num_rounds > (4.5 if wrong_every == 0 else 1.9)
    assert stats.drafted_rounds >= num_rounds - 2  # not the first, nor where only the last token is left


def test_what_is_accepted_is_eagles() -> None:
    names, lanes, judged = origins_with(EagleSource(ToyTrees()))
    assert names.count(EAGLE) > 12
    assert lanes == {LANES[EAGLE]}
    assert judged[EAGLE][1] == names.count(EAGLE)


def test_scores_are_calibrated_in_the_lane() -> None:
    """A head that predicts 0.7 and is always wrong loses trust step by step."""
    started, source = serving(ToyTrees(wrong_every=1, blind=True))
    started.open(0)
    started.finish()
    assert kept(started, source)
    lane = started.verifier.sessions[0].lane(LANES[EAGLE])
    assert lane is not None
    assert lane.calibration.probability(float(np.log(0.7))) < 0.1


def test_what_others_committed_is_not_drafted_for() -> None:
    """Where the head does not know the end of a text, it stands back; it goes on where rows come again."""
    head = ToyTrees()
    started, source = serving(head)
    started.open(0)
    session = started.verifier.sessions[0]
    assert not source.begin([session], None, 0.0)  # type: ignore[arg-type]
    started.turn()
    session.token_ids.append(1)
    assert not source.begin([session], None, 0.0)  # type: ignore[arg-type]
    session.token_ids.pop()
    assert source.begin([session], None, 0.0)  # type: ignore[arg-type]
    assert head.num_started == [1]


def test_jobs_without_drafts_have_no_cost() -> None:
    """No rows of their prompts are requested, and no state is kept."""
    head = ToyTrees()
    started, source = serving(head)
    started.open(0, mode="plain")
    assert not source.wants_prompt(started.verifier.sessions[0])
    started.turn()
    assert not head.texts
    started.finish()
    assert not head.num_started


def test_a_job_gets_the_tree_that_it_asks_for() -> None:
    """As deep as the configuration allows; else the configured one, else best first."""
    for tree, shape, expected in (
        ((), {"tree": ((0,), (0, 0), (1,), (1, 0))}, {(0,), (0, 0), (1,), (1, 0)}),
        ((), {"tree": ((0,) * 9,)}, {(0,) * n for n in range(1, 6)}),
        (((0, 1), (2,)), {}, {(0,), (1,), (2,), (0, 0), (0, 1)}),
        (((0, 1), (2,)), {"max_depth": 1}, {(0,), (1,), (2,)}),
        ((), {"num_candidates": 2, "max_depth": 2}, {(0,), (0, 0), (1,), (1, 0)}),
    ):
        started, source = serving(ToyTrees(), tree)
        started.open(0, **shape)
        started.turn()
        session = started.verifier.sessions[0]
        assert source.begin([session], None, 0.0)  # type: ignore[arg-type]
        (batch,) = source.collect([session], None, lambda: 0.0)  # type: ignore[arg-type]
        assert paths_of(batch, session.token_ids) == expected


def paths_of(batch: Any, context: Sequence[int]) -> set[tuple[int, ...]]:
    """The paths of ranks of a toy batch's nodes: a toy head's choice of rank r is the right token plus r."""
    found: list[tuple[tuple[int, ...], list[int]]] = []
    for token, parent in zip(batch.token_ids.tolist(), batch.parent_ids.tolist(), strict=True):
        ranks, text = found[parent] if parent >= 0 else ((), list(context))
        right = toy_text(text, 1)[0]
        rank = 0 if token == right else (token - 1 - right) % 49 + 1
        found.append(((*ranks, rank), [*text, token]))
    return {ranks for ranks, _ in found}


def test_many_sessions_have_trees_of_fewer_levels() -> None:
    """Since each has few nodes; a job that asks for nodes, or for a shape, has as many levels as it may."""
    asked: list[TreeRequest] = []

    class Asked(ToyTrees):
        def start(self, requests: Sequence[TreeRequest]) -> list[Pending[Grown]]:
            asked.extend(requests)
            return super().start(requests)

    for count, shape, expected in (
        (1, {}, {8}),
        (40, {}, {5}),
        (40, {"max_nodes": 8}, {8}),
        (40, {"max_depth": 3}, {3}),
    ):
        asked.clear()
        source = EagleSource(Asked(), 8)
        started = Serving([source], lambda verifier: None)
        for i in range(count):
            started.open(i, seed=i, **shape)
        started.turn()
        sessions = list(started.verifier.sessions.values())
        asked.clear()
        assert source.begin(sessions, None, 0.0)  # type: ignore[arg-type]
        assert {request.depth for request in asked} == expected
        assert sum(len(request.session_ids) for request in asked) == count


# --- with a real model
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_paused_head_receives_no_states_and_drafts_after_the_gap(mode: str) -> None:
    """From the fifth to the fifteenth turn, unless a synchronous session asks for it; the text is the target's."""
    started, source = serving(ToyTrees(wrong_every=1, blind=True))
    started.open(0, mode=mode)
    head, given = source.head, list[int]()
    assert isinstance(head, ToyTrees)
    for turn in range(30):
        started.verifier.policy.asleep = frozenset([EAGLE] if 5 <= turn < 15 else [])
        before = head.known(0)
        started.turn()
        given.append(head.known(0) - before)
    assert all(given[:5])
    assert (sum(given[6:15]) > 0) == (mode == "sync"), "a step in flight may still be shown to it"
    assert given[15] >= (1 if mode == "sync" else 10), "it goes on behind the gap"
    assert all(given[16:])
    num_drafted = sum(head.num_started)
    assert started.finish() == {0: toy_text([5, 6, 7], LENGTH)}
    assert sum(head.num_started) > num_drafted


# --- distributions
# --------------------------------------------------------------------------------------------------------


class FixedTrees(ToyTrees):
    """Say of every place the same: the tokens in this order."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        self.order = np.array(order, np.int32)
        self.ends: dict[int, int] = {}

    def observe(self, values: Any, followed: Any) -> None:
        self.ends |= {one.session_id: one.first + len(one.rows) for one in followed}

    def known(self, session_id: int) -> int:
        return self.ends.get(session_id, 0)

    def growth(self, request: TreeRequest) -> Growth:
        self.shape: tuple[int, ...] = len(request.session_ids), 1
        return self

    def ranked(self, count: int) -> Ranked:
        own = self.order[:count]
        token_ids = np.broadcast_to(own, (*self.shape, len(own)))
        return Ranked(token_ids, np.broadcast_to(np.log(np.full(len(own), 0.3, np.float32)), token_ids.shape))

    def expand(self, parents: Any, token_ids: Any) -> None:
        self.shape = parents.shape


@pytest.mark.slow
@pytest.mark.parametrize("order", [[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]], ids=["good", "bad"])
@pytest.mark.parametrize("speculation", [ASYNC, Speculation(mode="sync"), Speculation(tree=((0, 0, 0), (1, 1), (2,)))])
@pytest.mark.parametrize("strategy", ["probabilistic", "deterministic"])
def test_the_text_has_the_targets_distribution(order: list[int], speculation: Speculation, strategy: str) -> None:
    """A head chooses nodes by content, so these are point masses; whatever they are, tokens and pairs of tokens are as
    the target draws them."""
    tokens: list[int] = []
    accepted = 0
    for seed in (1, 2):
        verifier = Verifier(
            TappedMemoryless(), CURVE, [EagleSource(FixedTrees(order), 3)], incarnation=1, measures_drafts=False
        )
        params = SamplingParams(max_tokens=750, temperature=1.0, seed=seed, strategy=strategy)
        verifier.handle(_open(seed, params, speculation, [5, 6, 7]), 0.0)
        session = verifier.sessions[seed]
        while not session.finish:
            verifier.begin(0.0)
            verifier.step(lambda: 0.0)
            session.journaled = session.length
            verifier.heartbeat()
        tokens += session.token_ids[3:]
        accepted += num_accepted(session.stats)
    assert accepted > 50
    singles, pairs = chi_squares(tokens)
    assert singles < LIMIT
    assert pairs < PAIR_LIMIT
