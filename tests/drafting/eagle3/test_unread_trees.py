"""Trees of an EAGLE-3 head that a step verifies before the host has read them: what is said is the target's own, and
nodes hang where they stood."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from specq.drafting.eagle3.source import EagleSource
from specq.drafting.trees.grown_trees import (
    SHAPES,
    UsualReach,
    batch_of_unread,
    best_shape,
    put_read,
    shapes_for,
)
from specq.protocol import EAGLE, LANES, Open, SamplingParams
from specq.testing.conformance.sources import LENGTH, Serving
from specq.testing.late import LateEngine
from specq.testing.toy import toy_text
from specq.testing.toy_drafters import ToyTrees
from specq.verification import DeviceLines, DeviceTokens
from specq.verifier import StepCurve, Verifier
from specq.verifier.sessions.grafting import batch_of_chains, graft_batch
from specq.verifier.sessions.session import Session
from specq.verifier.sources.unread import UnreadLayout
from specq.verifier.trees import NONE, DraftTrees
from tests.drafting.eagle3.unread import CURVE, DEPTH, SESSIONS, Beside, grown_around, noted
from tests.drafting.medusa.test_medusa import num_accepted
from tests.verifier.sessions import paths
from tests.verifier.test_sources import remote

CONTEXT = np.array([4, 5, 6], np.int32)


@pytest.mark.parametrize(
    ("head", "count", "options", "shape"),
    [
        (ToyTrees(), SESSIONS, {}, {}),  # the host grows trees
        (Beside(), SESSIONS, {"tree": ((0, 0), (1,))}, {}),
        (Beside(), SESSIONS, {}, {"num_candidates": 2}),
    ],
)
def test_others_are_read_first(head: ToyTrees, count: int, options: Any, shape: Any) -> None:
    source = EagleSource(head, 5, **options)
    unread, started = noted(source), Serving([source], lambda verifier: None, engine=LateEngine())
    for i in range(count):
        started.open(i, seed=i, context=[4, 5, 6], **shape)
    assert started.finish() == {i: toy_text([4, 5, 6], LENGTH, i) for i in range(count)}
    assert unread == []
    assert sum(num_accepted(session.stats) for session in started.verifier.sessions.values()) > 0


def test_others_of_the_step_may_have_nodes_that_are_known() -> None:
    """Of sessions that are drafted for by somebody else: what becomes of these is nothing that a head learns from."""
    next_ids = Counter[int]()

    def feed(verifier: Verifier) -> None:
        for session in verifier.sessions.values():
            if session.session_id % 2 and session.takes_drafts:
                tokens = toy_text(session.token_ids, 40, session.params.seed)
                verifier.handle(remote(session, 0, next_ids[session.session_id], tokens), 0.0)
                next_ids[session.session_id] += len(tokens)

    source = EagleSource(Beside(wrong_every=1, blind=True), DEPTH)
    unread, started = noted(source), Serving([source], feed, engine=LateEngine())
    for i in range(4):
        started.open(i, seed=i)
        if i % 2:
            source.refuse(started.verifier.sessions[i])
    assert started.finish() == {i: toy_text([5, 6, 7], LENGTH, i) for i in range(4)}
    assert len(unread) > 20
    assert source in started.verifier.sources.sources
    accepted = [num_accepted(started.verifier.sessions[i].stats) for i in range(4)]
    assert accepted[::2] == [0, 0]
    assert min(accepted[1::2]) > 30
    usual = source._shapes.usual.of(UnreadLayout.of((1,)))
    assert usual is not None
    assert usual[0] < 0.4


def test_unverified_trees_teach_no_acceptance_rates() -> None:
    """Least of all from the nodes of the next step, which others have drafted."""
    source = EagleSource(Beside(), DEPTH)
    unread, started = noted(source), Serving([source], lambda verifier: None, engine=LateEngine())
    for i in range(3):
        started.open(i, seed=i)
    while not unread:
        started.turn()
    started.verifier.planner.max_step_rows = 3  # there is room for no node
    num_unread = len(unread)
    started.turn()
    assert len(unread) == num_unread + 1
    started.verifier.planner.max_step_rows = 512
    for session in started.verifier.sessions.values():
        tokens = toy_text(session.token_ids, 40, session.params.seed)
        started.verifier.handle(remote(session, 0, 0, tokens), 0.0)
    assert started.finish() == {i: toy_text([5, 6, 7], LENGTH, i) for i in range(3)}
    assert source in started.verifier.sources.sources


def test_an_engine_that_must_know_what_it_verifies_gets_chains_that_were_read() -> None:
    class Knowing(LateEngine):
        takes_unread = False

    source = EagleSource(Beside(wrong_every=3), 5)
    unread, started = noted(source), Serving([source], lambda verifier: None, engine=Knowing())
    for i in range(SESSIONS):
        started.open(i, seed=i, context=[4, 5, 6])
    assert started.finish() == {i: toy_text([4, 5, 6], LENGTH, i) for i in range(SESSIONS)}
    assert unread == []


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_what_was_read_hangs_where_it_stood(seed: int, is_compiled: bool) -> None:
    """Of some sessions all levels, of some the first, of some nothing; of one that has nodes of its own, and of one
    whose drafts were forgotten."""
    rng, trees = np.random.default_rng(seed), DraftTrees(is_compiled=is_compiled)
    shape, depths = (3, 4, 2, 1, 2), rng.permutation([5, 5, 2, 0, 1])
    sessions = [
        Session(
            Open(session_id=i, epoch=1, prompt_len=3, tokens_left=50, params=SamplingParams(), token_ids=CONTEXT),
            trees=trees,
        )
        for i in range(len(depths) + 1)
    ]
    grown = grown_around([[7, 8, 9, 10, 11]] * len(depths), shape, 40, rng)
    lines = DeviceLines(None, sum(shape), grown.parents.reshape(-1))
    drafted = DeviceTokens(None, grown.token_ids.reshape(-1), lines)
    layout, likely = UnreadLayout.of(shape), 0.9 ** np.arange(1, 13)
    other = batch_of_chains(sessions[-1:], LANES[EAGLE], np.array([[7, 8]], np.int32), np.array([2]), np.zeros((1, 2)),
    is_measured=True)  # fmt: skip
    graft_batch(other, 0.0)
    graft_batch(batch_of_unread(sessions[:-1], drafted, layout, depths, likely, LANES[EAGLE]), 0.0)
    forgotten = int(depths.argmax())
    sessions[forgotten].forget_drafts()
    depths[forgotten] = 0
    is_free = trees.length == NONE
    roots = trees.first_root[is_free]
    put_read(trees, drafted, grown)
    assert np.array_equal(trees.first_root[is_free], roots)
    for i, depth in enumerate(depths.tolist()):
        expected: dict[int, tuple[int, ...]] = {-1: ()}
        for node in np.flatnonzero(layout.levels < depth).tolist():
            expected[node] = (*expected[int(grown.parents[i, node])], int(grown.token_ids[i, node]))
        assert paths(sessions[i]) == set(expected.values()) - {()}
    assert paths(sessions[-1]) == {(7,), (7, 8)}
    for session in sessions:
        session.close()
    assert trees.num_nodes == 0


# --- the rule
# -----------------------------------------------------------------------------------------------------------------


def test_no_node_is_likelier_than_the_one_before() -> None:
    """So the first nodes of each tree are chosen, for any observations."""
    rng = np.random.default_rng(1)
    for shape in SHAPES:
        layout, usual = UnreadLayout.of(shape), UsualReach(8, 5)
        assert usual.of(layout) is None
        for _ in range(5):
            usual.promise(layout, rng.random((3, len(layout.levels))))
            counts = rng.integers(0, len(layout.levels) + 1, 3)
            usual.learn(layout, counts, rng.random(counts.sum()) < 0.5)
            likely = usual.of(layout)
            assert likely is not None
            assert (np.diff(likely) < 0).all()
            assert 0 < likely[-1] <= likely[0] < 1


def test_what_became_of_nodes_outweighs_what_was_said_of_them() -> None:
    """By level and place, in trees of other shapes too."""
    layout, usual = UnreadLayout.of((2, 1, 1)), UsualReach(8, 5)
    usual.promise(layout, np.full((4, 4), 0.5))
    for _ in range(200):
        usual.learn(layout, np.array([4, 3]), np.array([1, 0, 1, 1, 1, 0, 0], np.bool_))
    found, chain = usual.of(layout), usual.of(UnreadLayout.of((1, 1)))
    assert found is not None
    assert chain is not None
    np.testing.assert_allclose(found, [0.97, 0.88, 0.5, 0.04], atol=0.1)
    np.testing.assert_allclose(chain, found[[0, 2]], atol=0.02)


@pytest.mark.parametrize(
    ("accepted", "num_sessions", "slope", "best"),
    [
        (0.9, 1, 0.0, SHAPES[3]),
        (0.9, 64, 0.0, SHAPES[0]),  # there is no room for others
        (0.9, 8, 0.002, SHAPES[0]),
        (0.05, 1, 0.0, SHAPES[0]),
    ],
)
def test_the_best_shape_is_the_one_with_most_tokens_a_second(
    accepted: float, num_sessions: int, slope: float, best: tuple[int, ...]
) -> None:
    usual = UsualReach(8, 5)
    assert best_shape(num_sessions, 8, usual, CURVE, 0.08) == shapes_for(num_sessions, 8)[-1]
    for shape in SHAPES:
        layout = UnreadLayout.of(shape)
        usual.promise(layout, (accepted ** (1 + layout.levels) / (1 + layout.ranks) ** 2)[None])
    curve = StepCurve([1, 512], [0.005, 0.005 + 511 * slope])
    assert best_shape(num_sessions, 8, usual, curve, 0.08) == best


def test_trees_of_few_levels_are_those_of_many_cut_off() -> None:
    assert shapes_for(1, 3) == [(1, 1, 1), (2, 1, 1), (3, 3, 2), (5, 4, 4)]
    assert shapes_for(1, 1) == [(1,), (2,), (3,), (5,)]
    assert shapes_for(64, 8) == [SHAPES[0]]
