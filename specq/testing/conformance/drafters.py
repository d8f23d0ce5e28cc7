"""The conformance suite of drafters."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from specq.drafting import Drafter, Expansion, as_drafter
from specq.protocol import SamplingParams

CONTEXT = np.array([4, 5, 6, 4, 5, 6, 4, 5], np.int32)
VOCAB = 99  # of a drafter without a vocabulary: its drafts come from the context


class DrafterConformance:
    """Needs the fixture `drafter`: a new one.

    `foresees`: children of a node may come from a pass for an ancestor, which did not know the node. So they may differ
    from its children after the node is committed.
    """

    foresees: ClassVar[bool] = False

    def test_answers_come_in_order_and_within_bounds(self, drafter: Drafter) -> None:
        for session_id in (1, 2):
            drafter.open(session_id, CONTEXT, SamplingParams())
        answers = drafter.expand([Expansion(2, -1, (10, 11, 12)), Expansion(1, -1, (7,))])
        assert [len(children.token_ids) <= wanted for children, wanted in zip(answers, (3, 1), strict=True)] == [
            True
        ] * 2
        for children in answers:
            assert len(children.scores) == len(children.token_ids)
            assert (children.scores <= 1e-6).all()
            assert ((children.token_ids >= 0) & (children.token_ids < (drafter.info.vocab_size or VOCAB))).all()
            assert (np.diff(children.scores) <= 0).all()

    def test_whose_a_session_is_changes_no_draft(self, drafter: Drafter) -> None:
        params = SamplingParams(seed=3)
        for session_id, owner in ((1, ""), (2, "ann"), (3, "ann"), (4, "ben")):
            drafter.open(session_id, CONTEXT, params, owner)
        answers = drafter.expand([Expansion(i, -1, (10 * i, 10 * i + 1)) for i in (1, 2, 3, 4)])
        assert len({tuple(children.token_ids.tolist()) for children in answers}) == 1

    def test_siblings_differ(self, drafter: Drafter) -> None:
        drafter.open(1, CONTEXT, SamplingParams(temperature=0.7, seed=3))
        (children,) = drafter.expand([Expansion(1, -1, tuple(range(8)))])
        assert len(set(children.token_ids.tolist())) == len(children.token_ids)

    def test_grown_ahead_or_one_commit_at_a_time_gives_the_same_drafts(self, drafter: Drafter) -> None:
        """A node's children do not depend on whether it was committed in the meantime."""
        if self.foresees:
            pytest.skip("it drafts ahead of what it has read")
        params = SamplingParams(temperature=0.7, seed=3)
        for session_id in (1, 2):
            drafter.open(session_id, CONTEXT, params)
        node, next_id = -1, 0
        for _ in range(5):
            (ahead,) = drafter.expand([Expansion(1, node, (next_id, next_id + 1))])
            (after,) = drafter.expand([Expansion(2, -1, (next_id, next_id + 1))])
            assert ahead.token_ids.tolist() == after.token_ids.tolist()
            if not len(after.token_ids):
                return
            drafter.commit(2, after.token_ids[:1], [next_id])
            node, next_id = next_id, next_id + 2

    def test_descendants_of_the_last_committed_node_stay_valid(self, drafter: Drafter) -> None:
        """They have the same children as in a session without commits."""
        for session_id in (1, 2):
            drafter.open(session_id, CONTEXT, SamplingParams())
        drafted = [_tokens_after(drafter, session_id, -1, (0, 1)) for session_id in (1, 2)]
        if not drafted[0] or not _tokens_after(drafter, 1, 0, (2, 3)):
            pytest.skip("it drafts nothing here")
        _tokens_after(drafter, 2, 0, (2, 3))
        drafter.commit(1, np.array(drafted[0][:1], np.int32), [0])
        assert _tokens_after(drafter, 1, 2, (4,)) == _tokens_after(drafter, 2, 2, (4,))

    def test_the_same_growth_gives_the_same_tree(self, drafter: Drafter) -> None:
        """This also holds far ahead of the committed text, and with other sessions in the same calls."""
        for session_id in (1, 2, 3):
            drafter.open(session_id, CONTEXT, SamplingParams(temperature=0.7, seed=3))
        (alone,) = _grow(drafter, [1])
        assert _grow(drafter, [2, 3]) == [alone, alone]

    def test_a_correction_starts_anew(self, drafter: Drafter) -> None:
        """It drafts as for a session that is opened with that text."""
        correction = np.array([9, 9], np.int32)
        drafter.open(1, CONTEXT, SamplingParams())
        drafter.expand([Expansion(1, -1, (0, 1))])
        drafter.commit(1, correction, [])
        drafter.open(2, np.concatenate([CONTEXT, correction]), SamplingParams())
        assert _tokens_after(drafter, 1, -1, (2,)) == _tokens_after(drafter, 2, -1, (2,))

    def test_closing_is_quiet_and_allows_opening_again(self, drafter: Drafter) -> None:
        drafter.open(1, CONTEXT, SamplingParams())
        before = _tokens_after(drafter, 1, -1, (0,))
        drafter.close(1)
        drafter.close(1)
        drafter.open(1, CONTEXT, SamplingParams())
        assert _tokens_after(drafter, 1, -1, (0,)) == before


class ProposerConformance(DrafterConformance):
    """The same suite under its former name, for one version. Needs the fixture `proposer`."""

    @pytest.fixture
    def drafter(self, proposer: Any) -> Drafter:
        return as_drafter(proposer)


def _grow(drafter: Drafter, sessions: list[int]) -> list[list[list[int]]]:
    """Grow trees seven levels deep with two nodes per level.

    Return the tokens of all children of each session, level by level.
    """
    grown: list[list[list[int]]] = [[] for _ in sessions]
    levels, next_id = [[-1] for _ in sessions], 0
    for _ in range(7):
        requests = [
            [Expansion(session_id, node, (next_id + 2 * i, next_id + 2 * i + 1)) for i, node in enumerate(level)]
            for session_id, level in zip(sessions, levels, strict=True)
        ]
        next_id += 4
        answers = iter(drafter.expand([request for of_session in requests for request in of_session]))
        for i, of_session in enumerate(requests):
            tokens = [next(answers).token_ids.tolist() for _ in of_session]
            pairs = zip(of_session, tokens, strict=True)
            levels[i] = [node for request, own in pairs for node in request.child_ids[: len(own)]][:2]
            grown[i] += tokens
    return grown


def _tokens_after(drafter: Drafter, session_id: int, node_id: int, child_ids: tuple[int, ...]) -> list[int]:
    (children,) = drafter.expand([Expansion(session_id, node_id, child_ids)])
    tokens: list[int] = children.token_ids.tolist()
    return tokens
