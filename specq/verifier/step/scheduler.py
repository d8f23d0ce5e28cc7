"""Which sessions, and which nodes of each, share the next forward pass.

Every decoding session takes part with at least its plain row (rule 5: never slower than no speculation). Prefills are
chunked to the room that is left, and beside decoding sessions to the time that these can spare (prefill_limit). Then one rule: draft nodes are added, likeliest first, as long as that raises the step's
goodput, which is (expected tokens) / (expected seconds). There is no fixed number of drafts and no second controller.

The rule looks ahead, since a step's time is not a smooth function of its rows: a node that does not pay by itself is added where
it pays together with nodes after it. But whether a sampled node is added must not depend on its own token, and so neither on
what hangs from it nor on what was drawn after it (decision 0008). So with n nodes added, the rule looks only at nodes that are
known by then: those that depend on no token of a node not yet added. Point masses are all known from the start, and for them
the rule finds the number with the highest goodput. Where the engine is quicker if all chains are equally long, a step of sessions that
decode, and of point masses, has one length for all instead (even_chains).

Pure: sessions in, a plan out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from specq.protocol import (
    NO_SCRATCH,
    NO_TOKENS,
    BoolArray,
    Float64Array,
    Int32Array,
    Int64Array,
    IntpArray,
    ScratchRows,
)
from specq.verification import NO_SCORES, DeviceTokens, Extra, StepBatch, ends_of
from specq.verifier.control.prefill_limit import UNLIMITED, PrefillLimit, filled, longest_s
from specq.verifier.control.step_curve import StepCurve
from specq.verifier.control.waiting import MARGIN
from specq.verifier.sessions.session import Session
from specq.verifier.step.choice_order import order_of_choice
from specq.verifier.step.even_chains import in_even_chains
from specq.verifier.step.shares import NO_SHARES, Shares
from specq.verifier.trees import NO_LIMIT, NONE, DraftTrees

NO_CHAINS: Mapping[int, int] = {}
FLOOR = 0.01  # nodes less likely than this are not considered


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step does for each session that takes part, in order of precedence; goodput: expected tokens a second."""

    shares: Shares
    num_rows: int
    goodput: float


class Chosen(NamedTuple):
    """Nodes to verify.

    firsts   i64[sessions + 1]: where each session's nodes begin
    nodes    i32[n], parents before children
    tokens   the expected number of those that are accepted
    """

    firsts: Int64Array
    nodes: Int32Array
    tokens: float


def plan(
    sessions: Sequence[Session],
    curve: StepCurve,
    *,
    max_rows: int,
    free_slots: int,
    max_chain: int = 0,
    even_chains: Mapping[int, int] = NO_CHAINS,
    before: Shares | None = None,
    drafted: DeviceTokens | None = None,
    prefill: PrefillLimit = UNLIMITED,
    saved_s: float = 0.0,
) -> StepPlan:
    """Plan the next step.

    `sessions` come in order of precedence; `max_rows` bounds the rows of a step, `free_slots` the KV that it may take;
    `max_chain` and `even_chains` are the engine's. All sessions are in the same draft trees. `before`: the newest step in flight, if there is one, which feeds the
    sessions whose last token is not known yet: all of their committed tokens have KV, or will have it then. `drafted`: for what the handles on the
    trees stand, if there are any. `prefill`: what limits the rows of prompts beside sessions that decode. `saved_s`: seconds that a step without
    nodes takes less than the curve says, since the next is launched early.
    """
    room = min(max_rows, free_slots)
    if not sessions or room < 1:
        return StepPlan(NO_SHARES, 0, 0.0)
    chunks = _chunks(sessions, _Limits(max_rows, room, curve, prefill), is_fed=before is not None)
    num_rows = chunks.num_tokens
    decoding = chunks.decoding()
    num_rows += _fit_scratch(decoding, room - num_rows)
    # Of a session that will be fed it is not known what nodes follow.
    most = _most_nodes(num_rows, room - num_rows, curve) if before is None else 0
    chosen = choose_nodes(decoding, num_rows, most, curve, max_chain, saved_s, even_chains)
    num_rows += len(chosen.nodes)
    goodput = (len(decoding) + chosen.tokens) / curve(num_rows, len(chosen.nodes))
    return StepPlan(_shares(chunks, chosen, before, drafted), num_rows, goodput)


