"""Proposers that draft a chain in one call: what the drafter asks them for, and sends."""

from collections.abc import Sequence

import numpy as np

from specq.drafting import Children, Drafter, Expansion
from specq.drafting.worker.worker import DraftWorker
from specq.protocol.messages import Assign, Draft
from specq.protocol.params import SamplingParams, Speculation
from specq.testing.toy import toy_text
from specq.testing.toy_drafters import ToyProposer
from tests.drafting.worker.sessions import PROMPT, make_drafter, passes, verdict


class ChainingProposer(ToyProposer):
    """Drafts chains, and notes how deep each was."""

    has_chains = True

    def __init__(self) -> None:
        super().__init__()
        self.depths: list[int] = []

    def expand_chain(self, requests: Sequence[Expansion], depth: int) -> list[list[Children]]:
        self.depths.append(depth)
        return Drafter.expand_chain(self, requests, depth)


def make_chaining(
    speculation: Speculation | None = None, max_tokens: int = 100
) -> tuple[DraftWorker, ChainingProposer]:
    """Return a drafter of chains of four, with one session, and its proposer."""
    proposer = ChainingProposer()
    drafter = DraftWorker(proposer, incarnation=1, fan_out=3, chain=4)
    drafter.handle(
        Assign(
            session_id=7, epoch=1, lane=0, prompt_len=3, params=SamplingParams(max_tokens=max_tokens),
            speculation=speculation or Speculation(), token_ids=np.array(PROMPT, np.int32),
        )
    )  # fmt: skip
    return drafter, proposer


def test_a_chain_has_siblings_at_each_level() -> None:
    """One call: four levels of three, each below the first of the one before."""
    drafter, proposer = make_chaining()
    (draft,) = drafter.step()
    assert proposer.depths == [4]
    firsts = [0, 3, 6, 9]
    assert draft.token_ids[firsts].tolist() == toy_text(PROMPT, 4)
    assert draft.parent_ids.tolist() == [parent for parent in (-1, 0, 3, 6) for _ in range(3)]


def test_later_chains_start_where_the_target_likeliest_is() -> None:
    """The second call goes on from the end of the first chain, and from its branches."""
    drafter, proposer = make_chaining()
    first, second = passes(drafter, 2)
    assert proposer.depths == [4, 4]
    assert 9 in second.parent_ids.tolist()
    assert toy_text(PROMPT, 8)[4:] == [second.token_ids[i] for i in _spine(second, 9)]
    assert len(first.token_ids) == 12


def _spine(draft: Draft, parent_id: int) -> list[int]:
    """Return the indices of first children from a node on."""
    found = []
    ids = draft.parent_ids.tolist()
    while parent_id in ids:
        found.append(ids.index(parent_id))
        parent_id = draft.first_id + found[-1]
    return found


def test_a_synchronous_round_is_one_chain() -> None:
    """Then it waits for its verdict."""
    drafter, proposer = make_chaining(Speculation(mode="sync"))
    (draft,) = drafter.step()
    assert (len(draft.token_ids), drafter.has_work) == (12, False)
    drafter.handle(verdict(3, [*toy_text(PROMPT, 2), 1], used=2))
    (after,) = drafter.step()
    assert (after.base_len, proposer.depths) == (6, [4, 4])


def test_chains_keep_to_the_shape() -> None:
    """Two candidates of three tokens: the second has no siblings, and nothing goes deeper."""
    drafter, _ = make_chaining(Speculation(num_candidates=2, max_depth=3))
    sent = passes(drafter, 6)
    assert [len(draft.token_ids) for draft in sent] == [4, 2]
    assert not drafter.has_work


def test_chains_end_where_the_job_does() -> None:
    """Four tokens are left, and the last is always the target's own."""
    drafter, proposer = make_chaining(max_tokens=4)
    (draft,) = passes(drafter, 1)
    assert (len(draft.token_ids), proposer.depths) == (9, [3])


def test_proposers_without_chains_are_asked_level_by_level() -> None:
    """Where a chain saves nothing, verdicts are received between passes instead."""
    drafter = make_drafter(chain=4, fan_out=3)
    (draft,) = drafter.step()
    assert len(draft.token_ids) == 3
