"""`draft-model` with a parallel draft model (PARD): one pass predicts several positions.

The method is that of An et al. 2025, arXiv 2504.18583. The pass for a node reads its ancestors and itself, and then
masks. The node's own row predicts the token after it, the first mask the next one, and so on. Masks see one another,
but no drafted token. So the prediction for a position does not depend on the tokens before it. All nodes at one depth
of a pass get the same children. The draft worker chooses which of them are expanded, best first
(`specq.drafting.worker`). A request needs a pass only if no earlier pass predicted its node's children. One pass covers
all such nodes at once. These are the likely outcomes of the verification in flight: the context, and the ends of the
predictions.

Nodes get their KV with the first pass for them or a descendant. The KV of masks is discarded after each pass.

Children are ranked as a draft model's are. They are chosen by content, not drawn, so they are point masses under
`probabilistic`, too. There the scores are those of the model alone, because the random numbers of the job's seed must
not choose the tokens that they judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from specq.drafting.draft_model.children import ChildRequest
from specq.drafting.draft_model.contexts import Contexts
from specq.drafting.draft_model.kv_trees import NO_SLOT, Asked, KvTrees, TreeSession
from specq.drafting.interface import CONTEXT, NO_CHILDREN, Children, Expansion, ranking_params
from specq.engines.native import RowPacker
from specq.protocol import Int32Array, SamplingParams

WIDTH = 8  # children of each position that are kept, unless more are requested


class _Foreseen(NamedTuple):
    """A pass's predictions for the positions after some node; the node's children are those at this place."""

    places: Sequence[Children]
    place: int


class _Plan(NamedTuple):
    """What a pass computes for a session.

    node_ids      the requested nodes.
    lines         for each requested node the ids of its ancestors and, last, its own.
    num_places    for each requested node how many positions are predicted.
    fresh         the nodes in `lines` without KV, each after its ancestors.
    num_pending   tokens of the context without KV.
    """

    session_id: int
    session: TreeSession
    node_ids: list[int]
    lines: list[list[int]]
    fresh: list[int]
    num_pending: int
    num_places: list[int]

    @property
    def num_own(self) -> int:
        """How many slots are kept."""
        return self.num_pending + len(self.fresh)

    @property
    def num_slots(self) -> int:
        """How many slots are needed, including those of masks."""
        return self.num_own + sum(self.num_places) - len(self.num_places)


class ParallelModel(KvTrees):
    """Drafts with contexts of a model that has masks. Other arguments as in `KvTrees`."""

    def __init__(
        self, contexts: Contexts, *, distribution_size: int = 32, rng: np.random.Generator | None = None
    ) -> None:
        super().__init__(contexts, distribution_size, rng)
        self.num_places = contexts.num_masks + 1
        self._foreseen: dict[int, dict[int, _Foreseen]] = {}  # by session and node

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """Start a session. See `Drafter.open`."""
        super().open(session_id, token_ids, params, owner)
        self._foreseen[session_id] = {}

    def close(self, session_id: int) -> None:
        """Forget a session; see `Drafter.close`."""
        super().close(session_id)
        self._foreseen.pop(session_id, None)

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """Append committed tokens and move the root of the nodes; see `Drafter.commit`.

        The children of the new context are unknown until they are requested, because a pass of their own predicts them
        better than an earlier one.
        """
        super().commit(session_id, token_ids, path)
        if len(token_ids):
            self._keep_known(session_id)

    def rewind(self, session_id: int, length: int) -> bool:
        """Forget committed tokens beyond `length`, and all nodes; see `Drafter.rewind`."""
        super().rewind(session_id, length)
        self._keep_known(session_id)
        return True

    def _keep_known(self, session_id: int) -> None:
        nodes = self._sessions[session_id].nodes
        self._foreseen[session_id] = {i: found for i, found in self._foreseen[session_id].items() if i in nodes}

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """Answer all requests, with one pass for nodes whose children were not predicted.

        Nodes at the model's maximum length get no children. See `Drafter.expand`. Raises EngineError, with the state
        unchanged, if there are too few KV slots.
        """
        asked = self._asked(one for one in requests if one.node_id not in self._foreseen[one.session_id])
        if asked:
            with self._contexts.alive():
                self._contexts.prefill(self._pool.places(asked))
                self._look_ahead(asked, max(WIDTH, *(len(request.child_ids) for request in requests)))
        return [self._answer(request) for request in requests]

    def _look_ahead(self, asked: Asked, width: int) -> None:
        """Run a pass for these nodes, and store its predictions: `width` children for each position after a node."""
        plans = [self._plan(session_id, node_ids) for session_id, node_ids in asked.items()]
        with self._contexts.taken(sum(plan.num_slots for plan in plans)) as taken:
            parts = np.split(taken, np.cumsum([plan.num_slots for plan in plans])[:-1])
            packer = RowPacker()
            for plan, slots in zip(plans, parts, strict=True):
                self._pack(packer, plan, slots)
            logits = self._contexts.run(packer.pack())
            wanted = [one for plan in plans for one in self._wanted(plan, width)]
            rows = iter(self.maker.make(wanted, logits, self.limit_vocab))
        for plan, slots in zip(plans, parts, strict=True):
            self._settle(plan, slots)
            for node_id, count in zip(plan.node_ids, plan.num_places, strict=True):
                self._foreseen[plan.session_id][node_id] = _Foreseen(list(islice(rows, count)), 0)

    def _plan(self, session_id: int, node_ids: list[int]) -> _Plan:
        session = self._sessions[session_id]
        lines = [session.line(node_id) for node_id in node_ids]
        fresh = dict.fromkeys(i for line in lines for i in line if session.nodes[i].slot == NO_SLOT)
        left = (self.info.max_length - session.child_position(node_id) for node_id in node_ids)
        counts = [min(self.num_places, count) for count in left]
        return _Plan(session_id, session, node_ids, lines, list(fresh), self._num_pending(session), counts)

    def _pack(self, packer: RowPacker, plan: _Plan, slots: Int32Array) -> None:
        """Add a session's rows, in these slots.

        These are its pending tokens, then for each requested node its unread ancestors, the node, and its masks. The
        rows that predict positions, the node's own and those of its masks, give logits.
        """
        session, own, masks = plan.session, *np.split(slots, [plan.num_own])
        self._contexts.pack(packer, plan.session_id, own[: plan.num_pending], judged=plan.node_ids[0] == CONTEXT)
        slot_of = {i: node.slot for i, node in session.nodes.items()}
        slot_of.update(zip(plan.fresh, own[plan.num_pending :].tolist(), strict=True))
        unread, free = set(plan.fresh), iter(masks.tolist())
        for node_id, line, count in zip(plan.node_ids, plan.lines, plan.num_places, strict=True):
            lineage = list[int]()
            for i in line:
                node = session.nodes[i]
                lineage.append(slot_of[i])
                if i in unread or i == node_id:
                    judged = i == node_id
                    packer.add_node(
                        node.token_id, lineage[-1], node.position, session.length, lineage.copy(), judged=judged
                    )
                    unread.discard(i)
            first = session.child_position(node_id)
            for place, slot in enumerate(islice(free, count - 1)):
                lineage.append(slot)
                packer.add_node(self.info.vocab_size + place, slot, first + place, session.length, lineage.copy())

    def _wanted(self, plan: _Plan, width: int) -> Iterator[ChildRequest]:
        """Yield the requests to a session's rows with logits."""
        params = ranking_params(plan.session.params)
        for node_id, count in zip(plan.node_ids, plan.num_places, strict=True):
            first = plan.session.child_position(node_id)
            for position in range(first, first + count):
                yield ChildRequest(params, position, width, plan.session_id)

    def _settle(self, plan: _Plan, slots: Int32Array) -> None:
        """After a pass, commit the pending tokens to the table, give the nodes their slots, and free those of masks."""
        pending, fresh, masks = np.split(slots, [plan.num_pending, plan.num_own])
        for node_id, slot in zip(plan.fresh, fresh.tolist(), strict=True):
            plan.session.nodes[node_id].slot = slot
        self._contexts.settle(plan.session.place, np.array([plan.num_pending]), pending)
        self._pool.give(masks)

    def _answer(self, request: Expansion) -> Children:
        """Cut children to the requested number, and store them as nodes."""
        foreseen = self._foreseen[request.session_id]
        found = foreseen.get(request.node_id)
        if found is None:
            return NO_CHILDREN
        children = found.places[found.place].first(len(request.child_ids))
        session = self._sessions[request.session_id]
        session.add(request, session.child_position(request.node_id), children)
        if found.place + 1 < len(found.places):
            below = found._replace(place=found.place + 1)
            foreseen.update(dict.fromkeys(request.child_ids[: len(children.token_ids)], below))
        return children
