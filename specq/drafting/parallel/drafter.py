"""`draft-model` with a parallel draft model (PARD, An et al. 2025, arXiv 2504.18583): one pass foresees several places
of a text.

The pass for a node reads what leads to it and then masks; the node's own row says what follows it, the first mask what
follows that, and so on. Masks see one another, but no drafted token: so what is likely at a place does not depend on
which tokens stand before it, and all nodes that the pass foresees get the same children at their depth. Which of them
are worth having, the drafter chooses, best first (`specq.drafting.worker`): it asks for the children of a node, and a
pass is run only for those that no earlier pass foresaw, for all of them at once. Those are the likely outcomes of what
is being verified: the context, and the ends of what was foreseen.

Nodes get their KV with the first pass for them or for one of their descendants; that of masks is thrown away after
each.

Children are ranked as a draft model's are. They are chosen by content and not drawn, so they are point masses under
`probabilistic`, too; there the scores are those of the model alone, since the noise of the job's seed must not choose
what it judges.
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
from specq.engines.torch import RowPacker
from specq.protocol import Int32Array, SamplingParams

WIDTH = 8  # children of each place that are kept, if no more are asked for


class _Foreseen(NamedTuple):
    """What a pass said of the places after some node; the children of ours are those at this place."""

    places: Sequence[Children]
    place: int


class _Plan(NamedTuple):
    """What a pass computes for a session.

    node_ids, lines, num_places   the nodes asked about; of each the ids that lead to it, its own last, and how many
                                  places are foreseen
    fresh                         the nodes in `lines` that have no KV yet, each after its ancestors
    num_pending                   tokens of the context that have none
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
        """How many are needed: masks need some, too."""
        return self.num_own + sum(self.num_places) - len(self.num_places)


class ParallelModel(KvTrees):
    """Drafts with contexts of a model that has masks. Other arguments as of `KvTrees`."""

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
        """Append committed tokens and re-root the nodes; see `Drafter.commit`. What follows the new context is not
        known before it is asked for: a pass of its own says that better than one that foresaw it."""
        super().commit(session_id, token_ids, path)
        if len(token_ids):
            self._keep_known(session_id)

    def rewind(self, session_id: int, length: int) -> bool:
        """Forget committed tokens beyond so many, and all nodes; see `Drafter.rewind`."""
        super().rewind(session_id, length)
        self._keep_known(session_id)
        return True

    def _keep_known(self, session_id: int) -> None:
        nodes = self._sessions[session_id].nodes
        self._foreseen[session_id] = {i: found for i, found in self._foreseen[session_id].items() if i in nodes}

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """Answer all requests, with one pass for those of nodes that were not foreseen; no children at the model's
        maximum length. See `Drafter.expand`. Raises EngineError, with nothing changed, if KV slots run short."""
        asked = self._asked(one for one in requests if one.node_id not in self._foreseen[one.session_id])
        if asked:
            with self._contexts.alive():
                self._contexts.prefill(self._pool.places(asked))
                self._look_ahead(asked, max(WIDTH, *(len(request.child_ids) for request in requests)))
        return [self._answer(request) for request in requests]

    def _look_ahead(self, asked: Asked, width: int) -> None:
        """Run a pass for these nodes, and keep what it says of the places after each: `width` children of each
        place."""
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
        """Add a session's rows, in these slots: its pending tokens, then for each node asked about what leads to it and
        was not read yet, the node, and its masks. The rows that a node's places follow from, its own and those of its
        masks, give logits."""
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
        """Yield what is asked of each of a session's rows that give logits."""
        params = ranking_params(plan.session.params)
        for node_id, count in zip(plan.node_ids, plan.num_places, strict=True):
            first = plan.session.child_position(node_id)
            for position in range(first, first + count):
                yield ChildRequest(params, position, width, plan.session_id)

    def _settle(self, plan: _Plan, slots: Int32Array) -> None:
        """After a pass: pending tokens are committed to the table, nodes own their slots, and those of masks are
        free."""
        pending, fresh, masks = np.split(slots, [plan.num_pending, plan.num_own])
        for node_id, slot in zip(plan.fresh, fresh.tolist(), strict=True):
            plan.session.nodes[node_id].slot = slot
        self._contexts.settle(plan.session.place, np.array([plan.num_pending]), pending)
        self._pool.give(masks)

    def _answer(self, request: Expansion) -> Children:
        """Cut children to those requested, and keep them as nodes."""
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
