"""What every proposer must do."""

from __future__ import annotations

import numpy as np

from specq.proposers import Expansion, Proposer
from specq.protocol import SamplingParams

CONTEXT = np.array([4, 5, 6, 4, 5, 6, 4, 5], np.int32)
VOCAB = 99  # of a proposer that knows no vocabulary: what it drafts comes from the context


class ProposerConformance:
    """Needs the fixture `proposer`: a new one."""

    def test_answers_come_in_order_and_within_bounds(self, proposer: Proposer) -> None:
        for session_id in (1, 2):
            proposer.open(session_id, CONTEXT, SamplingParams())
        answers = proposer.expand([Expansion(2, -1, (10, 11, 12)), Expansion(1, -1, (7,))])
        assert [len(children.token_ids) <= wanted for children, wanted in zip(answers, (3, 1), strict=True)] == [
            True
        ] * 2
        for children in answers:
            assert len(children.scores) == len(children.token_ids)
            assert (children.scores <= 1e-6).all()
            assert ((children.token_ids >= 0) & (children.token_ids < (proposer.info.vocab_size or VOCAB))).all()
            assert (np.diff(children.scores) <= 0).all()

    def test_siblings_differ(self, proposer: Proposer) -> None:
        proposer.open(1, CONTEXT, SamplingParams(temperature=0.7, seed=3))
        (children,) = proposer.expand([Expansion(1, -1, tuple(range(8)))])
        assert len(set(children.token_ids.tolist())) == len(children.token_ids)

    def test_grown_ahead_or_one_commit_at_a_time_gives_the_same_drafts(self, proposer: Proposer) -> None:
        """A node's children do not depend on whether it has been committed meanwhile."""
        params = SamplingParams(temperature=0.7, seed=3)
        for session_id in (1, 2):
            proposer.open(session_id, CONTEXT, params)
        node, next_id = -1, 0
        for _ in range(5):
            (ahead,) = proposer.expand([Expansion(1, node, (next_id, next_id + 1))])
            (after,) = proposer.expand([Expansion(2, -1, (next_id, next_id + 1))])
            assert ahead.token_ids.tolist() == after.token_ids.tolist()
            if not len(after.token_ids):
                return
            proposer.commit(2, after.token_ids[:1], [next_id])
            node, next_id = next_id, next_id + 2

    def test_descendants_of_the_last_committed_node_stay_valid(self, proposer: Proposer) -> None:
        proposer.open(1, CONTEXT, SamplingParams())
        (children,) = proposer.expand([Expansion(1, -1, (0, 1))])
        if len(children.token_ids):
            (grandchildren,) = proposer.expand([Expansion(1, 0, (2, 3))])
            proposer.commit(1, children.token_ids[:1], [0])
            if len(grandchildren.token_ids):
                assert len(proposer.expand([Expansion(1, 2, (4,))])) == 1

    def test_a_correction_starts_anew(self, proposer: Proposer) -> None:
        proposer.open(1, CONTEXT, SamplingParams())
        proposer.expand([Expansion(1, -1, (0, 1))])
        proposer.commit(1, np.array([9, 9], np.int32), [])
        assert len(proposer.expand([Expansion(1, -1, (2,))])) == 1

    def test_closing_is_quiet_and_allows_opening_again(self, proposer: Proposer) -> None:
        proposer.open(1, CONTEXT, SamplingParams())
        proposer.expand([Expansion(1, -1, (0,))])
        proposer.close(1)
        proposer.close(1)
        proposer.open(1, CONTEXT, SamplingParams())
        assert len(proposer.expand([Expansion(1, -1, (0,))])) == 1
