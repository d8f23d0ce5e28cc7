"""A round is one step of one session: from the engine's judgement to committed tokens and counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from specq.protocol import Float64Array, Int32Array, Int64Array, Judgement, UInt8Array
from specq.runtime import Faults
from specq.verifier.scheduler import ScheduledSession
from specq.verifier.session import Session
from specq.verifier.trees.arrays import COUNTS


class Kept(NamedTuple):
    """What a judgement leaves of a round: the accepted path, then the correction or bonus, up to the token that ends the text.

    base_len   the committed length before; path: the accepted among the share's nodes
    """

    share: ScheduledSession
    base_len: int
    token_ids: Int32Array
    path: tuple[int, ...]

    @property
    def session(self) -> Session:
        return self.share.session


class Verified(NamedTuple):
    """The nodes of some rounds, one round after the other; node_ids i32[n], lanes u8[n], is_accepted u8[n].

    firsts i64[rounds + 1]   where each round's nodes begin; first_arrived f64[rounds]: when the oldest of them arrived
    """

    firsts: Int64Array
    nodes: Int32Array
    node_ids: Int32Array
    lanes: UInt8Array
    is_accepted: UInt8Array
    first_arrived: Float64Array


class Round(NamedTuple):
    """What a step committed to a session, and which nodes it verified there: node_ids i32[n], lanes u8[n], is_accepted u8[n]."""

    session: Session
    base_len: int
    token_ids: Int32Array
    node_ids: Int32Array
    lanes: UInt8Array
    is_accepted: UInt8Array
    first_arrived: float

    def waited_us(self, started: float) -> int:
        """Return the microseconds that the oldest verified node had waited when the step started."""
        return int((started - self.first_arrived) * 1e6) if len(self.node_ids) else 0


def commit(judged: Iterable[tuple[ScheduledSession, Judgement]], min_accept_prob: int, faults: Faults) -> list[Round]:
    """Commit what was judged, of all sessions of a step at once, and count it; return the rounds of those without a fault."""
    kept: list[Kept] = []
    for share, judgement in judged:
        with faults.of(share, "committed"):
            kept.append(_keep(share, judgement))
    if not kept:
        return []
    verified = _verified(kept)
    _commit(kept, verified, min_accept_prob)
    return _rounds(kept, verified)


def _keep(share: ScheduledSession, judgement: Judgement) -> Kept:
    """Append to a session's transcript what was judged, up to the token that ends the text."""
    session, base_len = share.session, share.session.length
    session.kv_len += len(judgement.path)
    tokens = judgement.token_ids.tolist()
    num_kept, session.finish = session.up_to_end(tokens)
    if judgement.logprobs is not None:
        session.logprobs.add(judgement.logprobs, num_kept)
    session.append(tokens[:num_kept])
    return Kept(share, base_len, judgement.token_ids[:num_kept], judgement.path[:num_kept])


def _verified(kept: Sequence[Kept]) -> Verified:
    trees = kept[0].session.trees
    firsts = np.zeros(len(kept) + 1, np.int64)
    np.cumsum([len(one.share.nodes) for one in kept], out=firsts[1:])
    nodes = np.concatenate([one.share.nodes for one in kept])
    is_accepted = np.zeros(len(nodes), np.uint8)
    is_accepted[[first + i for one, first in zip(kept, firsts.tolist(), strict=False) for i in one.path]] = 1
    first_arrived = np.zeros(len(kept))
    some = np.flatnonzero(np.diff(firsts))
    first_arrived[some] = np.minimum.reduceat(trees.arrived[nodes], firsts[some]) if len(some) else 0.0
    lanes = trees.lane_id[trees.node_lane[nodes]].astype(np.uint8)
    return Verified(firsts, nodes, trees.node_id[nodes], lanes, is_accepted, first_arrived)


def _commit(kept: Sequence[Kept], verified: Verified, min_accept_prob: int) -> None:
    """Count the rounds, then commit their tokens: the counting looks at the trees as they were verified."""
    trees = kept[0].session.trees
    sessions: Int32Array = np.array([one.session.place for one in kept], np.int32)
    trees.operations.count(sessions, verified.firsts, verified.nodes, verified.is_accepted)
    trees.counts[sessions, COUNTS.index("min_accept_probs")] += min_accept_prob
    firsts = np.zeros(len(kept) + 1, np.int64)
    np.cumsum([len(one.token_ids) for one in kept], out=firsts[1:])
    token_ids = np.concatenate([one.token_ids for one in kept])
    trees.operations.commit(sessions, firsts, token_ids, np.diff(verified.firsts).astype(np.int32))


def _rounds(kept: Sequence[Kept], verified: Verified) -> list[Round]:
    of_each = zip(kept, pairwise(verified.firsts.tolist()), verified.first_arrived.tolist(), strict=True)
    node_ids, lanes, is_accepted = verified.node_ids, verified.lanes, verified.is_accepted
    return [
        Round(
            one.session, one.base_len, one.token_ids,
            node_ids[first:end], lanes[first:end], is_accepted[first:end], arrived,
        )
        for one, (first, end), arrived in of_each
    ]  # fmt: skip
