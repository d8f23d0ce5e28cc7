"""The shapes and modes of drafted trees: what a job asks for, and what is drafted in each mode."""

from dataclasses import replace

import numpy as np

from specq.drafting.worker.draft_nodes import NOT_SENT
from specq.protocol.params import SamplingParams, Speculation
from specq.testing.toy import toy_text
from specq.testing.toy_drafters import ToyProposer
from tests.drafting.worker.sessions import PROMPT, make_drafter, passes, verdict


def test_a_synchronous_round_is_sent_whole_and_awaits_its_verdict() -> None:
    """One draft per round. The drafter waits for the verdict and continues from its root."""
    drafter = make_drafter(speculation=Speculation(mode="sync", num_candidates=1, max_depth=4))
    (draft,) = passes(drafter, 10)
    assert draft.token_ids.tolist() == toy_text(PROMPT, 4)
    assert not drafter.has_work
    drafter.handle(verdict(3, toy_text(PROMPT, 2), used=4))
    (draft,) = passes(drafter, 10)
    assert (draft.base_len, draft.token_ids.tolist()) == (5, toy_text(PROMPT, 6)[2:])


SSD = Speculation(mode="jit", max_depth=3, fan_out_hit=(2, 1), fan_out_miss=(2, 1))


def test_after_a_miss_a_chain_is_drafted_first_and_sent_whole() -> None:
    """At the start and after each miss, for any requested size. Beyond it, the drafter runs ahead."""
    drafter = make_drafter(speculation=SSD, max_tokens=1000)
    first, *more = passes(drafter, 30)
    assert first.token_ids.tolist()[::2][:1] + first.token_ids.tolist()[2:] == toy_text(PROMPT, 3)
    assert first.parent_ids.tolist() == [-1, -1, 0, 2]
    assert more
    drafter.handle(verdict(3, [49], min_accept_prob=9999))
    (draft,) = passes(drafter, 3)
    assert (draft.base_len, len(draft.token_ids)) == (4, 4)
    assert draft.token_ids[0] == toy_text([*PROMPT, 49], 1)[0]


def test_where_something_fits_no_chain_is_owed() -> None:
    """What grows is sent pass by pass."""
    drafter = make_drafter(speculation=SSD, max_tokens=1000)
    (first,) = passes(drafter, 3)
    drafter.handle(verdict(3, toy_text(PROMPT, 1), used=1))
    drafts = passes(drafter, 2)
    assert [draft.base_len for draft in drafts] == [4, 4]
    assert drafts[0].first_id == first.first_id + len(first.token_ids)


def test_a_chain_that_has_grown_and_was_not_sent_is_work() -> None:
    """No pass is needed for it."""
    drafter = make_drafter(speculation=SSD, max_tokens=1000)
    passes(drafter, 30)
    tree = drafter.sessions[7].tree
    tree.wire_ids = [NOT_SENT] * len(tree.wire_ids)  # as if all had been too unlikely
    drafter.handle(verdict(3, toy_text(PROMPT, 1), used=1))
    assert drafter.has_work
    num_passes = drafter.num_passes
    (draft,) = drafter.step()
    assert draft.token_ids[0] == toy_text(PROMPT, 2)[1]
    assert drafter.num_passes == num_passes


def test_an_empty_answer_is_sent() -> None:
    """The verifier waits for it: here the children are too unlikely to be sent."""

    class Doubtful(ToyProposer):
        def expand(self, requests):
            return [
                replace(children, scores=np.full(len(children.scores), -20.0)) for children in super().expand(requests)
            ]

    drafter = make_drafter(speculation=SSD, max_tokens=1000)
    drafter.drafter = proposer = Doubtful()
    proposer.open(7, np.array(PROMPT, np.int32), SamplingParams())
    (draft,) = passes(drafter, 3)
    assert (draft.base_len, len(draft.token_ids)) == (3, 0)


def test_a_synchronous_tree_keeps_to_its_budget() -> None:
    """Best first under a node budget: the likeliest nodes, parents with their children."""
    drafter = make_drafter(speculation=Speculation(mode="sync", max_nodes=6))
    (draft,) = passes(drafter, 40)
    assert len(draft.token_ids) == 6
    assert draft.token_ids.tolist()[0] == toy_text(PROMPT, 1)[0]


def test_a_budget_bounds_what_is_live_in_asynchronous_mode() -> None:
    """No more nodes than the budget are at the verifier, however long the drafter runs ahead; verdicts make room."""
    drafter = make_drafter(speculation=Speculation(max_nodes=5))
    assert sum(len(draft.token_ids) for draft in passes(drafter, 40)) == 5
    assert not drafter.has_work
    drafter.handle(verdict(3, toy_text(PROMPT, 2), used=2))
    assert 1 <= sum(len(draft.token_ids) for draft in passes(drafter, 40)) <= 5


def test_candidates_are_drafted_as_one_tree() -> None:
    """Two chains that part at the first token."""
    drafter = make_drafter(speculation=Speculation(mode="sync", num_candidates=2, max_depth=3))
    (draft,) = passes(drafter, 10)
    parents = draft.parent_ids.tolist()
    assert parents.count(-1) == 2
    assert all(parents.count(node) <= 1 for node in range(len(parents)))
    assert len(parents) == 6


def test_candidates_are_drawn_with_their_own_temperature() -> None:
    """The proposer is opened with what the job asks for its candidates; the rest as the job has it."""
    drafter = make_drafter(speculation=Speculation(candidate_temp=0.5, candidate_top_p=0.9))
    proposer = drafter.drafter
    assert isinstance(proposer, ToyProposer)
    assert (proposer.params[7].temperature, proposer.params[7].top_p) == (0.5, 0.9)
    assert proposer.params[7].max_tokens == 100
