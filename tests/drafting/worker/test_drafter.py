"""The drafter's tree: grown best first, re-rooted by verdicts, sent again when it was lost."""

import numpy as np
import pytest

from specq.drafting import CONTEXT, Children, Expansion
from specq.drafting.worker.draft_nodes import NOT_SENT, ROOT
from specq.drafting.worker.session import LOST_AFTER, DraftSession, chains_of, drafts_of
from specq.protocol.draft_checks import reason_against
from specq.protocol.errors import EngineError, ProtocolError
from specq.protocol.messages import Assign, Close, Release, Verdict, Verdicts
from specq.protocol.params import SamplingParams, Speculation
from specq.protocol.types import DraftDistribution
from specq.protocol.wire import decode, encode
from specq.testing.toy import VOCAB, toy_text
from specq.testing.toy_drafters import ToyProposer
from tests.drafting.worker.sessions import PROMPT, make_drafter, passes, verdict


def test_the_first_pass_drafts_what_follows_the_context() -> None:
    """The context is expanded first: fan_out children, at base_len."""
    (draft,) = make_drafter(fan_out=3).step()
    assert (draft.base_len, draft.first_id, draft.parent_ids.tolist()) == (3, 0, [-1, -1, -1])
    assert draft.token_ids[0] == toy_text(PROMPT, 1)[0]


def test_passes_go_deeper_along_the_likeliest_path() -> None:
    """After a few passes the chain of first choices is drafted to `max_ahead`, and no further."""
    drafter = make_drafter(max_ahead=5)
    passes(drafter, 20)
    chain = []
    tree, node = drafter.sessions[7].tree, ROOT
    while tree.below(node):
        node = tree.below(node)[0]
        chain.append(tree.token_ids[node])
    assert chain == toy_text(PROMPT, 5)
    assert not drafter.has_work


def test_node_ids_are_sent_in_order_and_parents_first() -> None:
    """Ids count on over messages, and each parent was sent before or with its child."""
    sent = passes(make_drafter(), 6)
    known = {-1}
    expected = 0
    for draft in sent:
        assert draft.first_id == expected
        for node_id, parent_id in enumerate(draft.parent_ids.tolist(), draft.first_id):
            assert parent_id in known
            known.add(node_id)
        expected += len(draft.token_ids)
    assert len(known) > 10


def test_a_verdict_moves_the_root_and_keeps_the_branch() -> None:
    """What was drafted below the committed path stays, and is not sent again."""
    drafter = make_drafter()
    passes(drafter, 4)
    text = toy_text(PROMPT, 3)
    session = drafter.sessions[7]
    before = len(session.tree)
    drafter.handle(verdict(3, text[:2]))
    tree = session.tree
    assert session.length == 5
    assert 0 < len(tree) < before
    assert text[2] in [tree.token_ids[node] for node in tree.below(ROOT)]
    assert all(tree.wire_ids[node] != NOT_SENT for node in tree.below(ROOT))


def test_a_verdict_that_surprises_starts_anew() -> None:
    """After a token that was not drafted, the next draft hangs from the new context."""
    drafter = make_drafter()
    passes(drafter, 4)
    drafter.handle(verdict(3, [49]))
    (draft,) = drafter.step()
    assert (draft.base_len, set(draft.parent_ids.tolist())) == (4, {-1})


@pytest.mark.parametrize("message", [verdict(2, [7]), verdict(9, [1]), verdict(3, [1], epoch=2)])
def test_old_and_foreign_verdicts_are_ignored(message: Verdict) -> None:
    """What is known already, what leaves a gap, and what is of another epoch is passed over."""
    drafter = make_drafter()
    drafter.handle(message)
    assert drafter.sessions[7].token_ids == PROMPT


def test_an_overlapping_verdict_adds_its_delta() -> None:
    """A verdict that was sent again commits only what lies beyond the known."""
    drafter = make_drafter()
    drafter.handle(verdict(3, [8, 9]))
    drafter.handle(verdict(3, [8, 9, 10]))
    assert drafter.sessions[7].token_ids == [*PROMPT, 8, 9, 10]