def _most_nodes(num_rows: int, room: int, curve: StepCurve) -> int:
    """Return how many nodes a step of so many other rows may have so that it is not silent for too long (`prefill_limit`)."""
    longest = longest_s(curve(num_rows))
    if room <= 0 or curve(num_rows + room, room) <= longest:
        return room
    return int(np.searchsorted(curve.times(num_rows, room + 1), longest, "right")) - 1


class _Chunks(NamedTuple):
    """Sessions, their places, and how many committed tokens, at least one, the step computes of each and in all; is_judged: whether these
    are all."""

    sessions: list[Session]
    places: IntpArray
    starts: Int32Array
    sizes: IntpArray
    is_judged: BoolArray
    num_tokens: int

    def decoding(self) -> list[Session]:
        """Return the sessions whose step gives a token."""
        if np.count_nonzero(self.is_judged) == len(self.sessions):
            return self.sessions
        return [self.sessions[i] for i in self.is_judged.nonzero()[0].tolist()]


class _Limits(NamedTuple):
    """What bounds the rows of a step: `room` is `max_rows`, or less where KV slots run short."""

    max_rows: int
    room: int
    curve: StepCurve
    prefill: PrefillLimit


def _chunks(sessions: Sequence[Session], limits: _Limits, *, is_fed: bool) -> _Chunks:
    """Return what the step computes of each session, as far as there is room; is_fed: where no token is known, one will be."""
    trees, chosen = sessions[0].trees, list(sessions)
    places = np.array([session.place for session in chosen], np.intp)
    starts = trees.kv_len[places]
    pending = (trees.length[places] - starts).astype(np.intp)
    if is_fed:
        np.maximum(pending, 1, out=pending)
    if (num_tokens := int(pending.sum())) == len(chosen) <= limits.room:
        return _Chunks(chosen, places, starts, pending, pending > 0, num_tokens)
    sizes = filled(_beside_decoding(chosen, starts, pending, limits, is_late=is_fed), limits.room)
    some = sizes.nonzero()[0]
    if len(some) < len(chosen):
        chosen = [chosen[i] for i in some.tolist()]
        places, starts, pending, sizes = places[some], starts[some], pending[some], sizes[some]
    return _Chunks(chosen, places, starts, sizes, sizes == pending, int(sizes.sum()))


def _beside_decoding(
    sessions: list[Session], starts: Int32Array, pending: IntpArray, limits: _Limits, *, is_late: bool
) -> IntpArray:
    """Return how many tokens of each session the step may compute: of prompts only so many as the step may take, and as
    sessions that decode can spare time for."""
    is_prompt = pending > 1
    num_decoding = len(pending) - int(np.count_nonzero(is_prompt))
    if num_decoding == len(pending):
        return pending
    prompts = is_prompt.nonzero()[0]
    chunks, room = (starts[prompts], pending[prompts]), max(limits.room - num_decoding, 1)
    room = limits.prefill.most_rows(chunks, num_decoding, room, limits.curve, is_late=is_late)
    if not num_decoding:
        return filled(pending, room)
    is_free = [not sessions[i].gives_way and sessions[i].length <= limits.max_rows for i in prompts.tolist()]
    sizes = pending.copy()
    sizes[prompts] = limits.prefill.sizes(chunks, np.array(is_free), num_decoding, room, limits.curve, is_late=is_late)
    return sizes


def _fit_scratch(sessions: Sequence[Session], room: int) -> int:
    """Leave out the scratch rows for which there is no room; return how many are left."""
    if not sessions or not np.count_nonzero(sessions[0].trees.num_scratch):
        return 0
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


