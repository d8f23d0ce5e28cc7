"""The session tree: drafts are hints, aligned by content."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.drafting.calibration import Calibration
from specq.protocol.messages import Draft, Open
from specq.protocol.params import SamplingParams, Speculation
from specq.verification.drafting import draw_children
from specq.verifier.draft_tree import Chain, tree_of
from specq.verifier.grafting import MAX_LIVE_NODES, graft, predicted_scores
from specq.verifier.prompt_lookup import LOOKUP_TOKENS, lookup_tokens
from specq.verifier.session import Session
from tests.verifier.trees import live_nodes


def make_session(context: list[int] | None = None, tokens_left: int = 100) -> Session:
    """Return a session with a context, [1, 2, 3] by default."""
    token_ids = np.array(context or [1, 2, 3], np.int32)
    return Session(
        Open(
            session_id=7,
            epoch=1,
            prompt_len=len(token_ids),
            tokens_left=tokens_left,
            params=SamplingParams(),
            token_ids=token_ids,
        )
    )


def make_draft(base_len: int, first_id: int, tokens: list[int], parents: list[int], lane: int = 0) -> Draft:
    """Return a draft with scores of log 0.5."""
    scores = np.full(len(tokens), np.log(0.5), np.float16)
    return Draft(
        session_id=7, epoch=1, lane=lane, base_len=base_len, first_id=first_id,
        token_ids=np.array(tokens, np.int32), parent_ids=np.array(parents, np.int32), scores=scores,
    )  # fmt: skip


def paths(session: Session) -> set[tuple[int, ...]]:
    """Return the token paths of all live nodes."""
    found: set[tuple[int, ...]] = set()
    stack = [(node, (token,)) for token, node in session.roots.items()]
    while stack:
        node, path = stack.pop()
        found.add(path)
        stack += [(child, (*path, token)) for token, child in node.children.items()]
    return found


def test_a_chain_hangs_from_the_context() -> None:
    """Nodes graft one below the other."""
    session = make_session()
    assert graft(session, make_draft(3, 0, [4, 5, 6], [-1, 0, 1]), 0.0) == 3
    assert paths(session) == {(4,), (4, 5), (4, 5, 6)}


def test_a_late_draft_keeps_what_the_transcript_agrees_with() -> None:
    """A draft from before two commits loses its first two nodes, and its rest hangs from the new end."""
    session = make_session()
    session.commit([4, 5], 0)
    assert graft(session, make_draft(3, 0, [4, 5, 6, 7], [-1, 0, 1, 2]), 0.0) == 2
    assert paths(session) == {(6,), (6, 7)}


def test_a_contradicted_draft_is_stale() -> None:
    """Nodes below a token that the transcript contradicts are dropped and counted."""
    session = make_session()
    session.commit([9], 0)
    assert graft(session, make_draft(3, 0, [4, 5], [-1, 0]), 0.0) == 0
    assert (session.stats.stale, session.stats.orphans) == (2, 0)


def test_a_child_of_an_unknown_parent_is_an_orphan() -> None:
    """If the message with the parent was lost, the child is dropped."""
    session = make_session()
    assert graft(session, make_draft(3, 5, [4], [4]), 0.0) == 0
    assert session.stats.orphans == 1
    assert session.seen() == (0, 5)


def test_a_draft_beyond_the_context_is_dropped() -> None:
    """A base_len that this verifier has not reached cannot be hung anywhere."""
    session = make_session()
    assert graft(session, make_draft(9, 0, [4], [-1]), 0.0) == 0


def test_a_draft_twice_is_one_draft() -> None:
    """The same message again changes nothing."""
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
    session.commit([4], 1)
    graft(session, make_draft(3, 1, [5], [0], lane=1), 0.0)
    assert paths(session) == {(5,)}


def test_the_branch_of_the_correction_lives_on() -> None:
    """A pre-drafted outcome gives the session live nodes at once; everything else is cut."""
    session = make_session()
    graft(session, make_draft(3, 0, [4, 8, 9, 5], [-1, -1, 1, 0]), 0.0)
    session.commit([8], 1)
    assert paths(session) == {(9,)}
    graft(session, make_draft(4, 4, [10], [2]), 0.0)
    assert paths(session) == {(9,), (9, 10)}


def test_a_miss_empties_the_tree() -> None:
    """A correction that nobody drafted leaves nothing, and children of what was cut are stale."""
    session = make_session()
    graft(session, make_draft(3, 0, [4, 5], [-1, 0]), 0.0)
    session.commit([7], 2)
    assert (paths(session), session.num_live) == (set(), 0)
    graft(session, make_draft(3, 2, [6], [1]), 0.0)
    assert (paths(session), session.stats.stale) == (set(), 1)


def test_candidates_are_calibrated() -> None:
    """A lane whose nodes are contradicted time and again loses its influence, whatever it predicts."""
    session = make_session()
    reaches = []
    for i in range(20):
        graft(session, make_draft(session.length, i, [4], [-1]), 0.0)
        reaches.append(session.candidates(0.0)[0].reach_prob)
        session.commit([5], 0)
    assert reaches[0] == pytest.approx(0.5, abs=0.01)
    assert reaches[-1] < 0.06


def test_a_node_off_the_path_teaches_nothing() -> None:
    """Only nodes whose parent was committed are evidence, verified or not."""
    session = make_session()
    graft(session, make_draft(3, 0, [4, 5, 6], [-1, 0, -1]), 0.0)
    session.count_round(session.candidates(0.0), set())
    session.commit([6], 3)
    assert session.stats.positions == [[2, 0], [1, 0]]
    assert sum(session.lanes[0].calibration._trials) == pytest.approx(2, abs=0.1)


def test_tree_of_keeps_parents_before_children() -> None:
    """Chosen nodes become arrays whose parents point backwards."""
    session = make_session()
    graft(session, make_draft(3, 0, [4, 8, 5], [-1, -1, 0]), 0.0)
    tree = tree_of(session.candidates(0.0))
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
    """Whatever arrives, the transcript is what was committed, and the books agree with the tree."""
    text, events = case
    session = make_session()
    done = 0
    for kind, value in events:
        if kind == "commit":
            assert isinstance(value, int)
            tokens = text[done : done + value]
            done += len(tokens)
            session.commit(tokens, 0)
        else:
            assert isinstance(value, Draft)
            graft(session, value, 0.0)
        live = live_nodes(session)
        assert session.token_ids == [1, 2, 3, *text[:done]]
        assert session.num_live == len(live)
        for node in live:
            assert node.position == (session.length if node.parent is None else node.parent.position + 1)
            assert node.parent is None or node.parent.children[node.token] is node


@pytest.mark.parametrize("cut", range(5))
def test_grafting_before_or_after_a_commit_is_the_same(cut: int) -> None:
    """A chain that arrives late leaves the tree that it would have left in time."""
    chain = [4, 5, 6, 7, 8]
    early, late = make_session(), make_session()
    draft = make_draft(3, 0, chain, [-1, 0, 1, 2, 3])
    graft(early, draft, 0.0)
    early.commit(chain[:cut], 0)
    late.commit(chain[:cut], 0)
    graft(late, draft, 0.0)
    assert paths(early) == paths(late)


# --- sampled nodes ------------------------------------------------------------------------------------------------

WARM = SamplingParams(strategy="probabilistic", temperature=1.0)


def make_warm_session(sampled_calibration: Calibration | None = None) -> Session:
    """Return a session of `probabilistic` with the context [1, 2, 3]."""
    token_ids = np.array([1, 2, 3], np.int32)
    message = Open(session_id=7, epoch=1, prompt_len=3, tokens_left=100, params=WARM, token_ids=token_ids)
    return Session(message, (), sampled_calibration)


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
    tree = tree_of(session.candidates(0.0))
    assert tree.distributions is not None
    assert tree.token_ids.tolist() == [9, 4, 6, 5]
    assert tree.distributions.rows.tolist() == [0, 0, -1, 1]
    assert tree.distributions.weights[:, 0].tolist() == [1, 21]


def test_a_position_has_one_sampled_sibling_group() -> None:
    """What is sampled there later counts as point masses, after the sibling group in the order of judgement."""
    session = make_warm_session()
    graft(session, make_drawn([9], [-1], [0]), 0.0)
    graft(session, make_drawn([4, 9], [-1, -1], [0, 0], first_id=1), 0.0)
    tree = tree_of(session.candidates(0.0))
    assert tree.distributions is not None
    assert tree.token_ids.tolist() == [9, 4]
    assert tree.distributions.rows.tolist() == [0, -1]
    assert len(tree.distributions.ids) == 1


def test_a_sampled_node_takes_the_place_of_a_point_mass() -> None:
    """It is judged in its place among the draws, and what hangs below the point mass stays."""
    session = make_warm_session()
    graft(session, make_draft(3, 0, [4, 8, 5], [-1, -1, 0], lane=1), 0.0)
    graft(session, make_drawn([9, 4], [-1, -1], [0, 0]), 0.0)
    tree = tree_of(session.candidates(0.0))
    assert tree.distributions is not None
    assert tree.token_ids.tolist() == [9, 4, 8, 5]
    assert tree.distributions.rows.tolist() == [0, 0, -1, -1]
    assert tree.parents.tolist() == [-1, -1, -1, 1]


def test_other_strategies_ignore_distributions() -> None:
    """Only `probabilistic` judges by them."""
    session = make_session()
    graft(session, make_drawn([9, 4], [-1, -1], [0, 0]), 0.0)
    assert tree_of(session.candidates(0.0)).distributions is None


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
    assert tree_of(session.candidates(0.0)).distributions is not None


def test_the_acceptance_probability_of_a_sampled_node_is_known_before_it_is_drawn() -> None:
    """It follows from its draft distribution and its earlier siblings: as `draw_children` predicts, whatever the drafter sends."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = np.sort(rng.permutation(50)[:20]).astype(np.int32)[None]
        weights = rng.integers(1, 65536, (1, 20)).astype(np.uint16)
        drawn = draw_children(ids, weights, 4, rng)
        draft = Draft(
            session_id=7, epoch=1, lane=0, base_len=3, first_id=0, token_ids=np.append(drawn.token_ids[0], 60).astype(np.int32),
            parent_ids=np.full(5, -1, np.int32), scores=np.log(rng.random(5)).astype(np.float16), q_size=20,
            q_ids=ids[0], q_weights=weights[0], q_rows=np.array([0, 0, 0, 0, -1], np.int32),
        )  # fmt: skip
        assert predicted_scores(draft) == pytest.approx([*drawn.scores[0].tolist(), float(draft.scores[-1])], abs=1e-5)


