"""Nodes that were drawn: what the session keeps of their distributions, and how likely they are before they are
drawn."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.protocol.messages import Draft, Open
from specq.protocol.params import SamplingParams
from specq.verification import Calibration
from specq.verification.drafting import draw_children
from specq.verifier.sessions.grafting import batch_of, graft_batch, predicted_scores
from specq.verifier.sessions.session import Session
from specq.verifier.trees import MAX_LIVE_NODES, DraftTrees
from tests.verifier.sessions import (
    candidates,
    commit,
    count_round,
    graft,
    in_order_of_choice,
    make_draft,
    make_session,
    tree_of,
)

WARM = SamplingParams(strategy="probabilistic", temperature=1.0)


def make_warm_session(trees: DraftTrees | None = None) -> Session:
    """Return a session of `probabilistic` with the context [1, 2, 3]."""
    token_ids = np.array([1, 2, 3], np.int32)
    message = Open(session_id=7, epoch=1, prompt_len=3, tokens_left=100, params=WARM, token_ids=token_ids)
    return Session(message, (), trees)


def make_drawn(
    tokens: list[int], parents: list[int], rows: list[int], *, first_id: int = 0, scores: list[float] | None = None
) -> Draft:
    """Return a draft of base_len 3 whose draft distributions, one for each row, have twenty tokens each."""
    num_distributions = max(rows) + 1
    predicted = [0.5] * len(tokens) if scores is None else scores
    return Draft(
        session_id=7, epoch=1, lane=0, base_len=3, first_id=first_id, token_ids=np.array(tokens, np.int32),
        parent_ids=np.array(parents, np.int32), scores=np.log(np.array(predicted)).astype(np.float16),
        q_size=20, q_ids=np.tile(np.arange(20, dtype=np.int32), num_distributions),
        q_weights=np.arange(1, 20 * num_distributions + 1, dtype=np.uint16), q_rows=np.array(rows, np.int32),
    )  # fmt: skip


def test_sampled_nodes_keep_their_distribution_and_the_order_of_their_draws() -> None:
    """In the arrays, siblings stand in draw order, each naming its sibling group's distribution."""
    session = make_warm_session()
    graft(session, make_drawn([9, 4, 6, 5], [-1, -1, -1, 1], [0, 0, -1, 1]), 0.0)
    tree = tree_of(session, candidates(session, 0.0))
    assert tree.distributions is not None
    assert tree.token_ids.tolist() == [9, 4, 6, 5]
    assert tree.distributions.rows.tolist() == [0, 0, -1, 1]
    assert tree.distributions.weights[:, 0].tolist() == [1, 21]


def test_a_position_has_one_sampled_sibling_group() -> None:
    """What is sampled there later counts as point masses, after the sibling group in the order of judgement."""
    session = make_warm_session()
    graft(session, make_drawn([9], [-1], [0]), 0.0)
    graft(session, make_drawn([4, 9], [-1, -1], [0, 0], first_id=1), 0.0)
    tree = tree_of(session, candidates(session, 0.0))
    assert tree.distributions is not None
    assert tree.token_ids.tolist() == [9, 4]
    assert tree.distributions.rows.tolist() == [0, -1]
    assert len(tree.distributions.ids) == 1


def test_a_sampled_node_takes_the_place_of_a_point_mass() -> None:
    """It is judged in its place among the draws, and what hangs below the point mass stays."""
    session = make_warm_session()
    graft(session, make_draft(3, 0, [4, 8, 5], [-1, -1, 0], lane=1), 0.0)
    graft(session, make_drawn([9, 4], [-1, -1], [0, 0]), 0.0)
    tree = tree_of(session, candidates(session, 0.0))
    assert tree.distributions is not None
    assert tree.token_ids.tolist() == [9, 4, 8, 5]
    assert tree.distributions.rows.tolist() == [0, 0, -1, -1]
    assert tree.parents.tolist() == [-1, -1, -1, 1]


def test_other_strategies_ignore_distributions() -> None:
    """Only `probabilistic` judges by them."""
    session = make_session()
    graft(session, make_drawn([9, 4], [-1, -1], [0, 0]), 0.0)
    assert tree_of(session, candidates(session, 0.0)).distributions is None


def test_a_draft_with_distributions_fits_as_a_whole_or_not_at_all() -> None:
    """Which of its nodes are kept must not depend on which of them the tree has already."""
    session = make_warm_session()
    tokens = list(range(20))
    for first in range(0, MAX_LIVE_NODES - 15, 20):
        parents = [-1 if first == 0 else first - 20 + i for i in range(20)]
        graft(session, make_draft(3, first, tokens, parents, lane=1), 0.0)
    before = session.num_live
    assert MAX_LIVE_NODES - 20 < before < MAX_LIVE_NODES
    assert graft(session, make_drawn(tokens, [-1] * 20, [0] * 20), 0.0) == 0
    assert session.stats.stale == 20
    assert graft(session, make_drawn(tokens[:3], [-1] * 3, [0] * 3, first_id=50), 0.0) == 0
    assert tree_of(session, candidates(session, 0.0)).distributions is not None


