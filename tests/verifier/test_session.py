"""The session tree: drafts are hints, aligned by content."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.drafting.suffix.source import MOST_DEPTH
from specq.drafting.suffix.text_drafts import most_depth
from specq.protocol import COLOCATED_LANE
from specq.protocol.messages import Draft
from specq.protocol.params import Speculation
from specq.verifier.sessions.grafting import batch_of_chains, graft_batch
from tests.verifier.sessions import (
    candidates,
    commit,
    count_round,
    graft,
    live_nodes,
    make_draft,
    make_session,
    paths,
    tree_of,
)


def test_a_context_is_the_transcript_as_it_has_grown() -> None:
    """An engine that evicted a session is given it when it opens it again."""
    session = make_session([1, 2, 3])
    assert session.context().tolist() == [1, 2, 3]
    session.token_ids += [4, 5]
    assert session.context().tolist() == [1, 2, 3, 4, 5]


def test_a_chain_hangs_from_the_context() -> None:
    """Nodes graft one below the other."""
    session = make_session()
    assert graft(session, make_draft(3, 0, [4, 5, 6], [-1, 0, 1]), 0.0) == 3
    assert paths(session) == {(4,), (4, 5), (4, 5, 6)}


def test_a_late_draft_keeps_what_the_transcript_agrees_with() -> None:
    """A draft from before two commits loses its first two nodes, and its rest hangs from the new end."""
    session = make_session()
    commit(session, [4, 5], 0)
    assert graft(session, make_draft(3, 0, [4, 5, 6, 7], [-1, 0, 1, 2]), 0.0) == 2
    assert paths(session) == {(6,), (6, 7)}


def test_a_contradicted_draft_is_stale() -> None:
    """Nodes below a token that the transcript contradicts are dropped and counted."""
    session = make_session()
    commit(session, [9], 0)
    assert graft(session, make_draft(3, 0, [4, 5], [-1, 0]), 0.0) == 0
    assert (session.stats.stale, session.stats.orphans) == (2, 0)


def test_a_child_of_an_unknown_parent_is_an_orphan() -> None:
    """If the message with the parent was lost, the child is dropped."""
    session = make_session()
    assert graft(session, make_draft(3, 5, [4], [4]), 0.0) == 0
    assert session.stats.orphans == 1
    assert session.trees.seen(session.place) == (0, 5)


def test_a_draft_beyond_the_context_is_dropped() -> None:
    """A base_len that this verifier has not reached cannot be hung anywhere."""
    session = make_session()
    assert graft(session, make_draft(9, 0, [4], [-1]), 0.0) == 0


def test_a_draft_twice_is_one_draft() -> None:
    """The repeated message does not change the tree."""
    session = make_session()
    draft = make_draft(3, 0, [4, 5], [-1, 0])
    graft(session, draft, 0.0)
    assert graft(session, draft, 0.0) == 0
    assert paths(session) == {(4,), (4, 5)}


def test_lanes_share_the_tree() -> None:
    """The same token from two lanes is one node, and both may go on from it."""
    session = make_session()
    graft(session, make_draft(3, 0, [4], [-1], lane=0), 0.0)
    graft(session, make_draft(3, 0, [4, 5], [-1, 0], lane=1), 0.0)
    graft(session, make_draft(3, 1, [6], [0], lane=0), 0.0)
    assert paths(session) == {(4,), (4, 5), (4, 6)}


def test_a_lane_knows_its_nodes_after_they_are_committed_through_another() -> None:
    """A node that two lanes drafted stays a parent for both once it is part of the transcript."""
    session = make_session()
    graft(session, make_draft(3, 0, [4], [-1], lane=0), 0.0)
    graft(session, make_draft(3, 0, [4], [-1], lane=1), 0.0)
    commit(session, [4], 1)
    graft(session, make_draft(3, 1, [5], [0], lane=1), 0.0)
    assert paths(session) == {(5,)}


def test_the_branch_of_the_correction_lives_on() -> None:
    """A pre-drafted outcome gives the session live nodes at once; everything else is cut."""
    session = make_session()
    graft(session, make_draft(3, 0, [4, 8, 9, 5], [-1, -1, 1, 0]), 0.0)
    commit(session, [8], 1)
    assert paths(session) == {(9,)}
    graft(session, make_draft(4, 4, [10], [2]), 0.0)
    assert paths(session) == {(9,), (9, 10)}


def test_a_miss_empties_the_tree() -> None:
    """A correction that was not drafted empties it, and children of removed nodes are stale."""
    session = make_session()
    graft(session, make_draft(3, 0, [4, 5], [-1, 0]), 0.0)
    commit(session, [7], 2)
    assert (paths(session), session.num_live) == (set(), 0)
    graft(session, make_draft(3, 2, [6], [1]), 0.0)
    assert (paths(session), session.stats.stale) == (set(), 1)


def test_candidates_are_calibrated() -> None:
    """A lane whose nodes are rejected repeatedly loses its influence, for any prediction."""
    session = make_session()
    reaches = []
    for i in range(20):
        graft(session, make_draft(session.length, i, [4], [-1]), 0.0)
        reaches.append(candidates(session, 0.0)[0].reach_prob)
        commit(session, [5], 0)
    assert reaches[0] == pytest.approx(0.5, abs=0.01)
    assert reaches[-1] < 0.06


def test_a_node_off_the_path_is_not_learned() -> None:
    """Only nodes whose parent was committed are evidence, verified or not."""
    session = make_session()
    graft(session, make_draft(3, 0, [4, 5, 6], [-1, 0, -1]), 0.0)
    count_round(session, candidates(session, 0.0), set())
    commit(session, [6], 3)
    assert session.stats.positions == [[2, 0], [1, 0]]
    assert sum(session.lane(0).calibration._trials) == pytest.approx(2, abs=0.1)


def test_tree_of_keeps_parents_before_children() -> None:
    """Chosen nodes become arrays whose parents point backwards."""
    session = make_session()
    graft(session, make_draft(3, 0, [4, 8, 5], [-1, -1, 0]), 0.0)
    tree = tree_of(session, candidates(session, 0.0))
    assert tree.parents.tolist() == [-1, -1, 0]
    assert tree.token_ids.tolist() == [4, 8, 5]
    assert tree.depths().tolist() == [1, 1, 2]


def test_live_nodes_are_bounded() -> None:
    """A flood of drafts fills the session's share and no more."""
    session = make_session()
    for i in range(100):
        graft(session, make_draft(3, i * 20, list(range(i * 20, i * 20 + 20)), [-1] * 20), 0.0)
    assert session.num_live == 512


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], list[tuple[str, object]]]:
    """Return a text, and a shuffled, lossy, doubled schedule of drafts and commits along it."""
    text = draw(st.lists(st.integers(0, 3), min_size=12, max_size=24))
    events: list[tuple[str, object]] = []
    for _ in range(draw(st.integers(1, 25))):
        if draw(st.booleans()):
            events.append(("commit", draw(st.integers(1, 3))))
        else:
            size = draw(st.integers(1, 4))
            first = draw(st.integers(0, 30))
            tokens = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
            parents = [draw(st.integers(-1, first + i - 1)) for i in range(size)]
            base = draw(st.integers(3, 15))
            events.append(("draft", make_draft(base, first, tokens, parents, draw(st.integers(0, 1)))))
    return text, events


