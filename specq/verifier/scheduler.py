"""Which sessions, and which nodes of each, share the next forward pass.

Every decoding session takes part with at least its plain row (rule 5: never slower than no speculation). Prefills are
chunked to the room that is left. Then one rule: draft nodes are added, likeliest first, as long as that raises the step's
goodput, which is (expected tokens) / (expected seconds). There is no fixed number of drafts and no second controller.

The rule looks ahead, since a step's time is not a smooth function of its rows: a node that does not pay by itself is added where
it pays together with nodes after it. But whether a sampled node is added must not depend on its own token, and so neither on
what hangs from it nor on what was drawn after it (decision 0008). So with n nodes added, the rule looks only at nodes that are
known by then: those that depend on no token of a node not yet added. Point masses are all known from the start, and for them
the rule finds the number with the highest goodput.

Pure: sessions in, a plan out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from specq.protocol import NO_SCRATCH, Float64Array, IntpArray, ScratchRows, SessionStep
from specq.verifier.choice_order import order_of_choice
from specq.verifier.draft_tree import Node, best_chain, tree_of
from specq.verifier.session import Session
from specq.verifier.step_curve import StepCurve

FLOOR = 0.02  # nodes less likely than this are not considered


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step does for each session that takes part, in order of precedence; goodput: expected tokens a second."""

    shares: list[ScheduledSession]
    num_rows: int
    goodput: float


@dataclass(frozen=True, slots=True)
class ScheduledSession:
    """One session's part in a step; `chain_len` counts the verified nodes of its offered chain, which are on no tree."""

    session: Session
    step: SessionStep
    nodes: Sequence[Node] = ()
    chain_len: int = 0

    @property
    def session_id(self) -> int:
        return self.session.session_id

    @property
    def is_decoding(self) -> bool:
        """Whether all of the session's text but the last token has its KV already."""
        return self.step.judged and len(self.step.token_ids) == 1


class Chosen(NamedTuple):
    """Nodes to verify, by session id.

    nodes    of trees, parents before children; chains: how many of an offered chain
    tokens   the expected number of those that are accepted
    """

    nodes: dict[int, list[Node]]
    chains: dict[int, int]
    tokens: float


def plan(
    sessions: Iterable[Session], curve: StepCurve, *, max_rows: int, free_slots: int, max_chain: int = 0
) -> StepPlan:
    """Plan the next step.

    `sessions` come in order of precedence; `max_rows` bounds the rows of a step, `free_slots` the KV that it may take;
    `max_chain` is the engine's.
    """
    room = min(max_rows, free_slots)
    chunks = _chunks(sessions, room)
    num_rows = sum(size for _, size in chunks)
    decoding = [session for session, size in chunks if size == session.num_pending]
    num_rows += _fit_scratch(decoding, room - num_rows)
    chosen = choose_nodes(decoding, num_rows, room - num_rows, curve, max_chain)
    shares = [_share(session, size, chosen) for session, size in chunks]
    num_rows = sum(share.step.num_rows for share in shares)
    return StepPlan(shares, num_rows, (len(decoding) + chosen.tokens) / curve(num_rows))


def _chunks(sessions: Iterable[Session], room: int) -> list[tuple[Session, int]]:
    """Return how many committed tokens the step computes for each session, as far as there is room."""
    chunks: list[tuple[Session, int]] = []
    for session in sessions:
        size = min(session.num_pending, room)
        if size > 0:
            chunks.append((session, size))
            room -= size
    return chunks


def _fit_scratch(sessions: Iterable[Session], room: int) -> int:
    """Leave out the scratch rows for which there is no room; return how many are left."""
    taken = 0
    for session in sessions:
        count = session.scratch.num_rows
        if count > room - taken:
            session.scratch = NO_SCRATCH
        else:
            taken += count
    return taken


def _below(rows: ScratchRows, num_nodes: int) -> ScratchRows:
    """Return scratch rows as they stand behind this many nodes; their parents are -1 or earlier ones of them."""
    if not (rows.num_rows and num_nodes):
        return rows
    return replace(rows, parents=np.where(rows.parents < 0, -1, rows.parents + num_nodes).astype(np.int32))


def _share(session: Session, size: int, chosen: Chosen) -> ScheduledSession:
    nodes, chain_len = chosen.nodes.get(session.session_id, ()), chosen.chains.get(session.session_id, 0)
    is_judged = size == session.num_pending
    tree = session.chain.tree(chain_len) if session.chain is not None else tree_of(nodes)
    step = SessionStep(
        session_id=session.session_id,
        start=session.kv_len,
        token_ids=np.array(session.token_ids[session.kv_len : session.kv_len + size], np.int32),
        params=session.params,
        tree=tree,
        judged=is_judged,
        history=session.history() if is_judged else None,
        scratch=_below(session.scratch, tree.num_nodes) if is_judged else NO_SCRATCH,
    )
    return ScheduledSession(session, step, nodes, chain_len)