def test_what_became_of_sampled_nodes_raises_the_chances_of_those_to_come() -> None:
    """In all sessions of a verifier; a bad start takes nothing from what the next one is given."""
    sampled_calibration = Calibration()
    for accepted in (True, False):
        for _ in range(30):
            session = make_warm_session(sampled_calibration)
            graft(session, make_drawn([9], [-1], [0]), 0.0)
            session.count_round(session.candidates(0.0), {0} if accepted else set())
        later = make_warm_session(sampled_calibration)
        graft(later, make_drawn([9], [-1], [0]), 0.0)
        (predicted,) = predicted_scores(make_drawn([9], [-1], [0]))
        (node,) = later.candidates(0.0)
        assert node.score == pytest.approx(max(predicted, np.log(sampled_calibration.probability(predicted))))
        assert (node.reach_prob > 0.9) if accepted else (np.exp(predicted) * 0.99 < node.reach_prob < 0.6)


def test_a_point_mass_that_is_drawn_gets_the_id_of_its_new_drafter() -> None:
    """So that the drafter that drew it learns what became of it."""
    session = make_warm_session()
    graft(session, make_draft(3, 5, [4], [-1], lane=1), 0.0)
    graft(session, make_drawn([9, 4], [-1, -1], [0, 0]), 0.0)
    assert [(node.lane, node.node_id) for node in session.candidates(0.0)] == [(0, 0), (0, 1)]