@given(schedules())
def test_no_schedule_of_drafts_changes_the_transcript(case: tuple[list[int], list[tuple[str, object]]]) -> None:
    """For any arrivals, the transcript equals the committed tokens, and the records agree with the tree."""
    text, events = case
    session = make_session()
    done = 0
    for kind, value in events:
        if kind == "commit":
            assert isinstance(value, int)
            tokens = text[done : done + value]
            done += len(tokens)
            commit(session, tokens, 0)
        else:
            assert isinstance(value, Draft)
            graft(session, value, 0.0)
        live = list(live_nodes(session))
        assert session.token_ids == [1, 2, 3, *text[:done]]
        assert session.num_live == len(live)
        for node in live:
            assert node.position == (session.length if node.parent is None else node.parent.position + 1)
            assert [other.token for other in live if other.parent == node.parent].count(node.token) == 1


@pytest.mark.parametrize("cut", range(5))
def test_grafting_before_or_after_a_commit_is_the_same(cut: int) -> None:
    """A chain that arrives late leaves the tree that it would have left in time."""
    chain = [4, 5, 6, 7, 8]
    early, late = make_session(), make_session()
    draft = make_draft(3, 0, chain, [-1, 0, 1, 2, 3])
    graft(early, draft, 0.0)
    commit(early, chain[:cut], 0)
    commit(late, chain[:cut], 0)
    graft(late, draft, 0.0)
    assert paths(early) == paths(late)


def test_a_round_counts_its_leaves_and_its_depth() -> None:
    """N and K as a job reports them."""
    session = make_session()
    graft(session, make_draft(3, 0, [4, 5, 6, 7], [-1, 0, 0, -1]), 0.0)
    count_round(session, candidates(session, 0.0), set())
    assert (session.stats.drafted_rounds, session.stats.leaves, session.stats.depths) == (1, 3, 2)


@pytest.mark.parametrize(
    ("speculation", "most"),
    [
        (Speculation(), MOST_DEPTH),
        (Speculation(max_depth=2), 2),
        (Speculation(max_nodes=3, max_depth=5), 3),
        (Speculation(num_candidates=1), 0),
        (Speculation(tree=((0,),)), 0),
        (Speculation(fan_out_miss=(2,)), 0),
        (Speculation(mode="sync"), 0),
        (Speculation(mode="plain"), 0),
    ],
)
def test_suffix_decoding_keeps_to_what_the_job_asks_for(speculation: Speculation, most: int) -> None:
    """A fixed shape is left alone; bounds hold."""
    assert most_depth(make_session(speculation=speculation), MOST_DEPTH) == most


def test_a_chain_counts_like_the_same_nodes_on_a_tree() -> None:
    """From the colocated drafter, for all sessions at once, or grafted as a draft: the same statistics of a round."""
    grafted, chained = make_session(), make_session()
    graft(grafted, make_draft(3, 0, [4, 5, 6], [-1, 0, 1]), 0.0)
    tokens, scores = np.array([[4, 5, 6]], np.int32), np.zeros((1, 3), np.float32)
    graft_batch(batch_of_chains([chained], COLOCATED_LANE, tokens, np.array([3]), scores, is_measured=True), 0.0)
    for session in (grafted, chained):
        count_round(session, live_nodes(session), {0})
    assert chained.stats == grafted.stats
    assert chained.stats.positions == [[1, 1], [1, 0], [1, 0]]