def _shares(chunks: _Chunks, chosen: Chosen, before: Shares | None, drafted: DeviceTokens | None) -> Shares:
    """Return the parts of all sessions; `chosen` are nodes of the decoding ones."""
    sessions, places, starts, sizes, is_judged, _ = chunks
    trees, num_nodes = sessions[0].trees, np.zeros(len(sessions), np.intp)
    token_ids, parents, scores = _tokens_of(chunks), NO_TOKENS, NO_SCORES
    if len(chosen.nodes):
        num_nodes[is_judged] = np.diff(chosen.firsts)
        node_tokens, parents, scores = trees.operations.flatten(chosen.firsts, chosen.nodes)
        if drafted is not None and drafted.tree is not None:
            assert drafted.tree.are_first(node_tokens, np.diff(chosen.firsts)), (
                "what stands above these nodes may be missing"
            )
        token_ids = _interleaved(token_ids, sizes, node_tokens, num_nodes)
    batch = StepBatch(
        session_ids=trees.session_id[places].tolist(),
        params=[session.params for session in sessions],
        sampling=trees.sampling[places],
        traits=trees.traits[places],
        starts=starts,
        num_tokens=sizes,
        is_judged=is_judged,
        token_ids=token_ids,
        num_nodes=num_nodes,
        extras=_extras(chunks, num_nodes, chosen.nodes),
        parents=parents,
        scores=scores,
        fed_by=None if before is None else _fed_by(chunks, before),
        drafted=drafted if len(chosen.nodes) else None,
    )
    return Shares(sessions, places, batch, chosen.nodes)


def _fed_by(chunks: _Chunks, before: Shares) -> Int32Array | None:
    """Return `StepBatch.fed_by`, given the newest step in flight."""
    trees = chunks.sessions[0].trees
    is_fed = trees.length[chunks.places] <= chunks.starts
    if not np.count_nonzero(is_fed):
        return None
    judged = before.judged().places
    found = np.full(len(trees.length), NONE, np.int32)
    found[judged] = np.arange(len(judged))
    fed_by: Int32Array = np.where(is_fed, found[chunks.places], np.int32(NONE))
    assert np.array_equal(fed_by != NONE, is_fed), "a session's last token is neither known nor on its way"
    return fed_by


def _tokens_of(chunks: _Chunks) -> Int32Array:
    """Return i32[sum of sizes]: the committed tokens that the step computes; of a session that will be fed, the last one."""
    sessions, places, starts, sizes, is_judged, num_tokens = chunks
    trees = sessions[0].trees
    if num_tokens == len(sessions) == np.count_nonzero(is_judged):
        return trees.last_token[places]
    starts = np.minimum(starts, trees.length[places] - 1)
    spans = zip(sessions, starts.tolist(), (starts + sizes).tolist(), strict=True)
    return np.array([token for session, start, end in spans for token in session.token_ids[start:end]], np.int32)


def _interleaved(token_ids: Int32Array, sizes: IntpArray, of_nodes: Int32Array, num_nodes: IntpArray) -> Int32Array:
    """Return the tokens of each session and then those of its nodes."""
    found = np.empty(len(token_ids) + len(of_nodes), np.int32)
    at = ends_of(sizes).repeat(num_nodes) + np.arange(
        len(of_nodes)
    )  # behind the session's tokens, and all nodes before
    is_token = np.ones(len(found), np.bool_)
    is_token[at] = False
    found[at], found[is_token] = of_nodes, token_ids
    return found


def _extras(chunks: _Chunks, num_nodes: IntpArray, nodes: Int32Array) -> dict[int, Extra]:
    """Return what few sessions have: a history, scratch rows, draft distributions."""
    trees, places = chunks.sessions[0].trees, chunks.places
    has_extras = trees.has_extras[places]
    if not np.count_nonzero(has_extras):
        return {}
    found, ends = {}, ends_of(num_nodes)
    for i in (has_extras * chunks.is_judged).nonzero()[0].tolist():
        session, count = chunks.sessions[i], int(num_nodes[i])
        own = nodes[ends[i] - count : ends[i]]
        distributions = trees.distributions_of(own) if count and session.takes_distributions else None
        found[i] = Extra(session.history(), _below(session.scratch, count), distributions)
    return found