def test_point_masses_come_after_what_was_drawn_beside_them() -> None:
    """However likely their drafter predicts them; and they depend on the last drawn node, as what hangs from that does."""
    session = make_warm_session()
    likely = replace(make_draft(3, 0, [8, 5], [-1, 0], lane=1), scores=np.zeros(2, np.float16))
    graft(session, likely, 0.0)
    graft(session, make_drawn([9, 4, 6], [-1, -1, 1], [0, 0, 1]), 0.0)
    nodes = {node.token: node for node in session.candidates(0.0)}
    depends_on = {token: node.depends_on and node.depends_on.token for token, node in nodes.items()}
    assert depends_on == {9: None, 4: 9, 8: 4, 6: 4, 5: 4}
    assert nodes[9].reach_prob >= nodes[4].reach_prob >= nodes[8].reach_prob


@given(
    st.lists(st.integers(1, 65535), min_size=20, max_size=20),
    st.integers(1, 6),
    st.lists(st.tuples(st.floats(0.01, 1.0), st.booleans()), max_size=30),
)
def test_a_cut_by_probability_takes_the_last_sibling_first(
    weights: list[int], count: int, seen: list[tuple[float, bool]]
) -> None:
    """Whatever the draft distribution is and was measured, no sampled node is likelier than its earlier sibling."""
    session = make_warm_session()
    drawn = make_drawn(list(range(count)), [-1] * count, [0] * count)
    graft(session, replace(drawn, q_weights=np.array(weights, np.uint16)), 0.0)
    for predicted, accepted in seen:
        session.lanes[0].calibration.observe(np.log(predicted), accepted)
    reaches = [node.reach_prob for node in session.candidates(0.0)]
    assert reaches == sorted(reaches, reverse=True)
    assert sum(reaches) <= 1 + 1e-9