def test_what_was_lost_is_sent_again() -> None:
    """If verdicts repeatedly use none of the sent nodes, the live nodes are sent under new ids."""
    drafter = make_drafter(max_tokens=1000)
    sent = passes(drafter, 12)
    text = toy_text(PROMPT, LOST_AFTER + 8)
    for i in range(LOST_AFTER):
        drafter.handle(verdict(3 + i, [text[i]]))
    again = drafter.step()[0]
    assert again.first_id == sent[-1].first_id + len(sent[-1].token_ids)
    assert again.token_ids[0] == text[LOST_AFTER]
    assert again.base_len == 3 + LOST_AFTER


def test_where_no_node_pays_the_drafter_backs_off() -> None:
    """With a minimum acceptance probability that no node reaches it sends nothing, and drafts one token ahead ever more
    rarely; it comes back when the minimum falls."""
    drafter = make_drafter(max_tokens=1000)
    text = toy_text(PROMPT, 200)
    busy = []
    for i in range(100):
        drafter.handle(verdict(3 + i, [text[i]], min_accept_prob=1000))
        busy.append(drafter.has_work)
        assert passes(drafter, 4) == []
    assert [i for i, b in enumerate(busy) if b] == [0, 1, 4, 11, 26, 57, 88]
    sent = []
    for i in range(100, 133):
        drafter.handle(verdict(3 + i, [text[i]], min_accept_prob=100))
        sent += passes(drafter, 2)
    assert sent


def test_a_drafter_that_is_asked_for_more_than_there_can_be_is_silent() -> None:
    """It has nothing to do, for sessions that are assigned meanwhile neither, and drafts again with the first verdict
    that asks for less: no backoff has built up."""
    drafter = make_drafter(max_tokens=1000)
    text = toy_text(PROMPT, 200)
    for i in range(100):
        drafter.handle(verdict(3 + i, [text[i]], min_accept_prob=9999))
        assert not drafter.has_work
    drafter.handle(
        Assign(
            session_id=8, epoch=1, lane=0, prompt_len=3, params=SamplingParams(), token_ids=np.array(PROMPT, np.int32)
        )
    )
    assert not drafter.has_work
    drafter.handle(verdict(103, [text[100]], min_accept_prob=100))
    assert passes(drafter, 2)


def test_a_synchronous_round_is_always_drafted() -> None:
    """Its verifier waits for it."""
    drafter = make_drafter(max_tokens=1000, speculation=Speculation(mode="sync"))
    passes(drafter, 40)
    drafter.handle(verdict(3, [toy_text(PROMPT, 1)[0]], min_accept_prob=9999))
    assert drafter.has_work


def test_the_floor_follows_the_minimum_acceptance_probability() -> None:
    """No node below the square of the minimum is sent."""
    for min_accept_prob in (200, 500, 900):
        drafter = make_drafter(max_tokens=1000)
        drafter.handle(verdict(3, [49], min_accept_prob=min_accept_prob))
        sent = [score for draft in passes(drafter, 20) for score in draft.scores.tolist()]
        assert bool(sent) == (min_accept_prob < 900)
        tree = drafter.sessions[7].tree
        pairs = zip(tree.log_reach_probs, tree.wire_ids, strict=True)
        reaches = [reach - tree.log_reach_probs[ROOT] for reach, wire_id in pairs if wire_id != NOT_SENT]
        assert min(reaches, default=0.0) >= 2 * np.log(min_accept_prob / 1000) - 1e-6


def test_drafts_stop_before_the_token_limit() -> None:
    """The last token is the target's own; the one before it may be drafted."""
    drafter = make_drafter(max_tokens=3)
    sent = passes(drafter, 20)
    tree = drafter.sessions[7].tree
    assert sent
    assert max(map(tree.depth, tree.by_level())) == 3 - 1


def test_a_finished_or_released_session_is_forgotten() -> None:
    """The drafter and the proposer keep no state of it."""
    drafter = make_drafter()
    drafter.handle(Release(session_id=7, epoch=0))
    assert 7 in drafter.sessions
    drafter.handle(Release(session_id=7, epoch=1))
    assert drafter.sessions == {}
    assert isinstance(drafter.drafter, ToyProposer)
    assert drafter.drafter.contexts == {}