def choose_nodes(
    sessions: Sequence[Session],
    num_rows: int,
    room: int,
    curve: StepCurve,
    max_chain: int = 0,
    saved_s: float = 0.0,
    even_chains: Mapping[int, int] = NO_CHAINS,
) -> Chosen:
    """Choose what to verify: the likeliest nodes of all sessions, as many as `best_count` says.

    A node is never likelier than its parent, so the likeliest n nodes always form whole trees; where nodes are sampled, their order
    of choice is kept (`order_of_choice`). `num_rows` rows are in the step already; one token is certain from each session; at
    most `room` rows may be added. `saved_s`, `even_chains`: as of `plan`.
    """
    if room <= 0 or not sessions or not sessions[0].trees.num_nodes:
        return Chosen(np.zeros(len(sessions) + 1, np.int64), NO_TOKENS, 0.0)
    trees = sessions[0].trees
    firsts, nodes = offered(sessions, max_chain)
    reach_prob = trees.reach_prob[nodes]  # [num_offered]
    if even_chains and num_rows == len(sessions) and not _take_distributions(sessions):
        is_in = in_even_chains(firsts, reach_prob, room, curve, even_chains, saved_s)
        return Chosen(np.append(0, is_in.cumsum())[firsts], nodes[is_in], float(reach_prob[is_in].sum()))
    order = np.argsort(-_precedence(sessions, firsts, reach_prob), kind="stable")  # [num_offered]
    count = best_count(
        reach_prob[order], _num_needed(trees, nodes, order), len(sessions), num_rows, room, curve, saved_s
    )
    chosen = np.sort(order[:count])
    return Chosen(chosen.searchsorted(firsts), nodes[chosen], float(reach_prob[chosen].sum()))


def offered(sessions: Sequence[Session], max_chain: int = 0) -> tuple[Int64Array, Int32Array]:
    """Return (firsts, nodes): what may be verified of some sessions, of each in the order of choice, with `reach_prob` and
    `depends_on` set. The correction takes the last position that is left."""
    trees, places = sessions[0].trees, np.array([session.place for session in sessions], np.intp)
    operations = trees.operations
    firsts, nodes = operations.candidates(places, trees.limit[places] - 1, FLOOR)
    if max_chain:
        firsts, nodes = operations.best_chains(firsts, nodes, max_chain)
    return _in_order_of_choice(sessions, firsts, nodes)


def _in_order_of_choice(
    sessions: Sequence[Session], firsts: Int64Array, nodes: Int32Array
) -> tuple[Int64Array, Int32Array]:
    """Order the nodes of sessions that may have sampled ones."""
    if not _take_distributions(sessions):
        return firsts, nodes
    of_each = zip(sessions, np.split(nodes, firsts[1:-1]), strict=True)
    ordered = [
        np.array(order_of_choice(session, own.tolist()), np.int32) if session.takes_distributions else own
        for session, own in of_each
    ]
    return np.cumsum([0, *map(len, ordered)], dtype=np.int64), np.concatenate(ordered)


def _take_distributions(sessions: Sequence[Session]) -> bool:
    """Return whether nodes of some of these sessions may be sampled. All are in the same draft trees."""
    return bool(np.count_nonzero(sessions[0].trees.takes_distributions[[session.place for session in sessions]]))


def promised(sessions: Sequence[Session]) -> Float64Array:
    """Return f64[sessions]: how many tokens each tree promises, without a look at drawn ones that are not known (decision 0008). All are
    in the same draft trees."""
    trees, places = sessions[0].trees, [session.place for session in sessions]
    live = trees.operations.candidates(places, [NO_LIMIT] * len(places), FLOOR)
    firsts, nodes = _in_order_of_choice(sessions, *live)
    of_sessions = np.arange(len(places)).repeat(np.diff(firsts))
    is_known = trees.depends_on[nodes] == NONE
    return np.bincount(of_sessions, trees.reach_prob[nodes] * is_known, len(places)).astype(np.float64, copy=False)


