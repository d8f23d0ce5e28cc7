"""The chains that a colocated drafter offers to sessions: as drafts for a session's tree, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from specq.proposers import Chains
from specq.protocol import COLOCATED_LANE, Draft, Float32Array, pack_distributions
from specq.verifier.rounds import Round
from specq.verifier.session import Session


class Outcome(NamedTuple):
    """What became of a chain: the scores f32[num_judged] of its judged tokens, and how many of these were accepted."""

    scores: Float32Array
    num_accepted: int

    @property
    def num_judged(self) -> int:
        return len(self.scores)


class OfferedChain(NamedTuple):
    """What was drafted for a session in this round.

    scores     f32[depth]: the drafter's own log-probabilities of the chain's tokens
    is_drawn   whether the tokens were drawn from draft distributions; then they are nodes with these ids
    """

    scores: Float32Array
    is_drawn: bool
    node_ids: Sequence[int]

    def outcome(self, done: Round, num_followed: int) -> Outcome:
        """Return what became of the chain, given a round that committed its first `num_followed` tokens.

        Tokens up to the first that was not committed are judged; of drawn ones, those that the verifier judged as such.
        """
        num_judged = min(num_followed + 1, len(self.scores), len(done.token_ids))
        if self.is_drawn:
            nodes = zip(done.node_ids.tolist(), done.lanes.tolist(), strict=True)
            verified = {node_id for node_id, lane in nodes if lane == COLOCATED_LANE}
            unverified = (i for i, node_id in enumerate(self.node_ids[:num_judged]) if node_id not in verified)
            num_judged = next(unverified, num_judged)
        return Outcome(self.scores[:num_judged], min(num_followed, num_judged))


def draft_of_chain(session: Session, chains: Chains, index: int, scores: Float32Array) -> tuple[Draft, list[int]]:
    """Return a chain with its siblings as a draft for a session's tree, and the ids of the chain's own nodes.

    `index` is the session's place among the chains; `scores` f32[depth, width] are those of the levels to draft.
    """
    depth = len(scores)
    width = 1 if session.speculation.max_nodes else None  # all nodes that are allowed are spent on depth
    token_ids = chains.token_ids[index, :depth, :width]  # [depth, width], -1 where there is no node
    is_there = token_ids >= 0
    sizes = is_there.sum(1).tolist()
    lane = session.lane(COLOCATED_LANE)
    first_id = lane.seen + 1 if lane is not None else 0
    firsts = [first_id + before for before in accumulate(sizes[:-1], initial=0)]  # the first node of each level
    distributions = chains.distributions[index][:depth]
    draft = Draft(
        session_id=session.session_id,
        epoch=session.epoch,
        lane=COLOCATED_LANE,
        base_len=session.length,
        first_id=first_id,
        q_size=max((len(distribution.ids) for distribution in distributions), default=0),
        token_ids=token_ids[is_there],
        parent_ids=np.repeat([-1, *firsts[:-1]], sizes).astype(np.int32),
        scores=scores[:, :width][is_there].astype(np.float16),
        **pack_distributions(distributions, np.repeat(range(depth), sizes).tolist()),
    )
    return draft, firsts
