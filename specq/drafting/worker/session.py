"""One session at a drafter: the committed context, and the drafted tree beyond it.

Rules: the tree grows best first, down to the acceptance probability set by the verifier. If the verifier asks for more
than 1, the tree does not grow. A verdict moves its root and cuts the rest. This module has no I/O, no clock and no
model.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, takewhile

import numpy as np

from specq.drafting import NO_CHILDREN, Children, Expansion, draws_children
from specq.drafting.worker.draft_nodes import (
    LEAST_CHANCE,
    NOT_SENT,
    ROOT,
    AcceptanceStats,
    DraftTree,
    NewChain,
    distribution_fields,
)
from specq.drafting.worker.shapes import DEFAULT_DEPTH, Path, budget_of, shape_of
from specq.protocol import Assign, Draft, Int32Array, SamplingParams, Speculation, UInt8Array

MIN_REACH_PROB = 0.02  # nodes less likely than this to lie on the target's path are neither expanded nor sent
LOST_AFTER = 4  # verdicts in a row that used no sent node, though one was likely enough
MAX_LIVE_NODES = 256
MAX_CHAIN = 1 << 30  # nodes of a chain, where nothing bounds them
SIBLING_VALUE = 0.2  # with a higher minimum acceptance probability, chains are drafted without siblings


class DraftSession:
    """One session's context and tree at the drafter.

    broker               the name of the broker that assigned it.
    acceptance_stats     shared by sessions of its kind.
    fan_out, max_ahead   bounds of a tree, where the job sets none.
    chain                levels drafted at a time.
    """

    def __init__(
        self, message: Assign, acceptance_stats: AcceptanceStats, *, fan_out: int, max_ahead: int, chain: int = 1
    ) -> None:
        self.session_id, self.epoch, self.lane, self.broker = message.session_id, message.epoch, message.lane, ""
        self.acceptance_stats = acceptance_stats
        self.params = drafting_params(message.params, message.speculation)
        self.draws_children = draws_children(self.params)
        self.shape = shape_of(message.speculation, fan_out=fan_out, max_ahead=max_ahead)
        self.is_sync, self.is_jit = (message.speculation.mode == mode for mode in ("sync", "jit"))
        self.owes_chain = self.is_jit  # the verifier waits for a chain below the context
        self.backup_depth = message.speculation.max_depth or DEFAULT_DEPTH  # depth of that chain
        self.chain = chain
        self.sends_one_chain = self.is_sync and chain > 1 and not message.speculation.has_fixed_shape
        self.budget = message.speculation.max_nodes if self.sends_one_chain else budget_of(message.speculation)
        self.most_live = self.budget if self.draws_children and self.budget and not self.is_sync else MAX_LIVE_NODES
        self.token_ids: list[int] = message.token_ids.tolist()
        self.limit = message.prompt_len + message.params.max_tokens
        self.tree = DraftTree()
        self.fresh: list[int] = []  # the nodes of the newest message, parents first
        self.next_id = 0
        self.next_wire_id = 0
        self.min_accept_prob = 0.0  # from the last verdict
        self.floor = math.log(MIN_REACH_PROB)  # minimum log-probability of a node that is expanded or sent
        self.waits = message.speculation.waits  # whether the session waits for this drafter
        self.backoff = 0 if self.waits else acceptance_stats.backoff  # verdicts to wait for before the next pass
        self.unused = 0  # verdicts in a row that used no sent node
        self.is_silenced = acceptance_stats.is_silenced and not self.waits
        self.awaits_verdict = False  # the verdict of a round that was sent as a whole
        self.was_hit = False  # whether the context's last token was drafted before it was committed

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def ahead(self) -> int:
        """How many tokens beyond the context may be drafted."""
        return min(self.shape.max_depth, self.limit - self.length - 1)

    def frontier(self) -> Iterator[tuple[float, int]]:
        """Yield (log-probability, node) for each node that may be expanded."""
        tree, ahead = self.tree, self.ahead
        if self.backoff or self.awaits_verdict or self.is_silenced or ahead < 1 or len(tree) >= self.most_live:
            return
        if ROOT not in tree.children:
            yield 0.0, ROOT
            return
        if self.sends_one_chain:
            return
        if self.owes_chain:
            yield from self._end_of_chain()
            return
        floor, reach = self._floor(), tree.log_reach_probs
        for node in tree.by_level():
            if node not in tree.children and reach[node] >= floor and tree.depth(node) < ahead:
                if self.num_children(node):
                    yield reach[node] - reach[ROOT], node
                else:
                    tree.children[node] = range(0)

    def _end_of_chain(self) -> Iterator[tuple[float, int]]:
        """Yield the last node of the likeliest chain below the context, if the owed chain must still grow."""
        tree, node = self.tree, ROOT
        while node in tree.children:
            if not tree.children[node]:
                return
            node = tree.children[node][0]
        if tree.depth(node) >= min(self.backup_depth, self.ahead):
            return
        if self.num_children(node):
            yield tree.log_reach_probs[node] - tree.log_reach_probs[ROOT], node

    def num_children(self, node: int) -> int:
        """Return how many children the shape gives to a node."""
        return self.shape.fan_out or self.shape.num_children(self.tree.path(node), hit=self.was_hit)

    def chain_below(self, node: int) -> list[int]:
        """Return how many children each level of a chain gets, below a node of `frontier`."""
        room = min(self.chain, self.ahead - self.tree.depth(node))
        if self.shape.fan_out:
            has_siblings = self.chain == 1 or self.min_accept_prob <= SIBLING_VALUE
            return [self.shape.fan_out if has_siblings else 1] * room
        path: Path = self.tree.path(node)
        counts = (self.shape.num_children(path + (0,) * level, hit=self.was_hit) for level in range(room))
        return list(takewhile(bool, counts))

    @property
    def is_answer(self) -> bool:
        """Whether the session waits for the next draft."""
        return self.is_sync or self.owes_chain

    def _floor(self) -> float:
        """Return the minimum log_reach_prob of a node that is expanded or sent: likely enough, and within the budget.

        Children of a node outside the budget are outside it, so the budget stops growth. Nodes drawn run-ahead are
        never outside the budget, because growth stops before.
        """
        reach = self.tree.log_reach_probs
        least = reach[ROOT] + (math.log(MIN_REACH_PROB) if self.is_answer else self.floor)
        if not self.budget or len(self.tree) <= self.budget:
            return least
        return max(least, heapq.nlargest(self.budget, reach[1:])[-1])

    def grow(self, chain: NewChain) -> None:
        """Attach a drafter's chain to the tree, as far as there is room."""
        room = self.most_live - len(self.tree) if self.draws_children else MAX_CHAIN
        if room > 0:
            self.tree.add(chain, room)

    def draft(self) -> bool:
        """Choose the nodes to send, those likely enough and not yet sent; return whether to send a message.

        An answer that the session waits for is sent whole, even if empty. Such answers are a synchronous round and a
        chain in `jit` mode.
        """
        is_answer = self.is_answer
        if is_answer and next(self.frontier(), None) is not None:
            return False
        floor = self._floor()
        tree, fresh = self.tree, self._fresh(floor)
        self.fresh = fresh
        self.awaits_verdict, self.owes_chain = self.is_sync, False
        is_miss = not is_answer and all(tree.log_reach_probs[node] < floor for node in fresh)
        if not is_miss:
            self.acceptance_stats.count_pass(is_miss=False)
        elif not self._has_sent_root():
            self.backoff = self.acceptance_stats.count_pass(is_miss=True)
        for wire_id, node in enumerate(fresh, self.next_wire_id):
            tree.wire_ids[node] = wire_id
        self.next_wire_id += len(fresh)
        return bool(fresh) or is_answer

    def _has_sent_root(self) -> bool:
        """Return whether a child of the context was sent."""
        return any(self.tree.wire_ids[node] != NOT_SENT for node in self.tree.below(ROOT))

    def _fresh(self, floor: float) -> list[int]:
        """Return the likely nodes that were not sent yet, within the budget.

        They come in the order in which they grew, in a synchronous round likeliest first. The first of drawn siblings
        is sent at once even if not likely enough. The verifier must know which nodes were expanded before others
        (decision 0008).
        """
        tree, is_shown = self.tree, self.draws_children and not self.is_sync
        reach, wire_ids = tree.log_reach_probs, tree.wire_ids
        fresh = [
            node
            for node in range(1, len(reach))
            if wire_ids[node] == NOT_SENT and (reach[node] >= floor or (is_shown and not tree.rank(node)))
        ]
        if self.is_sync or self.budget:
            fresh.sort(key=reach.__getitem__, reverse=True)
        if self.budget:
            num_sent = len(wire_ids) - wire_ids.count(NOT_SENT)
            del fresh[max(0, self.budget - num_sent) :]
        if not self.is_sync:
            fresh.sort()
        return fresh

    def learn(self, node_ids: Int32Array, mask: UInt8Array, lanes: UInt8Array) -> None:
        """Learn from drawn nodes that were judged, as in `Verdict`; `commit` learns from point masses."""
        tree, observe = self.tree, self.acceptance_stats.calibration.observe
        lanes_of_nodes = lanes.tolist() or [self.lane] * len(node_ids)
        sent = {wire_id: node for node, wire_id in enumerate(tree.wire_ids) if wire_id != NOT_SENT}
        reached = {ROOT}  # nodes whose children are judged: the parent is accepted, and no sibling was until now
        for lane, wire_id, bit in zip(lanes_of_nodes, node_ids.tolist(), mask.tolist(), strict=False):
            node = sent.get(wire_id, ROOT) if lane == self.lane else ROOT
            if node == ROOT or tree.parents[node] not in reached:
                continue
            observe(tree.predicted[node], bool(bit))
            if bit:
                reached.discard(tree.parents[node])
                reached.add(node)

    def commit(self, tokens: Sequence[int]) -> list[int]:
        """Append committed tokens and move the root; return the ids of drafted nodes they followed."""
        tree, at, path = self.tree, ROOT, list[int]()
        observe = self.acceptance_stats.calibration.observe
        for token in tokens:
            before, siblings = at, tree.below(at)
            for node in siblings:
                if not self.draws_children:
                    observe(tree.predicted[node], tree.token_ids[node] == token)
                if tree.token_ids[node] == token:
                    at = node
            if at == before:
                break
            path.append(tree.node_ids[at])
        self.token_ids.extend(tokens)
        self.awaits_verdict, self.was_hit = False, len(path) == len(tokens)
        if self.was_hit and not self.is_sync:
            tree.move_root(at)
        else:  # a synchronous round is drafted from scratch
            self.tree = DraftTree()
        self.owes_chain = self.is_jit and not self._has_sent_root()
        return path

    def adjust(self, min_accept_prob: int, *, was_used: bool) -> None:
        """Apply a verdict's minimum acceptance probability, and detect lost drafts. `was_used`: it verified nodes.

        A node is also drafted for the round after the next. Its ancestors must be accepted before. So its probability
        may be as low as the square of the minimum.
        """
        self.backoff = max(0, self.backoff - 1)
        self.min_accept_prob = min_accept_prob / 1000
        self.acceptance_stats.is_silenced = self.min_accept_prob > 1
        self.is_silenced = self.acceptance_stats.is_silenced and not self.waits
        minimum = math.log(max(self.min_accept_prob, math.sqrt(MIN_REACH_PROB)))
        self.floor = 2 * minimum
        self._notice_loss(minimum, was_used=was_used)

    def _notice_loss(self, minimum: float, *, was_used: bool) -> None:
        """Send all nodes again after several verdicts used none, though a sent node is likely enough to be used."""
        tree = self.tree
        reach, wire_ids = tree.log_reach_probs, tree.wire_ids
        expects_use = any(
            wire_ids[node] != NOT_SENT and reach[node] - reach[ROOT] >= minimum for node in tree.below(ROOT)
        )
        self.unused = self.unused + 1 if expects_use and not was_used else 0
        if self.unused >= LOST_AFTER:
            self.unused = 0
            tree.wire_ids = [NOT_SENT] * len(wire_ids)


