"""A drafter in the verifier's own process."""

import numpy as np
import pytest

from specq.protocol.messages import COLOCATED_LANE, Close, Draft, Verdict
from specq.testing.toy import toy_text
from specq.testing.toy_drafters import ToyProposer
from tests.drafting.draft_model.colocated import PROMPT, World, complete, make, open_session, turn
from tests.verifier.sessions import candidates, live_nodes


def text(verdicts: list[Verdict]) -> list[int]:
    return [token for verdict in verdicts for token in verdict.token_ids.tolist()]


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("wrong_every", [0, 4])
def test_text_is_the_targets_in_fewer_rounds(mode: str, wrong_every: int) -> None:
    """Drafts are there for the next step, in both modes; a synchronous session never waits for them."""
    own = make(ToyProposer(wrong_every=wrong_every))
    open_session(own, mode=mode)
    verdicts = complete(own)
    assert text(verdicts) == toy_text(PROMPT, 50)
    assert len(verdicts) < 30
    assert sum(int(verdict.mask.sum()) for verdict in verdicts) > 20
    assert not sources(own)


@pytest.mark.parametrize(("mode", "strategy"), [("plain", "deterministic"), ("async", "greedy")])
def test_sessions_that_take_no_drafts_get_none(mode: str, strategy: str) -> None:
    """Such sessions decode plainly."""
    own = make()
    open_session(own, mode=mode, strategy=strategy)
    assert len(complete(own)) == 50


def test_closed_and_reopened_sessions_are_followed() -> None:
    """A session that is gone is dropped, one that is opened anew is taken up from where it stands then."""
    own = make()
    open_session(own)
    turn(own)
    turn(own)
    assert sources(own) == {7: own.verifier.sessions[7].token_ids}
    open_session(own, epoch=2)
    turn(own)
    turn(own)
    assert sources(own) == {7: own.verifier.sessions[7].token_ids}
    own.verifier.handle(Close(session_id=7, epoch=2), 0.0)
    own.verifier.begin(0.0)
    assert not sources(own)
    assert not own.verifier.has_work


def test_a_session_may_end_while_it_is_drafted_for() -> None:
    """What was drafted has no effect then."""
    own = make()
    for session_id in (1, 2):
        open_session(own, session_id, seed=session_id)
    turn(own)
    own.verifier.begin(0.0)
    own.verifier.handle(Close(session_id=1, epoch=1), 0.0)
    open_session(own, 2, epoch=2, seed=2)
    first = turn(own)
    assert text(first + complete(own)) == toy_text(PROMPT, 50, 2)


def test_several_sessions_share_a_round() -> None:
    """All texts are right, and rounds are no more than steps."""
    own = make()
    for session_id in (1, 2, 3):
        open_session(own, session_id, seed=session_id)
    verdicts: list[Verdict] = []
    for _ in range(60):
        verdicts += turn(own)
    for session_id in (1, 2, 3):
        mine = [verdict for verdict in verdicts if verdict.session_id == session_id]
        assert text(mine) == toy_text(PROMPT, 50, session_id)
    assert own.drafter.num_passes <= own.verifier.num_steps
    assert own.chains.num_started.count(3) >= 4


def test_drafts_of_others_hang_beside_ours() -> None:
    """A session with a doubtful node of a draft worker takes ours onto the same tree; the text is right, both are
    verified."""
    own = make(ToyProposer(wrong_every=3, blind=True))
    open_session(own)
    verdicts = turn(own)
    for round_number in range(200):
        session = own.verifier.sessions[7]
        others = Draft(
            session_id=7, epoch=1, lane=0, base_len=session.length, first_id=round_number,
            token_ids=np.array([49], np.int32), parent_ids=np.array([-1], np.int32), scores=np.array([-1], np.float16),
        )  # fmt: skip
        own.verifier.handle(others, 0.0)
        verdicts += turn(own)
        if verdicts[-1].finish:
            break
    assert text(verdicts) == toy_text(PROMPT, 50)
    assert any({0, COLOCATED_LANE} <= set(verdict.node_lanes.tolist()) for verdict in verdicts)


def test_no_chain_is_drafted_when_other_drafts_promise_enough() -> None:
    """A tree that promises as much as a chain would is enough; one that is nearly empty is not."""
    own = make()
    open_session(own)
    turn(own)
    turn(own)
    session = own.verifier.sessions[7]
    for count, is_drafted_for in ((1, True), (8, False)):
        others = Draft(
            session_id=7, epoch=1, lane=count, base_len=session.length, first_id=0,
            token_ids=np.array(toy_text(session.token_ids, count), np.int32),
            parent_ids=np.arange(-1, count - 1, dtype=np.int32), scores=np.full(count, -0.01, np.float16),
        )  # fmt: skip
        own.verifier.handle(others, 0.0)
        own.collect()
        own.verifier.policy.promised = 4.0
        own.verifier.begin(0.0)
        before = own.drafter.num_passes
        own.collect()
        assert (own.drafter.num_passes > before) is is_drafted_for