def choose_nodes(sessions: Sequence[Session], num_rows: int, room: int, curve: StepCurve, max_chain: int = 0) -> Chosen:
    """Choose what to verify: the likeliest nodes of all sessions, as many as `best_count` says.

    A node is never likelier than its parent, so the likeliest n nodes always form whole trees; where nodes are sampled, their order
    of choice is kept (`order_of_choice`). `num_rows` rows are in the step already; one token is certain from each session; at
    most `room` rows may be added.
    """
    trees = [(session, _candidates(session, max_chain)) for session in sessions if session.num_live]
    on_trees = [(session, node) for session, nodes in trees for node in nodes]
    chains = [(session, _chain_reach_prob(session, max_chain)) for session in sessions if session.chain is not None]
    if not (on_trees or chains) or room <= 0:
        return Chosen({}, {}, 0.0)
    # An index into reach_prob stands for a node: first those of trees, then those of one chain after the other.
    of_trees = np.array([node.reach_prob for _, node in on_trees])
    reach_prob = np.concatenate([of_trees, *(own for _, own in chains)])  # [num_offered]
    order = np.argsort(-_precedence(trees, reach_prob), kind="stable")  # [num_offered]
    count = best_count(reach_prob[order], _num_needed(on_trees, order), len(sessions), num_rows, room, curve)
    chosen = order[:count]
    return Chosen(
        nodes=_by_session(on_trees, chosen[chosen < len(on_trees)]),
        chains=_chain_lengths(chains, chosen[chosen >= len(on_trees)] - len(on_trees)),
        tokens=float(reach_prob[chosen].sum()),
    )


def _candidates(session: Session, max_chain: int) -> Sequence[Node]:
    room = session.limit - session.length - 1  # the correction takes one position
    last = session.length + room
    nodes = [node for node in session.candidates(FLOOR) if node.position < last]
    return order_of_choice(session, best_chain(nodes, max_chain) if max_chain else nodes)


def promised(session: Session) -> float:
    """Return how many tokens a session's tree promises, without a look at drawn ones that are not known (decision 0008)."""
    if not session.num_live:
        return 0.0
    nodes = order_of_choice(session, session.candidates(FLOOR))
    return sum(node.reach_prob for node in nodes if node.depends_on is None)


def _precedence(trees: Sequence[tuple[Session, Sequence[Node]]], reach_prob: Float64Array) -> Float64Array:
    """Return f64[num_offered]: what sorts the nodes of all sessions. It is how likely they are, and in a session with an order of
    choice no more than that of the nodes before."""
    precedence, start = reach_prob.copy(), 0
    for session, nodes in trees:
        own = slice(start, start + len(nodes))
        if session.takes_distributions:
            precedence[own] = np.minimum.accumulate(reach_prob[own])
        start = own.stop
    return precedence


def _chain_reach_prob(session: Session, max_chain: int) -> Float64Array:
    """Return f64[at most n]: the cumulative acceptance probabilities of the nodes that may be taken of an offered chain."""
    assert session.chain is not None
    room = session.limit - session.length - 1
    return session.chain.reach_prob[: min(room, max_chain) if max_chain else room]


def _by_session(on_trees: Sequence[tuple[Session, Node]], chosen: IntpArray) -> dict[int, list[Node]]:
    """Return the chosen nodes of each session in the order in which they were offered: parents before children."""
    nodes: dict[int, list[Node]] = {}
    for i in np.sort(chosen).tolist():
        session, node = on_trees[i]
        nodes.setdefault(session.session_id, []).append(node)
    return nodes


def _chain_lengths(chains: Sequence[tuple[Session, Float64Array]], chosen: IntpArray) -> dict[int, int]:
    """Return how many nodes of each chain are chosen; `chosen` are indices into all chains, one after the other."""
    owners = np.repeat(np.arange(len(chains)), [len(reach_prob) for _, reach_prob in chains])[chosen]
    lengths = np.bincount(owners, minlength=len(chains)).tolist()
    return {session.session_id: length for (session, _), length in zip(chains, lengths, strict=True)}


def _num_needed(on_trees: Sequence[tuple[Session, Node]], order: IntpArray) -> IntpArray:
    """Return i64[num_offered], likeliest first: how many nodes must be in the step before each is known.

    It is 0 for a node that depends on no other; chains never do. For others it is the place of the node that they depend on,
    plus 1. That node comes first in the order, so a node is known at the latest when it is next.
    """
    needed = np.zeros(len(order), np.intp)
    depending = [i for i, (_, node) in enumerate(on_trees) if node.depends_on is not None]
    if depending:
        place = np.empty(len(order), np.intp)  # of each node in the order
        place[order] = np.arange(len(order))
        index = {id(node): i for i, (_, node) in enumerate(on_trees)}
        needed[place[depending]] = [place[index[id(on_trees[i][1].depends_on)]] + 1 for i in depending]
    return needed


def best_count(
    reach_prob: Float64Array, needed: IntpArray, num_sessions: int, num_rows: int, room: int, curve: StepCurve
) -> int:
    """Return how many of the nodes, likeliest first, to add, at most `room`; 0 is a legal answer.

    It stops at the first count at which no number of further nodes, of those that are known by then, would raise the goodput.

    reach_prob f64[num_offered], falling; needed i64[num_offered]: see `_num_needed`
    """
    # With 0, 1, ... nodes added.
    tokens = num_sessions + np.concatenate(([0.0], np.cumsum(reach_prob)))  # [num_offered + 1]
    times = curve.times(num_rows, min(len(reach_prob), room) + 1)  # [most + 1]
    goodput = tokens[: len(times)] / times  # [most + 1]
    if not needed.any():
        return int(np.argmax(goodput))
    for count in np.flatnonzero(goodput[1:] <= goodput[:-1]).tolist():  # where the next node does not pay by itself
        known = reach_prob[count:][needed[count:] <= count][: len(times) - count - 1]
        ahead = (tokens[count] + np.cumsum(known)) / times[count + 1 : count + 1 + len(known)]
        if ahead.max(initial=0.0) <= goodput[count]:
            return int(count)
    return len(goodput) - 1