def test_a_failed_pass_forgets_its_sessions() -> None:
    """The drafter lives on; the broker will assign again what its heartbeat lacks."""

    class Full(ToyProposer):
        def expand(self, requests):
            raise EngineError("no KV slots")

    drafter = make_drafter()
    drafter.drafter, full = Full(), drafter.drafter
    assert isinstance(full, ToyProposer)
    assert drafter.step() == []
    assert drafter.sessions == {}
    assert len(drafter.heartbeat().session_ids) == 0


def test_other_messages_are_refused() -> None:
    """A message that is not for a drafter is a ProtocolError."""
    with pytest.raises(ProtocolError, match="does not accept close"):
        make_drafter().handle(Close(session_id=7, epoch=1))


def test_many_sessions_share_a_pass() -> None:
    """Each session is expanded in the first pass, for any width."""
    drafter = make_drafter(width=2)
    for session_id in range(10, 20):
        drafter.handle(
            Assign(
                session_id=session_id, epoch=1, lane=0, prompt_len=3, params=SamplingParams(),
                token_ids=np.array(PROMPT, np.int32),
            )
        )  # fmt: skip
    assert len(drafter.step()) == 11


# --- drawn nodes --------------------------------------------------------------------------------------------------


def test_drawn_nodes_travel_with_the_distribution_of_their_sibling_group() -> None:
    """Well-formed for the verifier, and every token in its own draft distribution."""
    for draft in passes(make_drafter(strategy="probabilistic"), 6):
        assert draft.q_size > 0
        assert reason_against(draft, VOCAB) == ""


def test_a_distribution_travels_only_with_all_earlier_siblings() -> None:
    """A node that is sent later than its first sibling, when the minimum is lower, is sent as a point mass."""
    drafter = make_drafter(strategy="probabilistic", fan_out=4)
    session = drafter.sessions[7]
    session.floor = np.log(0.3)
    (first,) = drafter.step()
    assert first.q_rows.tolist() == [0] * len(first.token_ids)
    assert 1 <= len(first.token_ids) < 4
    session.floor = np.log(1e-6)
    assert session.draft()
    (later,) = drafts_of([session])
    roots = [
        row
        for row, parent in zip(later.q_rows.tolist() or [-1] * 99, later.parent_ids.tolist(), strict=False)
        if parent < 0
    ]
    assert roots
    assert set(roots) == {-1}


def test_drawn_nodes_are_learned_from_by_their_mask() -> None:
    """A committed token that agrees with a node does not show that the node was accepted. The verdict's mask does."""
    drafter = make_drafter(strategy="probabilistic", fan_out=1, max_ahead=1)
    (draft,) = drafter.step()
    acceptance_stats = drafter.acceptance_stats["probabilistic"]
    predicted = drafter.sessions[7].tree.predicted[1]
    before = acceptance_stats.calibration.probability(predicted)
    drafter.handle(verdict(3, [int(draft.token_ids[0])]))
    assert acceptance_stats.calibration.probability(predicted) == before
    (draft,) = drafter.step()
    drafter.handle(
        verdict(4, [int(draft.token_ids[0])], used=1, first_used=draft.first_id)
    )  # its mask is 0: rejected, then drawn all the same
    assert acceptance_stats.calibration.probability(predicted) < before


def test_drawn_nodes_are_sent_in_the_order_in_which_they_grew() -> None:
    """And the first child of a node together with its expansion, however unlikely it is: so the ids say what was
    expanded when."""
    drafter = make_drafter(strategy="probabilistic", fan_out=2, width=2)
    session = drafter.sessions[7]
    tree, grown, seen = session.tree, [], {CONTEXT}
    for _ in range(12):
        session.floor = np.log(0.25)
        drafter.step()
        fresh = [node for node in range(1, len(tree.node_ids)) if tree.node_ids[node] not in seen]
        seen |= {tree.node_ids[node] for node in fresh}
        grown += [node for node in fresh if not tree.rank(node)]
    assert any(tree.log_reach_probs[node] < np.log(0.25) for node in grown)
    assert [tree.node_ids[node] for node in grown] == sorted(tree.node_ids[node] for node in grown)
    ids = [tree.wire_ids[node] for node in grown]
    assert min(ids) >= 0
    assert ids == sorted(ids)


