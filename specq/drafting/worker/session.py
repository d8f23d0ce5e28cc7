"""One session at a drafter: the committed context, and the drafted tree beyond it.

Rules: the tree grows best first, down to the acceptance probability set by the verifier. If the verifier asks for more
than 1, the tree does not grow. A verdict moves its root and cuts the rest. This module has no I/O, no clock and no
model.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, takewhile
from operator import attrgetter

import numpy as np

from specq.drafting import Children, draws_children
from specq.drafting.worker.draft_nodes import AcceptanceStats, DraftNode, distribution_fields, judged
from specq.drafting.worker.shapes import DEFAULT_DEPTH, Path, budget_of, shape_of
from specq.protocol import Assign, Draft, SamplingParams, Speculation, Verdict

MIN_REACH_PROB = 0.02  # nodes less likely than this to lie on the target's path are neither expanded nor sent
LOST_AFTER = 4  # verdicts in a row that used no sent node, though one was likely enough
MAX_LIVE_NODES = 256
LEAST_CHANCE = 1e-6  # lower bound of a node's acceptance probability
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
        self.roots: dict[int, DraftNode] = {}
        self.fresh: list[DraftNode] = []  # the nodes of the newest message, parents first
        self.root_expanded = False
        self.base_log_reach_prob = 0.0  # log_reach_prob of the committed context; the nodes' values include it
        self.next_id = 0
        self.next_wire_id = 0
        self.num_live = 0
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

    def live_nodes(self) -> list[DraftNode]:
        """Return the live nodes, level by level."""
        found = list(self.roots.values())
        for node in found:  # it grows meanwhile
            found += node.children.values()
        return found

    def frontier(self) -> Iterator[tuple[float, DraftNode | None]]:
        """Yield (log-probability, node) for each node that may be expanded; None: the context itself."""
        ahead = self.ahead
        if self.backoff or self.awaits_verdict or self.is_silenced or ahead < 1 or self.num_live >= self.most_live:
            return
        if not self.root_expanded:
            yield 0.0, None
            return
        if self.sends_one_chain:
            return
        if self.owes_chain:
            yield from self._end_of_chain()
            return
        floor = self._floor()
        for node in self.live_nodes():
            if not node.expanded and node.log_reach_prob >= floor and node.position + 1 - self.length < ahead:
                if self.num_children(node):
                    yield node.log_reach_prob - self.base_log_reach_prob, node
                else:
                    node.expanded = True

    def _end_of_chain(self) -> Iterator[tuple[float, DraftNode]]:
        """Yield the last node of the likeliest chain below the context, if the owed chain must still grow."""
        node = next(iter(self.roots.values()), None)
        while node is not None and node.expanded:
            node = next(iter(node.children.values()), None)
        if node is None or node.position + 1 - self.length >= min(self.backup_depth, self.ahead):
            return
        if self.num_children(node):
            yield node.log_reach_prob - self.base_log_reach_prob, node

    def num_children(self, node: DraftNode | None) -> int:
        """Return how many children the shape gives to a node, or to the context."""
        if self.shape.fan_out:
            return self.shape.fan_out
        return self.shape.num_children(node.path() if node is not None else (), hit=self.was_hit)

    def chain_below(self, node: DraftNode | None) -> list[int]:
        """Return how many children each level of a chain gets, below a node of `frontier`."""
        depth = 0 if node is None else node.position + 1 - self.length
        room = min(self.chain, self.ahead - depth)
        if self.shape.fan_out:
            has_siblings = self.chain == 1 or self.min_accept_prob <= SIBLING_VALUE
            return [self.shape.fan_out if has_siblings else 1] * room
        path: Path = node.path() if node is not None else ()
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
        least = self.base_log_reach_prob + (math.log(MIN_REACH_PROB) if self.is_answer else self.floor)
        if not self.budget or self.num_live <= self.budget:
            return least
        return max(least, heapq.nlargest(self.budget, (node.log_reach_prob for node in self.live_nodes()))[-1])

    def grow(self, parent: DraftNode | None, levels: Iterable[Children], ids: Iterable[Sequence[int]]) -> None:
        """Attach a drafter's chain below a node, or below the context, as far as there is room.

        Each level, with the ids of its nodes, hangs below the first node of the level before. A drawn child is judged
        if its earlier siblings are rejected. It never gets a higher rating than they do. So a cut by probability
        removes the last sibling. A node is never cut because of its own token.
        """
        probability, log = self.acceptance_stats.calibration.probability, math.log
        for children, ids_of_level in zip(levels, ids, strict=False):
            room = self.most_live - self.num_live if self.draws_children else len(ids_of_level)
            own_ids = ids_of_level[: max(0, room)]
            if parent is None:
                siblings, base, position = self.roots, self.base_log_reach_prob, self.length
            else:
                siblings, base, position = parent.children, parent.log_reach_prob, parent.position + 1
            left = most = 1.0
            tokens, scores, distribution = children.token_ids.tolist(), children.scores.tolist(), children.distribution
            for rank, (node_id, token, predicted) in enumerate(zip(own_ids, tokens, scores, strict=False)):
                chance = probability(predicted)
                score = log_chance = log(max(chance, LEAST_CHANCE))
                if distribution is not None:
                    most = chance = min(most, left * chance)
                    left -= chance
                    log_chance = log(max(chance, LEAST_CHANCE))
                siblings[token] = DraftNode(
                    node_id, token, parent, position, rank, predicted, score, base + log_chance, distribution
                )
            self.num_live += min(len(own_ids), len(tokens))
            if not own_ids:
                return
            if parent is None:
                self.root_expanded = True
            else:
                parent.expanded = True
            if not tokens:
                return
            parent = siblings[tokens[0]]

    def draft(self) -> bool:
        """Choose the nodes to send, those likely enough and not yet sent; return whether to send a message.

        An answer that the session waits for is sent whole, even if empty. Such answers are a synchronous round and a
        chain in `jit` mode.
        """
        is_answer = self.is_answer
        if is_answer and next(self.frontier(), None) is not None:
            return False
        floor = self._floor()
        fresh = self.fresh = self._fresh(floor)
        self.awaits_verdict, self.owes_chain = self.is_sync, False
        is_miss = not is_answer and all(node.log_reach_prob < floor for node in fresh)
        if not is_miss:
            self.acceptance_stats.count_pass(is_miss=False)
        elif not any(node.wire_id >= 0 for node in self.roots.values()):
            self.backoff = self.acceptance_stats.count_pass(is_miss=True)
        for node in fresh:
            node.wire_id = self.next_wire_id
            self.next_wire_id += 1
        return bool(fresh) or is_answer

    def _fresh(self, floor: float) -> list[DraftNode]:
        """Return the likely nodes that were not sent yet, within the budget.

        They come in the order in which they grew, in a synchronous round likeliest first. The first of drawn siblings
        is sent at once even if not likely enough. The verifier must know which nodes were expanded before others
        (decision 0008).
        """
        nodes = self.live_nodes()
        is_shown = self.draws_children and not self.is_sync
        fresh = [
            node
            for node in nodes
            if node.wire_id < 0 and (node.log_reach_prob >= floor or (is_shown and not node.rank))
        ]
        if self.is_sync or self.budget:
            fresh.sort(key=lambda node: (-node.log_reach_prob, node.node_id))
        if self.budget:
            del fresh[max(0, self.budget - sum(node.wire_id >= 0 for node in nodes)) :]
        if not self.is_sync:
            fresh.sort(key=attrgetter("node_id"))
        return fresh

    def learn(self, verdict: Verdict) -> None:
        """Learn from drawn nodes that were judged; `commit` learns from point masses."""
        if not self.draws_children or verdict.base_len != self.length:
            return
        lanes = verdict.node_lanes.tolist() or [self.lane] * len(verdict.node_ids)
        sent = {node.wire_id: node for node in self.live_nodes()}
        rows = zip(lanes, verdict.node_ids.tolist(), verdict.mask.tolist(), strict=False)
        mine = [(sent[i], bool(bit)) for lane, i, bit in rows if lane == self.lane and i in sent]
        accepted = {i for i, (_, bit) in enumerate(mine) if bit}
        for i in judged([node for node, _ in mine], accepted):
            self.acceptance_stats.calibration.observe(mine[i][0].predicted, i in accepted)

    def commit(self, tokens: Sequence[int]) -> list[int]:
        """Append committed tokens and move the root; return the ids of drafted nodes they followed."""
        path: list[int] = []
        siblings, last = self.roots, None
        for token in tokens:
            if not self.draws_children:
                for node in siblings.values():
                    self.acceptance_stats.calibration.observe(node.predicted, node.token == token)
            last = siblings.get(token)
            if last is None:
                siblings = {}
            else:
                siblings = last.children
                path.append(last.node_id)
        self.token_ids.extend(tokens)
        self.awaits_verdict, self.was_hit = False, last is not None
        if self.is_sync:  # each round is drafted from scratch
            siblings, last = {}, None
        self.roots, self.root_expanded = siblings, last is not None and last.expanded
        self.base_log_reach_prob = last.log_reach_prob if last is not None else 0.0
        for node in self.roots.values():
            node.parent = None
        self.num_live = len(self.live_nodes())
        self.owes_chain = self.is_jit and not any(node.wire_id >= 0 for node in self.roots.values())
        return path

    def adjust(self, verdict: Verdict) -> None:
        """Apply the verdict's minimum acceptance probability, and detect lost drafts.

        A node is also drafted for the round after the next. Its ancestors must be accepted before. So its probability
        may be as low as the square of the minimum.
        """
        self.backoff = max(0, self.backoff - 1)
        self.min_accept_prob = verdict.min_accept_prob / 1000
        self.acceptance_stats.is_silenced = self.min_accept_prob > 1
        self.is_silenced = self.acceptance_stats.is_silenced and not self.waits
        minimum = math.log(max(self.min_accept_prob, math.sqrt(MIN_REACH_PROB)))
        self.floor = 2 * minimum
        self._notice_loss(minimum, was_used=len(verdict.node_ids) > 0)

    def _notice_loss(self, minimum: float, *, was_used: bool) -> None:
        """Send all nodes again after several verdicts used none, though a sent node is likely enough to be used."""
        expects_use = any(
            node.wire_id >= 0 and node.log_reach_prob - self.base_log_reach_prob >= minimum
            for node in self.roots.values()
        )
        self.unused = self.unused + 1 if expects_use and not was_used else 0
        if self.unused >= LOST_AFTER:
            self.unused = 0
            for node in self.live_nodes():
                node.wire_id = -1


def drafts_of(sessions: Sequence[DraftSession]) -> list[Draft]:
    """Return the messages with the `fresh` nodes of sessions. The arrays of a message are parts of larger arrays."""
    nodes = [node for session in sessions for node in session.fresh]
    token_ids = np.array([node.token for node in nodes], np.int32)
    parent_ids = np.array([-1 if node.parent is None else node.parent.wire_id for node in nodes], np.int32)
    scores = np.minimum([node.score for node in nodes], 0.0).astype(np.float16)
    ends = accumulate(len(session.fresh) for session in sessions)
    own = [(session, slice(end - len(session.fresh), end)) for session, end in zip(sessions, ends, strict=True)]
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
            **distribution_fields(session.fresh),
        )
        for session, span in own
    ]


def drafting_params(params: SamplingParams, speculation: Speculation) -> SamplingParams:
    """Return the parameters for drafts: the job's, with temperature and top-p of its candidates."""
    temperature = params.temperature if speculation.candidate_temp < 0 else speculation.candidate_temp
    return replace(params, temperature=temperature, top_p=speculation.candidate_top_p or params.top_p)
