"""Which draft nodes the next forward pass verifies.

One rule: draft nodes are added, likeliest first, as long as that raises the step's goodput, which is (expected tokens)
/ (expected seconds). There is no fixed number of drafts and no second controller.

The rule looks ahead, since a step's time is not a smooth function of its rows: a node that does not pay by itself is
added where it pays together with nodes after it. But whether a sampled node is added must not depend on its own token,
and so neither on what hangs from it nor on what was drawn after it (decision 0008). So with n nodes added, the rule
looks only at nodes that are known by then: those that depend on no token of a node not yet added. Point masses are all
known from the start, and for them the rule finds the number with the highest goodput. Where the engine is quicker if
all chains are equally long, a step of sessions that decode, and of point masses, has one length for all instead
(`in_even_chains`).

The parts that sessions have in a step: as arrays for all of them, and one by one for whoever looks at one
session.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np

from specq.protocol import MODES, NO_TOKENS, BoolArray, Float64Array, Int32Array, Int64Array, IntpArray, SessionStep
from specq.verification import StepBatch, ends_of, places_in_runs
from specq.verifier.models.goodput import best_by_goodput
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions.session import Session
from specq.verifier.step.choice_order import order_of_choice
from specq.verifier.trees import NO_LIMIT, NONE, DraftTrees


@dataclass(frozen=True, slots=True)
class ScheduledSession:
    """One session's part in a step; nodes i32[n]: those of its tree that are verified, as in `step.tree`."""

    session: Session
    step: SessionStep
    nodes: Int32Array

    @property
    def session_id(self) -> int:
        return self.session.session_id

    @property
    def is_decoding(self) -> bool:
        """Whether all of the session's text but the last token has its KV already."""
        return self.step.judged and len(self.step.token_ids) == 1