def test_sampled_lanes_learn_from_judged_nodes_only() -> None:
    """The first was rejected, the second accepted, the third never judged; an unverified one teaches nothing."""
    session = make_warm_session()
    graft(session, make_drawn([9, 4, 5, 8], [-1, -1, -1, 1], [0, 0, 0, 1]), 0.0)
    nodes = session.candidates(0.0)[:3]
    calibration = session.lanes[0].calibration
    session.count_round(nodes, {1})
    session.commit([4, 7], 3)
    expected = Calibration()
    expected.observe(nodes[0].score, accepted=False)
    expected.observe(nodes[1].score, accepted=True)
    found = [calibration.probability(score) for score in np.log([0.02, 0.05, 0.1, 0.2])]
    assert found == [expected.probability(score) for score in np.log([0.02, 0.05, 0.1, 0.2])]
    assert found != [Calibration().probability(score) for score in np.log([0.02, 0.05, 0.1, 0.2])]


def test_a_round_counts_its_leaves_and_its_depth() -> None:
    """N and K as a job reports them."""
    session = make_session()
    graft(session, make_draft(3, 0, [4, 5, 6, 7], [-1, 0, 0, -1]), 0.0)
    session.count_round(session.candidates(0.0), set())
    assert (session.stats.drafted_rounds, session.stats.leaves, session.stats.depths) == (1, 3, 2)


@pytest.mark.parametrize(
    ("speculation", "most"),
    [
        (Speculation(), LOOKUP_TOKENS),
        (Speculation(max_depth=2), 2),
        (Speculation(max_nodes=3, max_depth=5), 3),
        (Speculation(num_candidates=1), 0),
        (Speculation(tree=((0,),)), 0),
        (Speculation(fan_out_miss=(2,)), 0),
        (Speculation(mode="sync"), 0),
        (Speculation(mode="plain"), 0),
    ],
)
def test_prompt_lookup_keeps_to_what_the_job_asks_for(speculation: Speculation, most: int) -> None:
    """A fixed shape is left alone; bounds hold."""
    assert lookup_tokens(speculation) == most


def test_a_chain_counts_like_the_same_nodes_on_a_tree() -> None:
    """Offered in arrays or grafted: the same statistics of a round."""
    grafted, offered = make_session(), make_session()
    graft(grafted, make_draft(3, 0, [4, 5, 6], [-1, 0, 1]), 0.0)
    nodes = live_nodes(grafted)
    grafted.count_round(nodes, {0})
    offered.offer(Chain(np.array([4, 5, 6], np.int32), np.zeros(3, np.float32), np.ones(3)))
    offered.count_chain_round(3, 1)
    assert offered.stats == grafted.stats
    assert offered.stats.positions == [[1, 1], [1, 0], [1, 0]]