def are_worth_waiting_for(drafted: Sequence[Session], num_sessions: int, curve: StepCurve, saved_s: float) -> bool:
    """Return whether what hangs on some sessions' trees, all of it point masses, promises a step of `num_sessions` with more tokens a second than
    one that begins before the step in flight has ended, given what this one may say of it.

    saved_s   as of `plan`; neither the step that waits nor the one after it saves that
    """
    trees, places = drafted[0].trees, [session.place for session in drafted]
    _, nodes = trees.operations.candidates(places, [NO_LIMIT] * len(places), FLOOR)
    beyond = nodes[trees.parent[nodes] != NONE]  # the next token is the step's in flight
    if not len(beyond):
        return False
    tokens = num_sessions + np.cumsum(np.sort(trees.reach_prob[beyond])[::-1])
    times = curve.times(num_sessions, len(beyond) + 1)
    return bool((tokens / (times[1:] + saved_s)).max() > MARGIN * num_sessions / (times[0] - saved_s))


def _precedence(sessions: Sequence[Session], firsts: Int64Array, reach_prob: Float64Array) -> Float64Array:
    """Return f64[num_offered]: what sorts the nodes of all sessions. It is how likely they are, and in a session with an order of
    choice no more than that of the nodes before."""
    precedence = reach_prob
    for i, session in enumerate(sessions) if _take_distributions(sessions) else ():
        if session.takes_distributions:
            precedence = reach_prob.copy() if precedence is reach_prob else precedence
            own = slice(firsts[i], firsts[i + 1])
            precedence[own] = np.minimum.accumulate(reach_prob[own])
    return precedence


def _num_needed(trees: DraftTrees, nodes: Int32Array, order: IntpArray) -> IntpArray:
    """Return i64[num_offered], likeliest first: how many nodes must be in the step before each is known.

    It is 0 for a node that depends on no other. For others it is the place of the node that they depend on, plus 1. That node
    comes first in the order, so a node is known at the latest when it is next.
    """
    needed = np.zeros(len(order), np.intp)
    depends_on = trees.depends_on[nodes]
    depending = np.flatnonzero(depends_on != NONE)
    if len(depending):
        place = np.empty(len(order), np.intp)  # of each node in the order
        place[order] = np.arange(len(order))
        trees.mark[nodes] = place
        needed[place[depending]] = trees.mark[depends_on[depending]] + 1
    return needed


def best_count(
    reach_prob: Float64Array,
    needed: IntpArray,
    num_sessions: int,
    num_rows: int,
    room: int,
    curve: StepCurve,
    saved_s: float = 0.0,
) -> int:
    """Return how many of the nodes, likeliest first, to add, at most `room`; 0 is a legal answer.

    It stops at the first count at which no number of further nodes, of those that are known by then, would raise the goodput.

    reach_prob f64[num_offered], falling; needed i64[num_offered]: see `_num_needed`; saved_s as of `plan`
    """
    # With 0, 1, ... nodes added.
    tokens = num_sessions + np.concatenate(([0.0], np.cumsum(reach_prob)))  # [num_offered + 1]
    times = curve.times(num_rows, min(len(reach_prob), room) + 1)  # [most + 1]
    times[0] -= saved_s
    goodput = tokens[: len(times)] / times  # [most + 1]
    if not needed.any():
        return int(np.argmax(goodput))
    for count in np.flatnonzero(goodput[1:] <= goodput[:-1]).tolist():  # where the next node does not pay by itself
        known = reach_prob[count:][needed[count:] <= count][: len(times) - count - 1]
        ahead = (tokens[count] + np.cumsum(known)) / times[count + 1 : count + 1 + len(known)]
        if ahead.max(initial=0.0) <= goodput[count]:
            return int(count)
    return len(goodput) - 1