class Shares(Sequence[ScheduledSession]):
    """The parts of n sessions.

    places      i64[n]: of the sessions among the trees; batch: their steps
    nodes       i32[all]: those that are verified, of one session after the other, so many of each as its step has
    """

    def __init__(self, sessions: list[Session], places: IntpArray, batch: StepBatch, nodes: Int32Array) -> None:
        self.sessions, self.places, self.batch, self.nodes = sessions, places, batch, nodes

    def prompts(self) -> tuple[int, int]:
        """Return how many rows are of prompts, and how many sessions come to the end of theirs, and so to their first
        token."""
        if self.batch.are_judged and np.count_nonzero(self.batch.num_tokens == 1) == len(self):
            return 0, 0
        is_prompt = self._are_prompts()
        return int(self.batch.num_tokens[is_prompt].sum()), int(np.count_nonzero(self.batch.is_judged & is_prompt))

    @property
    def num_decoding(self) -> int:
        """How many of the sessions have no rows of prompts."""
        return len(self) - int(np.count_nonzero(self._are_prompts()))

    def prompt_chunks(self) -> tuple[Int32Array, IntpArray]:
        """Return where the step's parts of prompts start, i32[n], and how many rows they have, i64[n]."""
        is_prompt = self._are_prompts()
        return self.batch.starts[is_prompt], self.batch.num_tokens[is_prompt]

    def _are_prompts(self) -> BoolArray:
        are_prompts: BoolArray = ~self.batch.is_judged | (self.batch.num_tokens > 1)
        return are_prompts

    def num_attended(self) -> int:
        """Return to how many tokens the rows of prompts attend in all."""
        starts, sizes = self.prompt_chunks()
        return int((starts * sizes + sizes * (sizes + 1) // 2).sum())

    @property
    def modes(self) -> set[str]:
        """The modes of the sessions."""
        return (
            {MODES[mode] for mode in set(self.sessions[0].trees.mode[self.places].tolist())} if self.sessions else set()
        )

    def judged(self) -> Shares:
        """Return the parts that are judged."""
        return self if self.batch.are_judged else self.take(self.batch.is_judged.nonzero()[0])

    def known(self) -> Shares:
        """Return the parts with drafted tokens that have been read by now."""
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

    firsts   i64[sessions + 1]: where each session's nodes begin
    nodes    i32[n], parents before children
    tokens   the expected number of those that are accepted
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
    """Choose what to verify: the likeliest nodes of all sessions, as many as `best_count` says.

    A node is never likelier than its parent, so the likeliest n nodes always form whole trees; where nodes are sampled,
    their order of choice is kept (`order_of_choice`). `num_rows` rows are in the step already; one token is certain
    from each session; at most `room` rows may be added. `saved_s`, `even_chains`: as of `plan`.
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
    """Return (firsts, nodes): what may be verified of some sessions, of each in the order of choice, with `reach_prob`
    and `depends_on` set. The correction takes the last position that is left."""
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
    """Return f64[sessions]: how many tokens each tree promises, without a look at drawn ones that are not known
    (decision 0008). All are in the same draft trees."""
    trees, places = sessions[0].trees, [session.place for session in sessions]
    live = trees.operations.candidates(places, [NO_LIMIT] * len(places), FLOOR)
    firsts, nodes = _in_order_of_choice(sessions, *live)
    of_sessions = np.arange(len(places)).repeat(np.diff(firsts))
    is_known = trees.depends_on[nodes] == NONE
    return np.bincount(of_sessions, trees.reach_prob[nodes] * is_known, len(places)).astype(np.float64, copy=False)


def _precedence(sessions: Sequence[Session], firsts: Int64Array, reach_prob: Float64Array) -> Float64Array:
    """Return f64[num_offered]: what sorts the nodes of all sessions. It is how likely they are, and in a session with
    an order of choice no more than that of the nodes before."""
    precedence = reach_prob
    for i, session in enumerate(sessions) if _take_distributions(sessions) else ():
        if session.takes_distributions:
            precedence = reach_prob.copy() if precedence is reach_prob else precedence
            own = slice(firsts[i], firsts[i + 1])
            precedence[own] = np.minimum.accumulate(reach_prob[own])
    return precedence


def _num_needed(trees: DraftTrees, nodes: Int32Array, order: IntpArray) -> IntpArray:
    """Return i64[num_offered], likeliest first: how many nodes must be in the step before each is known.

    It is 0 for a node that depends on no other. For others it is the place of the node that they depend on, plus 1.
    That node comes first in the order, so a node is known at the latest when it is next.
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

    It stops at the first count at which no number of further nodes, of those that are known by then, would raise the
    goodput.

    reach_prob f64[num_offered], falling; needed i64[num_offered]: see `_num_needed`; saved_s as of `plan`
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
    """Return bool[num_offered]: which nodes of sessions that have one row each are verified.

    One length for all: a session with fewer nodes has rows that bring nothing, and of one with more the likeliest are
    verified. Each length is held against the others, and against none, by its goodput, the rows that bring nothing
    counted in. For an engine that computes such steps at once and others in pieces (`specq.engines.even_chains`).

    firsts, reach_prob   as in `choose_nodes`, each session's nodes being one chain; room: rows that may be added
    even_chains          as of `specq.engines.even_chains`; saved_s as of `plan`
    """
    num_sessions = len(firsts) - 1
    depths = places_in_runs(np.diff(firsts))
    lengths = [0, *(n for n, most in even_chains.items() if num_sessions <= most and num_sessions * n <= room)]
    are_in = [depths < length for length in lengths]
    tokens = [num_sessions + float(reach_prob[is_in].sum()) for is_in in are_in]
    rows = [(num_sessions * (1 + n), int(np.count_nonzero(is_in))) for n, is_in in zip(lengths, are_in, strict=True)]
    seconds = [curve(*one) - saved_s * (not length) for one, length in zip(rows, lengths, strict=True)]
    return are_in[best_by_goodput(tokens, seconds)[0]]
