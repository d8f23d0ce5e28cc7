"""A round is one step of one session: from the engine's judgement to committed tokens and counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from specq.protocol import CORRECTED, NO_TOKENS, ORIGIN_CODES, ORIGIN_OF_LANE, PLAIN, Int32Array, Judgement, UInt8Array
from specq.runtime import Faults
from specq.verifier.scheduler import ScheduledSession
from specq.verifier.session import Session
from specq.verifier.trees import NONE

NO_FLAGS: UInt8Array = np.zeros(0, np.uint8)
NO_FLAGS.flags.writeable = False
_PLAIN, _CORRECTED = bytes([ORIGIN_CODES[PLAIN]]), bytes([ORIGIN_CODES[CORRECTED]])


class Round:
    """What a step committed to a session.

    base_len    the committed length before; token_ids i32[m]: the accepted path, then the correction or bonus, up to the token
                that ends the text
    nodes       i32[n]: those that were verified; path: the places of the accepted among them
    node_ids    i32[n], lanes u8[n], is_accepted u8[n]: the same nodes for a verdict; set by `commit`
    first_arrived   when the oldest of them arrived
    origins     the code of each token's origin (`specq.protocol.origins`); set by `commit`
    """

    __slots__ = (
        "base_len", "first_arrived", "is_accepted", "lanes", "node_ids", "nodes", "origins", "path", "session", "token_ids",
    )  # fmt: skip

    def __init__(
        self, session: Session, base_len: int, token_ids: Int32Array, nodes: Int32Array, path: tuple[int, ...]
    ) -> None:
        self.session, self.base_len, self.token_ids = session, base_len, token_ids
        self.nodes, self.path, self.first_arrived = nodes, path, 0.0
        self.node_ids, self.lanes, self.is_accepted = NO_TOKENS, NO_FLAGS, NO_FLAGS
        self.origins = _PLAIN

    def waited_us(self, started: float) -> int:
        """Return the microseconds that the oldest verified node had waited when the step started."""
        return int((started - self.first_arrived) * 1e6) if len(self.nodes) else 0


def commit(
    judged: Iterable[tuple[ScheduledSession, Judgement]], min_accept_prob: int, now: float, faults: Faults
) -> list[Round]:
    """Commit what was judged, of all sessions of a step at once, and count it; return the rounds of those without a fault."""
    rounds: list[Round] = []
    for share, judgement in judged:
        with faults.of(share, "committed"):
            rounds.append(_kept(share, judgement, now))
    if not rounds:
        return []
    operations, sessions = rounds[0].session.trees.operations, [done.session.place for done in rounds]
    num_verified = [len(done.nodes) for done in rounds]
    nodes, is_accepted = _verified(rounds, num_verified)
    operations.count(sessions, num_verified, nodes, is_accepted, min_accept_prob)  # trees as they were verified
    for done in rounds:
        done.session.origins += done.origins
    token_ids = np.concatenate([done.token_ids for done in rounds])
    operations.commit(sessions, [len(done.token_ids) for done in rounds], token_ids, num_verified)
    return rounds


def _kept(share: ScheduledSession, judgement: Judgement, now: float) -> Round:
    """Append to a session's transcript what was judged, up to the token that ends the text."""
    session, path = share.session, judgement.path
    base_len = len(session.token_ids)
    session.kv_len += len(path)
    session.committed_at = now
    tokens = judgement.token_ids.tolist()
    num_kept, session.finish = session.up_to_end(tokens)
    if judgement.logprobs is not None:
        session.logprobs.add(judgement.logprobs, num_kept)
    session.append(tokens[:num_kept])
    return Round(session, base_len, judgement.token_ids[:num_kept], share.nodes, path[:num_kept])


def _verified(rounds: Sequence[Round], num_verified: Sequence[int]) -> tuple[Int32Array, UInt8Array]:
    """Return the nodes that the rounds verified, i32[n], and which were accepted, u8[n]; note both with the rounds."""
    if not any(num_verified):
        return NO_TOKENS, NO_FLAGS
    drafted = [
        (done, end - size) for done, size, end in zip(rounds, num_verified, accumulate(num_verified), strict=True)
    ]
    nodes = np.concatenate([done.nodes for done in rounds])
    is_accepted = np.zeros(len(nodes), np.uint8)
    is_accepted[[first + place for done, first in drafted for place in done.path]] = 1
    _note_verified([(done, first) for done, first in drafted if len(done.nodes)], nodes, is_accepted)
    return nodes, is_accepted


def _note_verified(drafted: Sequence[tuple[Round, int]], nodes: Int32Array, is_accepted: UInt8Array) -> None:
    """Note what a verdict says of the verified nodes; each round comes with the place where its nodes begin."""
    trees = drafted[0][0].session.trees
    node_ids, lanes = trees.node_id[nodes], trees.lane_id[trees.node_lane[nodes]].astype(np.uint8)
    arrivals = np.minimum.reduceat(trees.arrived[nodes], [first for _, first in drafted]).tolist()
    for (done, first), arrived in zip(drafted, arrivals, strict=True):
        own = slice(first, first + len(done.nodes))
        done.node_ids, done.lanes, done.is_accepted = node_ids[own], lanes[own], is_accepted[own]
        done.first_arrived = arrived
    _note_origins(drafted, nodes, is_accepted, lanes)


def _note_origins(
    drafted: Sequence[tuple[Round, int]], nodes: Int32Array, is_accepted: UInt8Array, lanes: UInt8Array
) -> None:
    """Note where the tokens of each round come from. One of the target's own corrects drafts if a verified node hung from the
    end of the accepted path."""
    trees = drafted[0][0].session.trees
    firsts = [first for _, first in drafted]
    ends = [int(nodes[first + done.path[-1]]) if done.path else NONE for done, first in drafted]
    hangs = trees.parent[nodes] == np.repeat(ends, np.diff([*firsts, len(nodes)]))
    corrected = np.logical_or.reduceat(hangs, firsts).tolist()
    sources = ORIGIN_OF_LANE[lanes[is_accepted == 1]].tobytes()
    start = 0
    for (done, _), is_corrected in zip(drafted, corrected, strict=True):
        end = start + len(done.path)
        own = _CORRECTED if is_corrected else _PLAIN
        done.origins, start = (sources[start:end] + own)[: len(done.token_ids)], end