def test_what_a_drawn_tree_promises_is_not_looked_at() -> None:
    """Whether our nodes stand beside it must not depend on its tokens, and so on what hangs from these."""
    own = make()
    open_session(own, strategy="probabilistic", temperature=1.0)
    turn(own)
    session = own.verifier.sessions[7]
    count = 8
    drawn = Draft(
        session_id=7, epoch=1, lane=1, base_len=session.length, first_id=0, token_ids=np.full(count, 9, np.int32),
        parent_ids=np.arange(-1, count - 1, dtype=np.int32), scores=np.full(count, -0.01, np.float16), q_size=1,
        q_ids=np.full(count, 9, np.int32), q_weights=np.full(count, 65535, np.uint16),
        q_rows=np.arange(count, dtype=np.int32),
    )  # fmt: skip
    own.verifier.handle(drawn, 0.0)
    own.collect()
    own.verifier.policy.promised = 4.0
    assert sum(node.reach_prob for node in candidates(session, 0.0)) > own.verifier.policy.promised
    own.verifier.begin(0.0)
    before = own.drafter.num_passes
    own.collect()
    assert own.drafter.num_passes > before


def test_chains_carry_their_lane_beside_those_of_others() -> None:
    """A drafter that has sent something before does not take our nodes for its own."""
    own = make()
    open_session(own)
    turn(own)
    gone = Draft(
        session_id=7, epoch=1, lane=0, base_len=1, first_id=0,
        token_ids=np.array([49], np.int32), parent_ids=np.array([-1], np.int32), scores=np.array([-1], np.float16),
    )  # fmt: skip
    own.verifier.handle(gone, 0.0)
    own.drafter.fan_out = 1
    (verdict,) = turn(own)
    assert verdict.seen == (0, 0, COLOCATED_LANE, len(verdict.node_ids) - 1)
    assert verdict.node_lanes.tolist() == [COLOCATED_LANE] * len(verdict.node_ids)


@pytest.mark.parametrize("speculation", [{"max_depth": 2}, {"max_nodes": 2}])
def test_a_jobs_bounds_are_kept(speculation: dict[str, int]) -> None:
    """No round verifies more than the job allows; levels have three children where only their number is bounded."""
    own = make()
    open_session(own, **speculation)
    verdicts = complete(own)
    assert max(int(verdict.mask.sum()) for verdict in verdicts) == 2
    assert max(len(verdict.node_ids) for verdict in verdicts) == (6 if "max_depth" in speculation else 2)


def test_a_shape_of_its_own_is_left_to_draft_workers() -> None:
    """Without draft workers, such a job decodes plainly."""
    own = make()
    open_session(own, num_candidates=2)
    assert len(complete(own)) == 50


def test_without_room_at_the_drafter_the_others_are_drafted_for() -> None:
    """The session that found none decodes plainly."""
    own = make()
    own.chains.most_sessions = 1
    for session_id in (1, 2):
        open_session(own, session_id, seed=session_id)
    verdicts: list[Verdict] = []
    for _ in range(60):
        verdicts += turn(own)
    rounds = [sum(verdict.session_id == session_id for verdict in verdicts) for session_id in (1, 2)]
    assert min(rounds) < 30
    assert max(rounds) > 40
    for session_id in (1, 2):
        assert text([v for v in verdicts if v.session_id == session_id]) == toy_text(PROMPT, 50, session_id)


def test_drawn_chains_are_judged_as_drawn() -> None:
    """Under `probabilistic` the chain travels with its draft distributions, and is accepted about as often as they
    predict."""
    own = make()
    open_session(own, strategy="probabilistic", temperature=1.0)
    turn(own)
    own.verifier.begin(0.0)
    own.collect()
    nodes = live_nodes(own.verifier.sessions[7])
    assert nodes
    assert all(node.distribution is not None for node in nodes)


def sources(own: World) -> dict[int, list[int]]:
    """Return the contexts that the source of chains holds."""
    return own.chains.drafter.contexts


@pytest.mark.parametrize("fan_out", [1, 3])
def test_a_chain_without_room_is_dropped(fan_out):
    """A text may have come to its end between the beginning of its chain and the step; others get theirs."""
    own = make()
    own.drafter.fan_out = fan_out
    for session_id in (1, 2):
        open_session(own, session_id)
    for _ in range(4):
        turn(own)
    own.verifier.begin(0.0)
    ended, other = (own.verifier.sessions[session_id] for session_id in (1, 2))
    own.verifier.trees.limit[ended.place] = ended.length
    own.collect()
    assert live_nodes(other)
    assert not live_nodes(ended)