def chains_of(
    expanded: Sequence[tuple[DraftSession, int]],
    answers: Sequence[Sequence[Children]],
    requests: Sequence[Expansion],
    width: int,
) -> list[NewChain]:
    """Return what a drafter answered for nodes of sessions, as chains. A request has `width` ids for each level."""
    found, kinds = dict[int, NewChain](), defaultdict[AcceptanceStats, list[int]](list)
    for place, (session, _) in enumerate(expanded):
        kinds[session.acceptance_stats].append(place)
    for stats, places in kinds.items():
        levels = [NO_CHILDREN, *(level for place in places for level in answers[place])]  # at least one, to be joined
        predicted = np.concatenate([level.scores for level in levels])
        chances = stats.calibration.probabilities(predicted)
        columns = [
            np.concatenate([level.token_ids for level in levels]).tolist(),
            predicted.tolist(),
            chances.tolist(),
            np.log(np.maximum(chances, LEAST_CHANCE)).tolist(),
        ]
        end = 0
        for place in places:
            start, end = end, end + sum([len(level.token_ids) for level in answers[place]])
            own = [column[start:end] for column in columns]
            found[place] = NewChain(expanded[place][1], answers[place], requests[place].child_ids, width, *own)
    return [found[place] for place in range(len(expanded))]


