"""`draft-model` with a parallel draft model (PARD, An et al. 2025, arXiv 2504.18583): one pass foresees several places of a text.

The pass for a node reads what leads to it and then masks; the node's own row says what follows it, the first mask what follows that, and so
on. Masks see one another, but no drafted token: so what is likely at a place does not depend on which tokens stand before it, and all
nodes that the pass foresees get the same children at their depth. Which of them are worth having, the drafter chooses, best first
(`specq.drafting`): it asks for the children of a node, and a pass is run only for those that no earlier pass foresaw, for all of them at once.
Those are the likely outcomes of what is being verified: the context, and the ends of what was foreseen.

Nodes get their KV with the first pass for them or for one of their descendants; that of masks is thrown away after each.

Children are ranked as a draft model's are. They are chosen by content and not drawn, so they are point masses under `probabilistic`, too;
there the scores are those of the model alone, since the noise of the job's seed must not choose what it judges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from specq.engines.torch import RowPacker
from specq.proposers.contexts import Contexts
from specq.proposers.interface import CONTEXT, NO_CHILDREN, Children, Expansion, draws_children
from specq.proposers.kv_trees import NO_SLOT, KvTrees, TreeSession
from specq.proposers.making import ChildRequest
from specq.protocol import Int32Array, SamplingParams

WIDTH = 8  # children of each place that are kept, if no more are asked for


class _Foreseen(NamedTuple):
    """What a pass said of the places after some node; the children of ours are those at this place."""

    places: Sequence[Children]
    place: int


# What a pass is run for: for each session the nodes asked about, ascending (so CONTEXT comes first), each once.
_Asked = dict[int, list[int]]


class ParallelModel(KvTrees):
    """Fulfils `specq.proposers.Proposer` with contexts of a model that has masks. Other arguments as of `KvTrees`."""

    def __init__(
        self, contexts: Contexts, *, distribution_size: int = 32, rng: np.random.Generator | None = None
    ) -> None:
        super().__init__(contexts, distribution_size, rng)
        self.num_places = contexts.num_masks + 1
        self._foreseen: dict[int, dict[int, _Foreseen]] = {}  # by session and node

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams) -> None:
        """Start a session. See `Proposer.open`."""
        super().open(session_id, token_ids, params)
        self._foreseen[session_id] = {}

    def close(self, session_id: int) -> None:
        """Forget a session; see `Proposer.close`."""
        super().close(session_id)
        self._foreseen.pop(session_id, None)

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """Append committed tokens and re-root the nodes; see `Proposer.commit`. What follows the new context is not known before it is
        asked for: a pass of its own says that better than one that foresaw it."""
        super().commit(session_id, token_ids, path)
        if len(token_ids):
            self._keep_known(session_id)

    def rewind(self, session_id: int, length: int) -> None:
        """Forget committed tokens beyond so many, and all nodes; see `RewindableProposer`."""
        super().rewind(session_id, length)
        self._keep_known(session_id)

    def _keep_known(self, session_id: int) -> None:
        nodes = self._sessions[session_id].nodes
        self._foreseen[session_id] = {i: found for i, found in self._foreseen[session_id].items() if i in nodes}

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """Answer all requests, with one pass for those of nodes that were not foreseen; no children at the model's maximum length. See
        `Proposer.expand`. Raises EngineError, with nothing changed, if KV slots run short."""
        asked = self._asked(requests)
        if asked:
            with self._contexts.alive():
                self._contexts.prefill(self._pool.places(asked))
                self._look_ahead(asked, max(WIDTH, *(len(request.child_ids) for request in requests)))
        return [self._answer(request) for request in requests]

    def _asked(self, requests: Sequence[Expansion]) -> _Asked:
        asked: dict[int, set[int]] = {}
        for request in requests:
            position = self._sessions[request.session_id].child_position(request.node_id)
            is_known = request.node_id in self._foreseen[request.session_id]
            if position < self.info.max_length and request.child_ids and not is_known:
                asked.setdefault(request.session_id, set()).add(request.node_id)
        return {session_id: sorted(node_ids) for session_id, node_ids in asked.items()}

    def _look_ahead(self, asked: _Asked, width: int) -> None:
        """Run a pass for these nodes, and keep what it says of the places after each: `width` children of each place."""
        plans = [_Plan(self._sessions[session_id], node_ids) for session_id, node_ids in asked.items()]
        counts = [self._num_places(plan.session, node_id) for plan in plans for node_id in plan.node_ids]
        num_pending = [self._num_pending(plan.session) for plan in plans]
        num_masks = sum(counts) - len(counts)
        with self._contexts.taken(sum(num_pending) + sum(len(plan.fresh) for plan in plans) + num_masks) as taken:
            own, masks = taken[: len(taken) - num_masks], iter(taken[len(taken) - num_masks :].tolist())
            shares = np.split(own, np.cumsum([p + len(plan.fresh) for p, plan in zip(num_pending, plans, strict=True)]))
            packer, sizes = RowPacker(), iter(counts)
            for session_id, plan, pending, share in zip(asked, plans, num_pending, shares, strict=False):
                self._contexts.pack(packer, session_id, share[:pending], judged=plan.node_ids[0] == CONTEXT)
                slots = dict(zip(plan.fresh, share[pending:].tolist(), strict=True))
                for node_id in plan.node_ids:
                    line = plan.pack(packer, node_id, slots)
                    self._pack_masks(packer, plan.session, node_id, line, list(islice(masks, next(sizes) - 1)))
            logits = self._contexts.run(packer.pack())
            wanted = list(self._wanted(asked, counts, width))
            rows = iter(self.maker.make(wanted, logits, self.limit_vocab))
        self._pool.give(taken[len(own) :])
        for plan, pending, share in zip(plans, num_pending, shares, strict=False):
            for node_id, slot in zip(plan.fresh, share[pending:].tolist(), strict=True):
                plan.session.nodes[node_id].slot = slot
            self._contexts.settle(plan.session.place, np.array([pending]), share[:pending])
        nodes = ((session_id, node_id) for session_id, node_ids in asked.items() for node_id in node_ids)
        for (session_id, node_id), count in zip(nodes, counts, strict=True):
            self._foreseen[session_id][node_id] = _Foreseen(list(islice(rows, count)), 0)

    def _num_places(self, session: TreeSession, node_id: int) -> int:
        """Return how many places a pass for a node foresees: none beyond the model's maximum length."""
        return min(self.num_places, self.info.max_length - session.child_position(node_id))

    def _pack_masks(
        self, packer: RowPacker, session: TreeSession, node_id: int, line: Sequence[int], slots: Sequence[int]
    ) -> None:
        """Add masks behind a node, in these slots; `line`: the slots of what leads to the node, and its own."""
        first = session.child_position(node_id)
        for i, slot in enumerate(slots):
            lineage = [*line, *slots[: i + 1]]
            packer.add_node(self.info.vocab_size + i, slot, first + i, session.length, lineage)

    def _wanted(self, asked: _Asked, counts: Sequence[int], width: int) -> Iterator[ChildRequest]:
        """Yield what is asked of each row that gives logits."""
        sizes = iter(counts)
        for session_id, node_ids in asked.items():
            session = self._sessions[session_id]
            params = _ranking(session.params)
            for node_id in node_ids:
                first = session.child_position(node_id)
                for position in range(first, first + next(sizes)):
                    yield ChildRequest(params, position, width, session_id)

    def _answer(self, request: Expansion) -> Children:
        """Cut children to those requested, and keep them as nodes."""
        foreseen = self._foreseen[request.session_id]
        found = foreseen.get(request.node_id)
        if found is None:
            return NO_CHILDREN
        children = found.places[found.place].first(len(request.child_ids))
        position = self._sessions[request.session_id].child_position(request.node_id)
        self._add_nodes(request, position, children)
        if found.place + 1 < len(found.places):
            below = found._replace(place=found.place + 1)
            foreseen.update(dict.fromkeys(request.child_ids[: len(children.token_ids)], below))
        return children


