"""What a verifier reports: the verdict of a round, tokens that are sent again, and that a session failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specq.protocol import COLOCATED_LANE, Fault, Int32Array, Open, SessionFailed, Verdict
from specq.verifier.rounds import Round
from specq.verifier.session import Session


def verdict_of(done: Round, min_accept_prob: int, us: tuple[int, int]) -> Verdict:
    """Return the verdict of a round; `us`: the step's time and the longest wait of a node, as in `Verdict`."""
    if not done.share.nodes and not done.share.chain_len:
        return _verdict(done.session, done.base_len, done.token_ids, min_accept_prob, us=us)
    node_ids, node_lanes = _verified(done)
    return _verdict(
        done.session,
        done.base_len,
        done.token_ids,
        min_accept_prob,
        us=us,
        node_ids=np.array(node_ids, np.int32),
        mask=np.array([i in done.accepted for i in range(len(node_ids))], np.uint8),
        node_lanes=np.array(node_lanes, np.uint8),
    )


def verdict_again(session: Session, base_len: int, min_accept_prob: int) -> Verdict:
    """Return one verdict with all that was committed from `base_len` on; it names no nodes."""
    return _verdict(session, base_len, np.array(session.token_ids[base_len:], np.int32), min_accept_prob)


def _verdict(session: Session, base_len: int, token_ids: Int32Array, min_accept_prob: int, **of_round: Any) -> Verdict:
    """Return a verdict with what any verdict on a session carries; the session has committed the tokens already."""
    return Verdict(
        session_id=session.session_id,
        epoch=session.epoch,
        base_len=base_len,
        finish=session.finish,
        min_accept_prob=min_accept_prob,
        seen=session.seen(),
        stats=session.stats.to_dict() if session.finish else {},
        token_ids=token_ids,
        **session.logprobs.arrays(base_len - session.opened_len),
        **of_round,
    )


def _verified(done: Round) -> tuple[Sequence[int], Sequence[int]]:
    """Return the ids of the verified nodes and their lanes; no lanes where the session has one only. The nodes of an offered
    chain are on no tree, and get their positions as ids."""
    share = done.share
    if share.chain_len:
        return range(done.base_len, done.base_len + share.chain_len), [COLOCATED_LANE] * share.chain_len
    has_one_lane = len(done.session.lanes) <= 1
    return [node.node_id for node in share.nodes], [] if has_one_lane else [node.lane for node in share.nodes]


def failure(session: Session | Open, fault: Fault) -> SessionFailed:
    """Return the message that a session cannot go on, or cannot be opened."""
    return SessionFailed(session_id=session.session_id, epoch=session.epoch, reason=fault.reason, retry=fault.retry)