def drafts_of(sessions: Sequence[DraftSession]) -> list[Draft]:
    """Return the messages with the `fresh` nodes of sessions. The arrays of a message are parts of larger arrays."""
    tokens, parents, chances = list[int](), list[int](), list[float]()
    for session in sessions:
        tree, fresh = session.tree, session.fresh
        tokens += map(tree.token_ids.__getitem__, fresh)
        parents += map(tree.wire_ids.__getitem__, map(tree.parents.__getitem__, fresh))
        chances += map(tree.scores.__getitem__, fresh)
    token_ids, parent_ids = np.array(tokens, np.int32), np.array(parents, np.int32)
    scores = np.minimum(chances, 0.0).astype(np.float16)
    ends = list(accumulate((len(session.fresh) for session in sessions), initial=0))
    return [
        Draft(
            session_id=session.session_id,
            epoch=session.epoch,
            lane=session.lane,
            base_len=session.length,
            first_id=session.next_wire_id - len(session.fresh),
            token_ids=token_ids[span],
            parent_ids=parent_ids[span],
            scores=scores[span],
            **distribution_fields(session.tree, session.fresh),
        )
        for session, span in zip(sessions, map(slice, ends, ends[1:]), strict=True)
    ]


def drafting_params(params: SamplingParams, speculation: Speculation) -> SamplingParams:
    """Return the parameters for drafts: the job's, with temperature and top-p of its candidates."""
    temperature = params.temperature if speculation.candidate_temp < 0 else speculation.candidate_temp
    return replace(params, temperature=temperature, top_p=speculation.candidate_top_p or params.top_p)