def test_what_is_drawn_ahead_stops_growing_at_its_budget() -> None:
    """All that was grown was sent; a verdict makes room, and growing goes on where it stopped."""
    drafter = make_drafter(strategy="probabilistic", speculation=Speculation(max_nodes=5), fan_out=2)
    session = drafter.sessions[7]
    passes(drafter, 20)
    assert len(session.tree) == 5
    assert session.tree.wire_ids == [NOT_SENT, 0, 1, 2, 3, 4]
    drafter.handle(verdict(3, [session.tree.token_ids[1]]))
    left = len(session.tree)
    passes(drafter, 20)
    assert left < len(session.tree) == 5


def test_a_poor_drafter_of_drawn_nodes_backs_off() -> None:
    """Passes that find nothing likely enough are misses, though the first child is sent."""
    drafter = make_drafter(strategy="probabilistic", fan_out=2)
    drafter.handle(verdict(3, [49], min_accept_prob=999))
    drafter.step()
    assert drafter.sessions[7].backoff > 0


def test_a_message_holds_nodes_in_the_order_in_which_they_grew() -> None:
    """Not level by level; parents come first all the same."""
    session = make_drafter(strategy="probabilistic").sessions[7]
    distribution = DraftDistribution(np.arange(4, dtype=np.int32), np.full(4, 100, np.uint16))

    def grow(parent: int, *ids: int) -> None:
        children = Children(np.arange(len(ids), dtype=np.int32), np.full(len(ids), -0.1, np.float32), distribution)
        (chain,) = chains_of([(session, parent)], [[children]], [Expansion(7, 0, ids)], len(ids))
        session.grow(chain)

    grow(ROOT, 0, 1)
    first, second = session.tree.below(ROOT)
    grow(first, 2)
    grow(session.tree.below(first)[0], 3)
    grow(second, 4)
    assert session.draft()
    (draft,) = drafts_of([session])
    assert draft.parent_ids.tolist() == [-1, -1, 0, 2, 1]


def test_a_step_is_its_verdicts_one_by_one() -> None:
    """For each session that it speaks of; those that the drafter does not have are passed over."""
    together, alone = make_drafter(), make_drafter()
    ids = np.array(toy_text(PROMPT, 2), np.int32)
    step = Verdicts(
        session_ids=np.array([99, 7]), epochs=np.array([1, 1]), base_lens=np.array([3, 3]), num_tokens=np.array([1, 2]),
        num_nodes=np.zeros(2), num_seen=np.zeros(2), waited_us=np.zeros(2), token_ids=np.array([1, *ids]),
        origins=np.full(3, 2),
        min_accept_prob=200,
    )  # fmt: skip
    step = decode(encode(step))
    passes(together, 2)
    passes(alone, 2)
    together.handle(step)
    for one in step.each():
        alone.handle(one)
    assert together.sessions[7].length == alone.sessions[7].length == 5
    assert passes(together, 3) == passes(alone, 3)


def test_one_verdict_of_a_step_that_cannot_be_taken_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its session is dropped and the error reported. The others of the message continue."""
    drafter = make_drafter()
    drafter.handle(
        Assign(session_id=8, epoch=1, lane=0, prompt_len=2, params=SamplingParams(), token_ids=np.array([1, 2]))
    )
    commit = DraftSession.commit

    def failing(self: DraftSession, tokens: list[int]) -> list[int]:
        assert self.session_id != 8, "planted"
        return commit(self, tokens)

    monkeypatch.setattr(DraftSession, "commit", failing)
    step = Verdicts(
        session_ids=np.array([8, 7]), epochs=np.array([1, 1]), base_lens=np.array([2, 3]), num_tokens=np.array([1, 1]),
        num_nodes=np.zeros(2), num_seen=np.zeros(2), waited_us=np.zeros(2), token_ids=np.array([1, 5]),
        origins=np.full(2, 2),
    )  # fmt: skip
    with pytest.raises(ProtocolError, match="a verdict could not be handled: AssertionError"):
        drafter.handle(decode(encode(step)))
    assert list(drafter.sessions) == [7]
    assert drafter.sessions[7].length == 4
