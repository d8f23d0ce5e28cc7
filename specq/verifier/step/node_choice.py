"""Choose the draft nodes that the next forward pass verifies.

One rule: draft nodes are added, likeliest first, while this raises the step's goodput. Goodput is (expected tokens) /
(expected seconds). The number of drafts is not fixed, and there is no second controller.

The rule looks ahead, since a step's time is not smooth in its rows. A node is also added if it pays only together
with the nodes after it. But the choice of a sampled node must not depend on its own token. So it must not depend on the
node's children, nor on tokens drawn after it (decision 0008). With n nodes added, the rule looks only at the nodes
known by then. Such nodes do not depend on the token of a node not yet added. Point masses are all known from the start.
For them the rule finds the number with the highest goodput.

Some engines are faster if all chains have the same length. For them, decoding sessions with point masses use one length
(`in_even_chains`).

`Shares` holds the parts of all sessions in a step, as arrays. `ScheduledSession` is the part of one session.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np

from specq.protocol import MODES, NO_TOKENS, BoolArray, Float64Array, Int32Array, Int64Array, IntpArray, SessionStep
from specq.verification import WITH_GRAMMAR, StepBatch, ends_of, places_in_runs
from specq.verifier.models.goodput import best_by_goodput
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions.session import Session
from specq.verifier.step.choice_order import order_of_choice
from specq.verifier.trees import NO_LIMIT, NONE, DraftTrees


@dataclass(frozen=True, slots=True)
class ScheduledSession:
    """One session's part in a step.

    nodes  i32[n]: the verified nodes of its tree, as in `step.tree`.
    """

    session: Session
    step: SessionStep
    nodes: Int32Array

    @property
    def session_id(self) -> int:
        return self.session.session_id


class Shares(Sequence[ScheduledSession]):
    """The parts of n sessions in a step.

    places  i64[n]: the places of the sessions among the trees.
    batch   their rows in the engine.
    nodes   i32[all]: the verified nodes, one session after the other; `batch` has the number of each session.
    """

    def __init__(self, sessions: list[Session], places: IntpArray, batch: StepBatch, nodes: Int32Array) -> None:
        self.sessions, self.places, self.batch, self.nodes = sessions, places, batch, nodes

    @cached_property
    def prompts(self) -> tuple[int, int]:
        """The number of prompt rows, and of sessions that finish their prompt.

        Such a session gets its first token in this step.
        """
        if self.batch.are_judged and np.count_nonzero(self.batch.num_tokens == 1) == len(self):
            return 0, 0
        is_prompt = self._are_prompts()
        return int(self.batch.num_tokens[is_prompt].sum()), int(np.count_nonzero(self.batch.is_judged & is_prompt))

    @property
    def num_decoding(self) -> int:
        """The number of sessions without rows of prompts."""
        return len(self) - int(np.count_nonzero(self._are_prompts()))

    @property
    def num_beside(self) -> int:
        """The number of sessions in the background that decode beside others."""
        own = [i for i, session in enumerate(self.sessions) if session.is_background]
        num_decoding = len(own) - int(np.count_nonzero(self._are_prompts()[own])) if own else 0
        return num_decoding if num_decoding < self.num_decoding else 0

    def prompt_chunks(self) -> tuple[Int32Array, IntpArray]:
        """Return the starts of the step's prompt chunks, i32[n], and their rows, i64[n]."""
        is_prompt = self._are_prompts()
        return self.batch.starts[is_prompt], self.batch.num_tokens[is_prompt]

    def _are_prompts(self) -> BoolArray:
        are_prompts: BoolArray = ~self.batch.is_judged | (self.batch.num_tokens > 1)
        return are_prompts

    def num_attended(self) -> int:
        """Return the number of tokens to which the rows of prompts attend in all."""
        starts, sizes = self.prompt_chunks()
        return int((starts * sizes + sizes * (sizes + 1) // 2).sum())

    @property
    def modes(self) -> set[str]:
        """The modes of the sessions."""
        return (
            {MODES[mode] for mode in set(self.sessions[0].trees.mode[self.places].tolist())} if self.sessions else set()
        )

    def judged(self) -> Shares:
        """Return the judged parts."""
        return self if self.batch.are_judged else self.take(self.batch.is_judged.nonzero()[0])

    def known(self) -> Shares:
        """Return the parts with the drafted tokens that have been read by now."""
        if self.batch.drafted is None:
            return self
        return Shares(self.sessions, self.places, self.batch.known(), self.nodes)

    def take(self, which: IntpArray) -> Shares:
        """Return some of the parts, in the same order."""
        chosen = np.zeros(len(self), np.bool_)
        chosen[which] = True
        sessions = [self.sessions[i] for i in which.tolist()]
        return Shares(
            sessions, self.places[which], self.batch.take(which), self.nodes[chosen.repeat(self.batch.num_nodes)]
        )

    @cached_property
    def _each(self) -> list[ScheduledSession]:
        ends = ends_of(self.batch.num_nodes).tolist()
        spans = map(slice, [0, *ends], ends)
        parts = zip(self.sessions, self.batch, spans, strict=True)
        return [ScheduledSession(session, step, self.nodes[span]) for session, step, span in parts]

    def __len__(self) -> int:
        return len(self.sessions)

    def __iter__(self) -> Iterator[ScheduledSession]:
        return iter(self._each)

    @overload
    def __getitem__(self, index: int) -> ScheduledSession: ...
    @overload
    def __getitem__(self, index: slice) -> Shares: ...
    def __getitem__(self, index: int | slice) -> ScheduledSession | Shares:
        return self.take(np.arange(len(self))[index]) if isinstance(index, slice) else self._each[index]


NO_SHARES = Shares([], np.zeros(0, np.intp), StepBatch.of([]), NO_TOKENS)


NO_CHAINS: Mapping[int, int] = {}
FLOOR = 0.01  # nodes less likely than this are not considered


class Chosen(NamedTuple):
    """Nodes to verify.

    firsts   i64[sessions + 1]: where each session's nodes begin.
    nodes    i32[n], parents before children.
    tokens   the expected number of accepted tokens.
    """

    firsts: Int64Array
    nodes: Int32Array
    tokens: float


def choose_nodes(
    sessions: Sequence[Session],
    num_rows: int,
    room: int,
    curve: StepCurve,
    max_chain: int = 0,
    saved_s: float = 0.0,
    even_chains: Mapping[int, int] = NO_CHAINS,
) -> Chosen:
    """Choose the nodes to verify: the likeliest nodes of all sessions; `best_count` gives their number.

    A node is never likelier than its parent. So the likeliest n nodes always form whole trees. If nodes are sampled,
    their order of choice is kept (`order_of_choice`). The step has `num_rows` rows already. One token of each session
    is certain. At most `room` rows may be added. `saved_s` and `even_chains` are those of `plan`.
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
    """Return (firsts, nodes): the nodes that may be verified, in the order of choice.

    `reach_prob` and `depends_on` of the nodes are set. The correction takes the last position that is left.
    """
    trees, places = sessions[0].trees, np.array([session.place for session in sessions], np.intp)
    operations = trees.operations
    firsts, nodes = operations.candidates(places, trees.limit[places] - 1, FLOOR)
    if len(nodes) and np.count_nonzero(trees.traits[places] & WITH_GRAMMAR):
        firsts, nodes = _allowed(sessions, firsts, nodes)
    if max_chain:
        firsts, nodes = operations.best_chains(firsts, nodes, max_chain)
    return _in_order_of_choice(sessions, firsts, nodes)


def _allowed(sessions: Sequence[Session], firsts: Int64Array, nodes: Int32Array) -> tuple[Int64Array, Int32Array]:
    """Remove the nodes that grammars forbid, and what hangs from them.

    A forbidden node that was sampled stays, without what hangs from it: the rule of `probabilistic` needs it to be
    rejected, and whether it is verified must not depend on its token (decision 0008).
    """
    trees, is_kept = sessions[0].trees, np.ones(len(nodes), np.bool_)
    for i, session in enumerate(sessions):
        own = nodes[firsts[i] : firsts[i + 1]]
        if session.grammar is None or not len(own):
            continue
        places = {node: place for place, node in enumerate(own.tolist())}
        parents = [places.get(parent, NONE) for parent in trees.parent[own].tolist()]
        allowed = session.grammar.allowed(trees.token[own].tolist(), parents)
        above = np.array([parent < 0 or bool(allowed[parent]) for parent in parents])
        is_kept[firsts[i] : firsts[i + 1]] = allowed | (above & (trees.group[own] != NONE))
    return np.append(0, is_kept.cumsum())[firsts], nodes[is_kept]


def _in_order_of_choice(
    sessions: Sequence[Session], firsts: Int64Array, nodes: Int32Array
) -> tuple[Int64Array, Int32Array]:
    """Put the nodes of sessions that may have sampled nodes into the order of choice."""
    if not _take_distributions(sessions):
        return firsts, nodes
    of_each = zip(sessions, np.split(nodes, firsts[1:-1]), strict=True)
    ordered = [
        np.array(order_of_choice(session, own.tolist()), np.int32) if session.takes_distributions else own
        for session, own in of_each
    ]
    return np.cumsum([0, *map(len, ordered)], dtype=np.int64), np.concatenate(ordered)


def _take_distributions(sessions: Sequence[Session]) -> bool:
    """Return whether some sessions may have sampled nodes. All sessions are in the same draft trees."""
    return bool(np.count_nonzero(sessions[0].trees.takes_distributions[[session.place for session in sessions]]))


def promised(sessions: Sequence[Session]) -> Float64Array:
    """Return f64[sessions]: the expected number of accepted tokens of each tree.

    Unknown sampled nodes are not looked at (decision 0008). All sessions are in the same draft trees.
    """
    trees, places = sessions[0].trees, [session.place for session in sessions]
    live = trees.operations.candidates(places, [NO_LIMIT] * len(places), FLOOR)
    firsts, nodes = _in_order_of_choice(sessions, *live)
    of_sessions = np.arange(len(places)).repeat(np.diff(firsts))
    is_known = trees.depends_on[nodes] == NONE
    return np.bincount(of_sessions, trees.reach_prob[nodes] * is_known, len(places)).astype(np.float64, copy=False)


def _precedence(sessions: Sequence[Session], firsts: Int64Array, reach_prob: Float64Array) -> Float64Array:
    """Return f64[num_offered]: the sort key for the nodes of all sessions.

    The key is the node's likelihood. With a choice order it is at most the key of the session's earlier nodes.
    """
    precedence = reach_prob
    for i, session in enumerate(sessions) if _take_distributions(sessions) else ():
        if session.takes_distributions:
            precedence = reach_prob.copy() if precedence is reach_prob else precedence
            own = slice(firsts[i], firsts[i + 1])
            precedence[own] = np.minimum.accumulate(reach_prob[own])
    return precedence


def _num_needed(trees: DraftTrees, nodes: Int32Array, order: IntpArray) -> IntpArray:
    """Return i64[num_offered], likeliest first: how many nodes are needed before each is known.

    The number is 0 for a node that depends on no other. For others it is the place of the node that they depend on,
    plus 1. That node comes first in the order. So a node is known at the latest when it is next.
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
    """Return how many of the likeliest nodes to add, at most `room`; 0 is valid.

    It stops at the first count where no further known nodes would raise the goodput.

    reach_prob  f64[num_offered], falling.
    needed      i64[num_offered]: see `_num_needed`.
    saved_s     as of `plan`.
    """
    # With 0, 1, ... nodes added.
    tokens = num_sessions + np.concatenate(([0.0], np.cumsum(reach_prob)))  # [num_offered + 1]
    times = curve.times(num_rows, min(len(reach_prob), room) + 1)  # [most + 1]
    times[0] -= saved_s
    if not needed.any():
        return best_by_goodput(tokens[: len(times)], times)[0]
    goodput = tokens[: len(times)] / times  # [most + 1]
    for count in np.flatnonzero(goodput[1:] <= goodput[:-1]).tolist():  # where the next node does not pay by itself
        known = reach_prob[count:][needed[count:] <= count][: len(times) - count - 1]
        ahead = (tokens[count] + np.cumsum(known)) / times[count + 1 : count + 1 + len(known)]
        if ahead.max(initial=0.0) <= goodput[count]:
            return int(count)
    return len(goodput) - 1


def in_even_chains(
    firsts: Int64Array,
    reach_prob: Float64Array,
    room: int,
    curve: StepCurve,
    even_chains: Mapping[int, int],
    saved_s: float = 0.0,
) -> BoolArray:
    """Return bool[num_offered]: the nodes to verify of sessions that have one row each.

    All sessions get one length. A session with fewer nodes is padded. Of a session with more nodes the likeliest are
    verified. Each length is compared with the others, and with none, by its goodput, padding included. This serves an
    engine that computes such steps whole and others in pieces (`specq.engines.even_chains`).

    firsts, reach_prob  as in `choose_nodes`; each session's nodes are one chain.
    room         rows that may be added.
    even_chains  as of `specq.engines.even_chains`.
    saved_s      as of `plan`.
    """
    num_sessions = len(firsts) - 1
    depths = places_in_runs(np.diff(firsts))
    lengths = [0, *(n for n, most in even_chains.items() if num_sessions <= most and num_sessions * n <= room)]
    are_in = [depths < length for length in lengths]
    tokens = [num_sessions + float(reach_prob[is_in].sum()) for is_in in are_in]
    rows = [(num_sessions * (1 + n), int(np.count_nonzero(is_in))) for n, is_in in zip(lengths, are_in, strict=True)]
    seconds = [curve(*one) - saved_s * (not length) for one, length in zip(rows, lengths, strict=True)]
    return are_in[best_by_goodput(tokens, seconds)[0]]
