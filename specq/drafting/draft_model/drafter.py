"""`draft-model`: a small language model that expands draft nodes, many in one forward pass.

It keeps a KV slot for each committed token and each expanded node (`specq.drafting.draft_model.kv_trees`), in the
engine's own pool and forward pass. A node's KV is written when the node is expanded. Its ancestors were expanded
before, because only an expansion creates children.

Children are ranked by the target's own perturbed scores (`specq.verification.sampling`). With the job's seed, the
drafter guesses the token that the target *draws*, not only a likely one. Under `probabilistic` they are drawn without
replacement, from distributions that are sent with them (`specq.verification.drafting`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specq.drafting.draft_model.chain_model import ChainModel
from specq.drafting.draft_model.children import ChildMaker, ChildRequest, mask_row
from specq.drafting.draft_model.contexts import Contexts
from specq.drafting.draft_model.kv_trees import NO_SLOT, Asked, KvTrees, Node, TreeSession
from specq.drafting.interface import CONTEXT, NO_CHILDREN, Children, Expansion, draws_children, level_ids
from specq.engines.native import ChainStarts, LoadedModel, RowPacker
from specq.protocol import Float32Array, Int32Array
from specq.verification import Logits


class DraftModel(KvTrees):
    """Drafts trees with a draft model.

    Arguments as in `specq.engines.models.load_model` and `KvTrees`. `model` may also be the contexts of another
    drafter with the same model, for sessions of its own.
    """

    def __init__(
        self,
        model: str | LoadedModel | Contexts,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_slots: int = 0,
        name: str = "",
        distribution_size: int = 32,
        rng: np.random.Generator | None = None,
    ) -> None:
        if not isinstance(model, Contexts):
            model = Contexts(model, device=device, dtype=dtype, kv_slots=kv_slots, name=name)
        super().__init__(model, distribution_size, rng)

    @property
    def takes_masks(self) -> bool:
        """See `Drafter.takes_masks`. On a CPU, where the host has the logits."""
        return self._contexts.is_on_cpu and isinstance(self.maker, ChildMaker)

    @property
    def has_chains(self) -> bool:
        """See `Drafter.has_chains`. False on a CPU, where it is better to receive verdicts between levels."""
        chains = self._contexts.chains
        return chains is not None and chains.runs_beside_host

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """Draft the children of all requested nodes in one pass; none at the maximum length.

        See `Drafter.expand`. Raises EngineError, with the state unchanged, if there are too few KV slots.
        """
        asked = self._asked(requests)
        if not asked:
            return [NO_CHILDREN] * len(requests)
        with self._contexts.alive():
            self._contexts.prefill(self._pool.places(asked))
            return self._children(requests, asked, self._compute(asked))

    def expand_chain(self, requests: Sequence[Expansion], depth: int) -> list[list[Children]]:
        """Draft chains, on a GPU without the host in between. See `Drafter.expand_chain`."""
        if depth == 1:
            return super().expand_chain(requests, depth)
        asked = self._asked(requests)
        drafter = self._chain_drafter(requests, asked, depth)
        if drafter is None:
            return super().expand_chain(requests, depth)
        with self._contexts.alive():
            self._contexts.prefill(self._pool.places(asked))
            with self._contexts.taken(len(requests) * (depth - 1)) as slots:
                logits = self._compute(asked)
                rows = [(session_id, node_id) for session_id, node_ids in asked.items() for node_id in node_ids]
                starts = self._chain_starts(asked, slots.reshape(len(requests), depth - 1))
                width = len(requests[0].child_ids) // depth
                tokens, scores = drafter.start(logits, starts, depth, width, self.limit_vocab)()  # [depth, rows, width]
        firsts = zip(starts.positions.tolist(), starts.slots.tolist(), strict=True)
        by_key = {
            key: (*first, tokens[:, i], scores[:, i]) for i, (key, first) in enumerate(zip(rows, firsts, strict=True))
        }
        return [self._add_chain(request, depth, *by_key[request.session_id, request.node_id]) for request in requests]

    def in_chains(self) -> ChainModel:
        """Return a drafter of chains with the same contexts; see `Drafter.in_chains`."""
        found = ChainModel(self._contexts, distribution_size=self.maker.distribution_size, rng=self.maker.rng)
        found.limit_vocab = self.limit_vocab
        return found

    def _chain_drafter(self, requests: Sequence[Expansion], asked: Asked, depth: int) -> Any:
        """Return the drafter for these chains on the device, or None.

        The chains have one width, start below different nodes, and have room for their depth. The device must support
        their parameters.
        """
        widths = {len(request.child_ids) for request in requests}
        if not self.has_chains or len(widths) != 1 or sum(map(len, asked.values())) != len(requests):
            return None
        sessions = [self._sessions[request.session_id] for request in requests]
        ends = [s.child_position(r.node_id) + depth for s, r in zip(sessions, requests, strict=True)]
        params, lengths = [s.params for s in sessions], [s.length for s in sessions]
        drafter = self._contexts.chains
        fits = max(ends) <= self.info.max_length and drafter.takes(params, lengths, depth, widths.pop() // depth)
        return drafter if fits else None

    def _chain_starts(self, asked: Asked, slots: Int32Array) -> ChainStarts:
        """Return where the chains below these nodes begin, given their slots i32[nodes, depth - 1]."""
        sizes = [*map(len, asked.values())]
        own = [(self._sessions[session_id], node_id) for session_id, nodes in asked.items() for node_id in nodes]
        return ChainStarts(
            self._pool.tables(self._pool.places(asked)),
            np.cumsum([0, *sizes], dtype=np.int32),
            np.array([session.length for session, _ in own], np.int32),
            [session.lineage(node_id) for session, node_id in own],
            np.array([session.child_position(node_id) for session, node_id in own], np.int32),
            slots,
            [session.params for session, _ in own],
        )

    def _add_chain(
        self,
        request: Expansion,
        depth: int,
        position: int,
        slots: list[int],
        tokens: Int32Array,
        scores: Float32Array,
    ) -> list[Children]:
        """Store a chain's nodes, tokens [depth, width] from this position on.

        The first node of each level but the last has been expanded, in these slots.
        """
        session, parent, levels = self._sessions[request.session_id], request.node_id, []
        for level, ids in enumerate(level_ids(request, depth)):
            levels.append(Children(tokens[level], scores[level]))
            session.add(Expansion(request.session_id, parent, ids), position + level, levels[-1])
            parent = ids[0]
            if level < len(slots):
                session.nodes[parent].slot = slots[level]
        return levels

    def _compute(self, asked: Asked) -> Logits:
        """Compute the pending tokens and the requested nodes; return logits [requested nodes, vocab]."""
        counts = {session_id: self._num_new(session_id, node_ids) for session_id, node_ids in asked.items()}
        with self._contexts.taken(sum(counts.values())) as slots:
            packer = RowPacker()
            shares, taken = {}, 0
            for session_id, node_ids in asked.items():
                shares[session_id] = slots[taken : taken + counts[session_id]]
                taken += counts[session_id]
                self._pack(packer, session_id, node_ids, shares[session_id])
            logits = self._contexts.run(packer.pack())
        for session_id, share in shares.items():
            self._settle(session_id, asked[session_id], share)
        return logits

    def _num_new(self, session_id: int, node_ids: list[int]) -> int:
        session = self._sessions[session_id]
        return self._num_pending(session) + len(_without_slot(session, node_ids))

    def _pack(self, packer: RowPacker, session_id: int, node_ids: list[int], slots: Int32Array) -> None:
        """Add a session's rows: first its context's, then nodes."""
        session = self._sessions[session_id]
        num_pending = self._num_pending(session)
        self._contexts.pack(packer, session_id, slots[:num_pending], judged=node_ids[0] == CONTEXT)
        fresh = iter(slots[num_pending:].tolist())
        for node_id in node_ids:
            if node_id != CONTEXT:
                node = session.nodes[node_id]
                slot = next(fresh) if node.slot == NO_SLOT else node.slot
                lineage = [*session.lineage(node.parent), slot]
                packer.add_node(node.token_id, slot, node.position, session.length, lineage)

    def _settle(self, session_id: int, node_ids: list[int], slots: Int32Array) -> None:
        """After the pass, commit the pending tokens to the table, and give nodes their slots."""
        session = self._sessions[session_id]
        num_pending = self._num_pending(session)
        for node, slot in zip(_without_slot(session, node_ids), slots[num_pending:].tolist(), strict=True):
            node.slot = slot
        self._contexts.settle(session.place, np.array([num_pending]), slots[:num_pending])

    def _children(self, requests: Sequence[Expansion], asked: Asked, logits: Logits) -> list[Children]:
        """Make the requested children of each row of logits [requested nodes, vocab]."""
        rows = [(session_id, node_id) for session_id, node_ids in asked.items() for node_id in node_ids]
        counts = dict.fromkeys(rows, 0) | {(r.session_id, r.node_id): len(r.child_ids) for r in requests}
        sessions = [self._sessions[session_id] for session_id, _ in rows]
        wanted = [
            ChildRequest(session.params, session.child_position(key[1]), counts[key], key[0])
            for session, key in zip(sessions, rows, strict=True)
        ]
        if self.masks and isinstance(logits, np.ndarray):
            rows, wanted, logits = self._masked(rows, wanted, logits)
        made = dict(zip(rows, self.maker.make(wanted, logits, self.limit_vocab) if rows else (), strict=True))
        return [self._answer(request, made.get((request.session_id, request.node_id))) for request in requests]

    def _masked(
        self, rows: list[tuple[int, int]], wanted: list[ChildRequest], logits: Float32Array
    ) -> tuple[list[tuple[int, int]], list[ChildRequest], Float32Array]:
        """Mask the logits of sessions with a grammar, and leave out nodes behind which it allows nothing.

        Such a node has children anyway if these are drawn. Else the verifier would not see that it was expanded
        (decision 0008).
        """
        kept = []
        for i, ((session_id, node_id), of_row) in enumerate(zip(rows, wanted, strict=True)):
            masks, session = self.masks.get(session_id), self._sessions[session_id]
            path = [session.nodes[one].token_id for one in session.line(node_id)] if masks else ()
            if masks is None or mask_row(logits[i], masks(path), self.maker.token_ids) or draws_children(of_row.params):
                kept.append(i)
        if len(kept) == len(rows):
            return rows, wanted, logits
        return [rows[i] for i in kept], [wanted[i] for i in kept], logits[kept]

    def _answer(self, request: Expansion, found: Children | None) -> Children:
        """Cut children to the requested number, and store them as nodes."""
        if found is None:
            return NO_CHILDREN
        children = found.first(len(request.child_ids))
        session = self._sessions[request.session_id]
        session.add(request, session.child_position(request.node_id), children)
        return children


def _without_slot(session: TreeSession, node_ids: list[int]) -> list[Node]:
    """Return the nodes that were not expanded before."""
    nodes = (session.nodes[node_id] for node_id in node_ids if node_id != CONTEXT)
    return [node for node in nodes if node.slot == NO_SLOT]
