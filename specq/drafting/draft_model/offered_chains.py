"""The chains that a colocated drafter offers to sessions, and their outcomes.

A chain is offered as a draft for a session's tree. It may be verified before the host has read it. Its tokens are
grafted onto the tree as handles. The usual scores of chains, by level and rank, replace its own scores. The step is
launched behind the chains. So the device does not wait for the host in between. The cost is that the chain's own scores
cannot guide the choice of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from specq.drafting.interface import Chains
from specq.drafting.worker import LEAST_CHANCE
from specq.protocol import (
    COLOCATED_LANE,
    BoolArray,
    Draft,
    Float32Array,
    Float64Array,
    Int32Array,
    IntpArray,
    pack_distributions,
)
from specq.verification import NO_TOKEN, DeviceTokens
from specq.verifier.sources import NONE, DraftBatch, Round, Rounds, Session, UnreadLayout, hung_unread


class Outcomes(NamedTuple):
    """The outcomes of all judged tokens of some chains, one chain after the other.

    scores        f32[all]: the drafter's own log-probabilities.
    is_accepted   bool[all]: whether the tokens were accepted.
    """

    scores: Float32Array
    is_accepted: BoolArray


class OfferedChains:
    """The chains drafted for n sessions in this round.

    counts     i64[n]: the offered tokens of each session's chain. 0: none.
    scores     f32[n, depth]: the drafter's own log-probabilities.
    node_ids   by place among the n: the ids of a chain's nodes, if its tokens were drawn from draft distributions.
    """

    def __init__(self, session_ids: Sequence[int], counts: IntpArray, scores: Float32Array) -> None:
        self.counts, self.scores = counts, scores
        self.node_ids: dict[int, Sequence[int]] = {}
        self._places = dict(zip(session_ids, range(len(session_ids)), strict=True))

    def pop(self, session_id: int) -> int:
        """Return the place of a session's chain, once; NONE without a chain."""
        return self._places.pop(session_id, NONE)

    def outcomes(self, rounds: Rounds, num_followed: IntpArray) -> Outcomes:
        """Return the outcomes of the chains, given rounds and how many first tokens of its chain each round committed.

        Tokens up to the first that was not committed are judged. Of drawn tokens, only those count that the verifier
        judged as drawn.
        """
        places = np.array([self.pop(session.session_id) for session in rounds.sessions], np.intp)
        num_judged = np.minimum(np.minimum(num_followed + 1, rounds.num_tokens), self.counts[places])
        num_judged[places == NONE] = 0
        for i in np.flatnonzero(num_judged).tolist() if self.node_ids else ():
            if places[i] in self.node_ids:
                num_judged[i] = _judged_as_drawn(rounds[i], self.node_ids[places[i]][: num_judged[i]])
        own = np.flatnonzero(num_judged)
        judged, accepted = num_judged[own], np.minimum(num_followed, num_judged)[own]
        levels = np.arange(self.scores.shape[1])
        is_judged = levels < judged[:, None]
        scores = self.scores[places[own]][is_judged]
        return Outcomes(scores, np.broadcast_to(levels, is_judged.shape)[is_judged] < accepted.repeat(judged))


def _judged_as_drawn(done: Round, node_ids: Sequence[int]) -> int:
    """Return how many of a chain's first nodes a round has verified."""
    nodes = zip(done.node_ids.tolist(), done.lanes.tolist(), strict=True)
    verified = {node_id for node_id, lane in nodes if lane == COLOCATED_LANE}
    return next((i for i, node_id in enumerate(node_ids) if node_id not in verified), len(node_ids))


def draft_of_chain(session: Session, chains: Chains, index: int, scores: Float32Array) -> tuple[Draft, list[int]]:
    """Return a chain with its siblings as a draft for a session's tree, and the ids of the chain's own nodes.

    index    the session's place among the chains.
    scores   f32[depth, width]: the scores of the levels to draft.
    """
    depth = len(scores)
    width = 1 if session.speculation.max_nodes else None  # all allowed nodes are used for depth
    token_ids = chains.token_ids[index, :depth, :width]  # [depth, width], -1: no node
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


FADE = 0.05  # weight of each new round in a mean


class UsualScores:
    """Mean scores of the tokens of chains, by level and rank: calibrated probabilities, given the parent's."""

    def __init__(self, depth: int, width: int) -> None:
        """Chains have at most `depth` levels of `width` tokens each."""
        self._means = np.zeros((depth, width))  # 0: not seen yet

    def learn(self, accept_probs: Float64Array, token_ids: Int32Array) -> None:
        """Add a round's chains: acceptance probabilities and tokens [sessions, depth, width]; tokens < 0 are empty."""
        is_there = token_ids >= 0
        counts = is_there.sum(0)
        seen = counts > 0
        sums = np.where(is_there, accept_probs, 0.0).sum(0)
        depth, width = counts.shape
        means = self._means[:depth, :width]
        now = sums[seen] / counts[seen]
        means[seen] = np.where(means[seen] > 0, means[seen] + FADE * (now - means[seen]), now)

    def of(self, depth: int, width: int) -> Float32Array | None:
        """Return the scores f32[depth, width] of chains with this depth and width; None if some were never seen."""
        means = self._means[:depth, :width]
        if means.shape != (depth, width) or not means.all():
            return None
        found: Float32Array = np.log(np.maximum(means, LEAST_CHANCE)).astype(np.float32)
        return found


def batch_of_unread(
    sessions: Sequence[Session], drafted: DeviceTokens, counts: IntpArray, scores: Float32Array
) -> DraftBatch:
    """Return chains as a batch.

    drafted     tokens [depth * sessions * width], level by level.
    counts      i64[sessions]: how many levels each session takes. 0: none.
    scores      f32[depth, width], the same for every session.
    """
    depth, width = scores.shape
    layout = UnreadLayout.of((width,) * depth)
    places = (layout.levels * len(sessions) + np.arange(len(sessions))[:, None]) * width + layout.ranks
    return hung_unread(sessions, drafted, layout, counts, places, scores.reshape(-1), COLOCATED_LANE)


def distinct(token_ids: Int32Array) -> Int32Array:
    """Return tokens i32[sessions, depth, width] without duplicates of an earlier sibling.

    Such a token would have a node of its own, which must not be accepted beside the other.
    """
    found = token_ids
    for rank in range(1, token_ids.shape[2]):
        is_double = (token_ids[:, :, :rank] == token_ids[:, :, rank : rank + 1]).any(2)
        if np.count_nonzero(is_double):
            found = found.copy() if found is token_ids else found
            found[:, :, rank][is_double] = NO_TOKEN
    return found
