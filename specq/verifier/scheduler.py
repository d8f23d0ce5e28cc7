"""Which sessions, and which nodes of each, share the next forward pass.

Every decoding session takes part with at least its plain row (rule 5: never slower than no speculation). Prefills are
chunked to what room is left. Then one rule: draft nodes are added, likeliest first, as long as that raises the step's
goodput, which is (expected tokens) / (expected seconds). No fixed number of drafts, no second controller.

The rule looks ahead, since a step's time is no smooth function of its rows: a node that does not pay by itself is added where
it does with others that follow. But whether a sampled node is added must not depend on its own token, and so neither on what
hangs from it or was drawn after it (decision 0008). So with n nodes added it looks at those that are known by then: those
that depend on no token of another node. Of point masses that are all, and the number with the most goodput is found.

Pure: sessions in, a plan out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specq.protocol import Float64Array, IntpArray, SessionStep
from specq.verifier.draft_tree import Node, best_chain, tree_of
from specq.verifier.session import Session
from specq.verifier.step_curve import StepCurve

FLOOR = 0.02  # nodes less likely than this are not worth looking at


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step does for each session that takes part, in order of precedence.

    goodput   expected tokens a second
    """

    shares: list[ScheduledSession]
    goodput: float

    @property
    def num_rows(self) -> int:
        return sum(share.step.num_rows for share in self.shares)


@dataclass(frozen=True, slots=True)
class ScheduledSession:
    """One session's part in a step; `chain_len` counts the nodes of its offered chain, which are in no tree."""

    session: Session
    step: SessionStep
    nodes: Sequence[Node] = ()
    chain_len: int = 0

    @property
    def session_id(self) -> int:
        return self.session.session_id


class Chosen(NamedTuple):
    """Nodes to verify, by session id: nodes of trees, parents before children, and lengths of chains."""

    nodes: dict[int, list[Node]]
    chains: dict[int, int]
    tokens: float  # that are expected of them


def plan(
    sessions: Iterable[Session], curve: StepCurve, *, max_rows: int, free_slots: int, max_chain: int = 0
) -> StepPlan:
    """Plan the next step.

    `sessions` come in order of precedence; `max_rows` bounds the rows of a step, `free_slots` the KV that it may take;
    `max_chain` is the engine's.
    """
    room = min(max_rows, free_slots)
    chunks: list[tuple[Session, int]] = []
    for session in sessions:
        size = min(session.num_pending, room)
        if size > 0:
            chunks.append((session, size))
            room -= size
    num_rows = sum(size for _, size in chunks)
    decoding = [session for session, size in chunks if size == session.num_pending]
    chosen = choose_nodes(decoding, num_rows, room, curve, max_chain)
    shares = [_share(session, size, chosen) for session, size in chunks]
    num_rows = sum(share.step.num_rows for share in shares)
    return StepPlan(shares, (len(decoding) + chosen.tokens) / curve(num_rows))


def _share(session: Session, size: int, chosen: Chosen) -> ScheduledSession:
    nodes, chain_len = chosen.nodes.get(session.session_id, ()), chosen.chains.get(session.session_id, 0)
    is_judged = size == session.num_pending
    step = SessionStep(
        session_id=session.session_id,
        start=session.kv_len,
        token_ids=np.array(session.token_ids[session.kv_len : session.kv_len + size], np.int32),
        params=session.params,
        tree=session.chain.tree(chain_len) if session.chain is not None else tree_of(nodes),
        judged=is_judged,
        history=session.history() if is_judged else None,
    )
    return ScheduledSession(session, step, nodes, chain_len)


def choose_nodes(sessions: Sequence[Session], num_rows: int, room: int, curve: StepCurve, max_chain: int = 0) -> Chosen:
    """Return the nodes to verify.

    `num_rows` rows are in the step already, one token is certain from each session, and at most `room` rows may be
    added. A node's chance never exceeds its parent's, so the likeliest n nodes always form whole trees.
    """
    offers = [(session, node) for session in sessions if session.num_live for node in _candidates(session, max_chain)]
    offered = [(session, _chain_reach_probs(session, max_chain)) for session in sessions if session.chain is not None]
    if not (offers or offered) or room <= 0:
        return Chosen({}, {}, 0.0)
    sizes = [len(reach_prob) for _, reach_prob in offered]
    reach_prob = np.concatenate([[node.reach_prob for _, node in offers], *[own for _, own in offered]])
    order = np.argsort(-reach_prob, kind="stable")
    needed = _needed(offers, order)
    taken = order[: best_count(reach_prob[order], needed, len(sessions), num_rows, room, curve)]
    nodes: dict[int, list[Node]] = {}
    for i in np.sort(taken[taken < len(offers)]).tolist():
        session, node = offers[i]
        nodes.setdefault(session.session_id, []).append(node)
    owners = np.repeat(np.arange(len(offered)), sizes)[taken[taken >= len(offers)] - len(offers)]
    lengths = np.bincount(owners, minlength=len(offered)).tolist()
    chains = {session.session_id: length for (session, _), length in zip(offered, lengths, strict=True)}
    return Chosen(nodes, chains, float(reach_prob[taken].sum()))


def _chain_reach_probs(session: Session, max_chain: int) -> Float64Array:
    assert session.chain is not None
    room = session.limit - session.length - 1
    return session.chain.reach_prob[: min(room, max_chain) if max_chain else room]


def _needed(offers: Sequence[tuple[Session, Node]], order: IntpArray) -> IntpArray:
    """Return i64[nodes], in this order: how many nodes must be in the step before each is known, 0 for point masses that
    hang from none that was drawn. What is needed comes first, so a node is known at the latest when it is next."""
    needed = np.zeros(len(order), np.intp)
    depending = [i for i, (_, node) in enumerate(offers) if node.depends_on is not None]
    if depending:
        place = np.empty(len(order), np.intp)
        place[order] = np.arange(len(order))
        index = {id(node): i for i, (_, node) in enumerate(offers)}
        needed[place[depending]] = [place[index[id(offers[i][1].depends_on)]] + 1 for i in depending]
    return needed


def best_count(
    reach_prob: Float64Array, needed: IntpArray, num_sessions: int, num_rows: int, room: int, curve: StepCurve
) -> int:
    """Return how many of the nodes, likeliest first, to add: none more as soon as no number of those that are known by then
    would raise the goodput; 0 is a legal answer, `room` the most."""
    tokens = num_sessions + np.concatenate(([0.0], np.cumsum(reach_prob)))
    times = curve.times(num_rows, min(len(reach_prob), room) + 1)
    goodput = tokens[: len(times)] / times
    if not needed.any():
        return int(np.argmax(goodput))
    for count in np.flatnonzero(goodput[1:] <= goodput[:-1]).tolist():  # where the next node does not pay by itself
        known = reach_prob[count:][needed[count:] <= count][: len(times) - count - 1]
        ahead = (tokens[count] + np.cumsum(known)) / times[count + 1 : count + 1 + len(known)]
        if ahead.max(initial=0.0) <= goodput[count]:
            return int(count)
    return len(goodput) - 1


def _candidates(session: Session, max_chain: int) -> list[Node]:
    room = session.limit - session.length - 1  # the correction takes one position itself
    last = session.length + room
    nodes = [node for node in session.candidates(FLOOR) if node.position < last]
    return best_chain(nodes, max_chain) if max_chain else nodes
