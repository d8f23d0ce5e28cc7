"""What a verifier says of a round: the verdict's message, made of a session and its share of the step."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from specq.protocol import COLOCATED_LANE, Fault, Int32Array, Open, SessionFailed, Verdict
from specq.verifier.scheduler import ScheduledSession
from specq.verifier.session import Session


def verdict(
    session: Session,
    base_len: int,
    tokens: Int32Array,
    min_accept_prob: int,
    share: ScheduledSession | None = None,
    accepted: AbstractSet[int] = frozenset(),
    us: tuple[int, ...] = (),
) -> Verdict:
    """Return the verdict on a session that has these tokens from `base_len` on; `accepted` are indices of the verified nodes
    of its share. Without a share it is an old one that is sent again. See `specq.protocol.messages.Verdict`."""
    node_ids, lanes = _names(session, share, base_len)
    return Verdict(
        session_id=session.session_id,
        epoch=session.epoch,
        base_len=base_len,
        finish=session.finish,
        min_accept_prob=min_accept_prob,
        seen=session.seen(),
        us=us,
        stats=session.stats.to_dict() if session.finish else {},
        token_ids=tokens,
        node_ids=np.array(node_ids, np.int32),
        mask=np.array([i in accepted for i in range(len(node_ids))], np.uint8),
        node_lanes=np.array(lanes, np.uint8),
        **session.logprobs.arrays(base_len - session.opened_len),
    )


def _names(session: Session, share: ScheduledSession | None, base_len: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the ids of the nodes that a share verifies and their lanes. Nodes of an offered chain are known to nobody else,
    and bear their positions."""
    if share is None:
        return (), ()
    if share.chain_len:
        return range(base_len, base_len + share.chain_len), [COLOCATED_LANE] * share.chain_len
    lanes = [] if len(session.lanes) <= 1 else [node.lane for node in share.nodes]
    return [node.node_id for node in share.nodes], lanes


def failure(session: Session | Open, fault: Fault) -> SessionFailed:
    """Return what tells the broker that a session cannot go on, or not be opened."""
    return SessionFailed(session_id=session.session_id, epoch=session.epoch, reason=fault.reason, retry=fault.retry)