def test_the_acceptance_probability_of_a_sampled_node_is_known_before_it_is_drawn() -> None:
    """It follows from its draft distribution and earlier siblings, as `draw_children` predicts, for any drafter."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = np.sort(rng.permutation(50)[:20]).astype(np.int32)[None]
        weights = rng.integers(1, 65536, (1, 20)).astype(np.uint16)
        drawn = draw_children(ids, weights, 4, rng)
        draft = Draft(
            session_id=7, epoch=1, lane=0, base_len=3, first_id=0, token_ids=np.append(drawn.token_ids[0],
            60).astype(np.int32),
            parent_ids=np.full(5, -1, np.int32), scores=np.log(rng.random(5)).astype(np.float16), q_size=20,
            q_ids=ids[0], q_weights=weights[0], q_rows=np.array([0, 0, 0, 0, -1], np.int32),
        )  # fmt: skip
        assert predicted_scores(draft) == pytest.approx([*drawn.scores[0].tolist(), float(draft.scores[-1])], abs=1e-5)


def test_what_became_of_sampled_nodes_raises_the_chances_of_those_to_come() -> None:
    """In all sessions of a verifier; a bad start takes nothing from what the next one is given."""
    trees = DraftTrees()
    for accepted in (True, False):
        for _ in range(30):
            session = make_warm_session(trees)
            graft(session, make_drawn([9], [-1], [0]), 0.0)
            count_round(session, candidates(session, 0.0), {0} if accepted else set())
        later = make_warm_session(trees)
        graft(later, make_drawn([9], [-1], [0]), 0.0)
        (predicted,) = predicted_scores(make_drawn([9], [-1], [0]))
        (node,) = candidates(later, 0.0)
        assert node.score == pytest.approx(max(predicted, np.log(trees.sampled_calibration.probability(predicted))))
        assert (node.reach_prob > 0.9) if accepted else (np.exp(predicted) * 0.99 < node.reach_prob < 0.6)


def test_a_point_mass_that_is_drawn_gets_the_id_of_its_new_drafter() -> None:
    """So that the drafter that drew it learns what became of it."""
    session = make_warm_session()
    graft(session, make_draft(3, 5, [4], [-1], lane=1), 0.0)
    graft(session, make_drawn([9, 4], [-1, -1], [0, 0]), 0.0)
    assert [(node.lane, node.node_id) for node in candidates(session, 0.0)] == [(0, 0), (0, 1)]


def test_point_masses_come_after_what_was_drawn_beside_them() -> None:
    """However likely their drafter predicts them; and they depend on the last drawn node, as what hangs from that
    does."""
    session = make_warm_session()
    likely = replace(make_draft(3, 0, [8, 5], [-1, 0], lane=1), scores=np.zeros(2, np.float16))
    graft(session, likely, 0.0)
    graft(session, make_drawn([9, 4, 6], [-1, -1, 1], [0, 0, 1]), 0.0)
    nodes = in_order_of_choice(session, candidates(session, 0.0))
    assert [node.token for node in nodes] == [9, 4, 8, 5, 6]
    depends_on = {node.token: node.depends_on and node.depends_on.token for node in nodes}
    assert depends_on == {9: None, 4: 9, 8: 4, 6: 4, 5: 8}


@given(
    st.lists(st.integers(1, 65535), min_size=20, max_size=20),
    st.integers(1, 6),
    st.lists(st.tuples(st.floats(0.01, 1.0), st.booleans()), max_size=30),
)
def test_a_cut_by_probability_takes_the_last_sibling_first(
    weights: list[int], count: int, seen: list[tuple[float, bool]]
) -> None:
    """For any draft distribution and measurement, no sampled node is likelier than its earlier sibling."""
    session = make_warm_session()
    drawn = make_drawn(list(range(count)), [-1] * count, [0] * count)
    graft(session, replace(drawn, q_weights=np.array(weights, np.uint16)), 0.0)
    for predicted, accepted in seen:
        session.lane(0).calibration.observe(np.log(predicted), accepted)
    reaches = [node.reach_prob for node in candidates(session, 0.0)]
    assert reaches == sorted(reaches, reverse=True)
    assert sum(reaches) <= 1 + 1e-9


def test_sampled_lanes_learn_from_judged_nodes_only() -> None:
    """The first was rejected, the second accepted, the third never judged; an unverified one teaches nothing."""
    session = make_warm_session()
    graft(session, make_drawn([9, 4, 5, 8], [-1, -1, -1, 1], [0, 0, 0, 1]), 0.0)
    nodes = candidates(session, 0.0)[:3]
    calibration = session.lane(0).calibration
    count_round(session, nodes, {1})
    commit(session, [4, 7], 3)
    expected = Calibration()
    expected.observe(nodes[0].score, accepted=False)
    expected.observe(nodes[1].score, accepted=True)
    found = [calibration.probability(score) for score in np.log([0.02, 0.05, 0.1, 0.2])]
    assert found == [expected.probability(score) for score in np.log([0.02, 0.05, 0.1, 0.2])]
    assert found != [Calibration().probability(score) for score in np.log([0.02, 0.05, 0.1, 0.2])]


def test_drafts_of_many_sessions_are_grafted_in_one_call() -> None:
    """With the outcome of one after the other: drawn ones, point masses, and what a session does not take."""
    drafts = [
        (0, make_drawn([9, 4, 6, 5], [-1, -1, -1, 1], [0, 0, -1, 1])),
        (1, make_drawn([8, 4], [-1, -1], [0, 0])),
        (2, make_draft(3, 0, [7, 8], [-1, 0])),
        (0, make_draft(3, 0, [4, 8, 5], [-1, -1, 0], lane=1)),
        (1, make_drawn([3], [0], [0], first_id=2)),
    ]
    found = []
    for is_batch in (True, False):
        trees = DraftTrees()
        sessions = [make_warm_session(trees), make_session(trees=trees), make_warm_session(trees)]
        arrived = [(sessions[i], draft) for i, draft in drafts]
        if is_batch:
            added = graft_batch(batch_of(arrived), 0.0).num_added.tolist()
        else:
            added = [graft(session, draft, 0.0) for session, draft in arrived]
        nodes = [node for session in sessions for node in candidates(session, 0.0)]
        drawn_from = [node.distribution and node.distribution.weights.tolist() for node in nodes]
        found.append((added, [(node.lane, node.node_id, node.token, node.reach_prob) for node in nodes], drawn_from))
    assert found[0] == found[1]
    assert sum(found[0][0]) == len(found[0][1]) == 10
    assert sum(weights is not None for weights in found[0][2]) == 3


# --- in which order they are chosen
# ---------------------------------------------------------------------------------------


def order(session: Session, floor: float = 0.0) -> list[tuple[int, int | None]]:
    """Return (token, token of the node that it waited for) in the order of choice."""
    nodes = in_order_of_choice(session, candidates(session, floor))
    return [(node.token, node.depends_on and node.depends_on.token) for node in nodes]


def grow(session: Session) -> None:
    """Two branches: the first drawn node is expanded, then its sibling."""
    graft(session, make_drawn([19, 18], [-1, -1], [0, 0]), 0.0)
    graft(session, make_drawn([5], [0], [0], first_id=2), 0.0)
    graft(session, make_drawn([6], [2], [0], first_id=3), 0.0)
    graft(session, make_drawn([7], [1], [0], first_id=4), 0.0)


def test_a_node_waits_for_all_that_had_been_expanded_before_it() -> None:
    """7 was drawn after 19, 5 and 18 had been expanded; 6 and 5 do not wait for 18, nor anything for 6."""
    session = make_warm_session()
    grow(session)
    waited = dict(order(session))
    assert waited == {19: None, 18: 19, 5: 19, 6: 5, 7: 5}
    assert [token for token, _ in order(session)].index(7) > [token for token, _ in order(session)].index(5)


def test_expansions_are_seen_where_children_are_too_unlikely_to_be_chosen() -> None:
    """7 waits for 5, which was expanded before it, also where 6 is no candidate; and for nothing that is none
    itself."""
    session = make_warm_session()
    grow(session)
    nodes = {node.token: node for node in candidates(session, 0.0)}
    assert nodes[6].reach_prob < nodes[5].reach_prob
    for floor, tokens in ((nodes[6].reach_prob * 1.01, {19, 18, 5, 7}), (nodes[5].reach_prob * 1.01, {19, 18})):
        found = dict(order(session, floor))
        assert set(found) == tokens
        assert found.get(7, 5) == 5


def test_after_a_lost_message_a_node_waits_for_all_before() -> None:
    """It may have shown the expansion of any of them."""
    session = make_warm_session()
    graft(session, make_drawn([19, 18], [-1, -1], [0, 0]), 0.0)
    graft(session, make_drawn([7], [0], [0], first_id=5), 0.0)
    assert order(session) == [(19, None), (18, 19), (7, 18)]


def test_a_node_that_is_sent_again_has_its_new_id() -> None:
    """By which its drafter knows it, and which stands for its place in the order of growth."""
    session = make_warm_session()
    graft(session, make_drawn([19], [-1], [0]), 0.0)
    graft(session, make_drawn([19, 18], [-1, -1], [0, 0], first_id=1), 0.0)
    assert [(node.token, node.node_id) for node in candidates(session, 0.0)] == [(19, 1), (18, 2)]


def test_nodes_that_wait_for_one_another_are_left_out() -> None:
    """No honest drafter sends such; here two nodes are made to."""
    session = make_warm_session()
    graft(session, make_drawn([19, 18], [-1, -1], [0, 0]), 0.0)
    nodes = candidates(session, 0.0)
    depends_on = session.trees.views.depends_on
    depends_on[nodes[0].index], depends_on[nodes[1].index] = nodes[1].index, nodes[0].index
    assert in_order_of_choice(session, nodes) == []