class _Plan:
    """What a pass computes for a session: the nodes asked about, and `fresh`, those among them and their ancestors that have no KV yet,
    ancestors first."""

    def __init__(self, session: TreeSession, node_ids: list[int]) -> None:
        self.session, self.node_ids = session, node_ids
        self.fresh = list(dict.fromkeys(i for node_id in node_ids for i in self._line(node_id) if self._is_fresh(i)))
        self._packed: set[int] = set()

    def pack(self, packer: RowPacker, node_id: int, slots: dict[int, int]) -> list[int]:
        """Add the rows that lead to a node asked about and were not added yet, and its own, which gives logits; `slots`: of those that have
        no KV yet. Return the slots from the root down to the node. The context's rows are there."""
        line = list[int]()
        for i in self._line(node_id):
            node = self.session.nodes[i]
            line.append(slots.get(i, node.slot))
            if i == node_id or (self._is_fresh(i) and i not in self._packed):
                packer.add_node(
                    node.token_id, line[-1], node.position, self.session.length, tuple(line), judged=i == node_id
                )
                self._packed.add(i)
        return line

    def _is_fresh(self, node_id: int) -> bool:
        return self.session.nodes[node_id].slot == NO_SLOT

    def _line(self, node_id: int) -> list[int]:
        """Return the ids of a node's ancestors and its own, root first; none for the context."""
        line = list[int]()
        while node_id != CONTEXT:
            line.append(node_id)
            node_id = self.session.nodes[node_id].parent
        return line[::-1]


def _ranking(params: SamplingParams) -> SamplingParams:
    """Return by which parameters children are ranked."""
    return replace(params, temperature=0.0) if draws_children(params) else params
