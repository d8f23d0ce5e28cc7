"""Trees of drafted nodes whose KV is in the pool of a draft model's contexts.

A node gets a KV slot when it is computed. Its ancestors are computed before it, or in the same pass. A commit moves the
root. The slots of the accepted branch move into the session's table. Its descendants stay valid. All other slots are
freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specq.drafting.draft_model.children import ChildMaker
from specq.drafting.draft_model.contexts import Contexts
from specq.drafting.interface import CONTEXT, Children, Drafter, Expansion
from specq.protocol import EngineError, Int32Array, IntpArray, SamplingParams

NO_SLOT = -1
# The work of a pass: for each session the requested nodes, ascending (so CONTEXT comes first), each once.
Asked = dict[int, list[int]]


@dataclass(slots=True)
class Node:
    """A drafted token; `slot` is NO_SLOT until it is computed."""

    token_id: int
    position: int
    parent: int
    slot: int = NO_SLOT


@dataclass(slots=True)
class TreeSession:
    """A context of `length` committed tokens at this place in the pool, and the `nodes` below it, parents first."""

    params: SamplingParams
    length: int
    place: IntpArray = field(default_factory=lambda: np.zeros(1, np.intp))  # i64[1]
    nodes: dict[int, Node] = field(default_factory=dict)

    def line(self, node_id: int) -> list[int]:
        """Return the ids of a node's ancestors and its own, root first; an empty list for the context."""
        line = list[int]()
        while node_id != CONTEXT:
            line.append(node_id)
            node_id = self.nodes[node_id].parent
        return line[::-1]

    def lineage(self, node_id: int) -> list[int]:
        """Return the slots of a node's ancestors and its own, root first."""
        return [self.nodes[i].slot for i in self.line(node_id)]

    def child_position(self, node_id: int) -> int:
        """Return the position of the children of a node, or of the context; EngineError for an unknown node."""
        if node_id == CONTEXT:
            return self.length
        if node_id not in self.nodes:
            raise EngineError(f"draft node {node_id} is unknown or was removed")
        return self.nodes[node_id].position + 1

    def add(self, request: Expansion, position: int, children: Children) -> None:
        """Store children at this position as nodes."""
        for child_id, token_id in zip(request.child_ids, children.token_ids.tolist(), strict=False):
            self.nodes[child_id] = Node(token_id, position, request.node_id)

    def cut(self, root: int | None) -> list[Node]:
        """Keep the nodes below `root`, whose children become the context's; return the others. None keeps no node."""
        kept: dict[int, Node] = {}
        for node_id, node in self.nodes.items():
            if node.parent == root or node.parent in kept:
                kept[node_id] = node
        gone = [node for node_id, node in self.nodes.items() if node_id not in kept]
        for node in kept.values():
            node.parent = CONTEXT if node.parent == root else node.parent
        self.nodes = kept
        return gone


class KvTrees(Drafter):
    """Sessions of a draft model, each with a tree below its context: the base of all drafters with a model.

    limit_vocab               children have ids below it. Lower it to the target's number of tokens if that is smaller.
    distribution_size, rng    as in `specq.drafting.draft_model.children.ChildMaker`.
    """

    def __init__(self, contexts: Contexts, distribution_size: int, rng: np.random.Generator | None) -> None:
        self._contexts = contexts
        self.info, self._pool = contexts.info, contexts.pool
        self.limit_vocab = min(self.info.vocab_size, self.info.num_tokens)
        self.maker: ChildMaker = ChildMaker(distribution_size, rng or np.random.default_rng(), contexts.token_ids)
        self._sessions: dict[int, TreeSession] = {}

    @property
    def free_slots(self) -> int:
        return self._pool.free_slots

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """Start a session; its context is computed by the first `expand`. See `Drafter.open`."""
        self._contexts.open(session_id, token_ids, owner)
        self._sessions[session_id] = TreeSession(params, len(token_ids), self._pool.places([session_id]))

    def close(self, session_id: int) -> None:
        """Forget a session; see `Drafter.close`."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._free(session.nodes.values())
            self._contexts.close(session_id)

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """Append committed tokens and move the root of the nodes; see `Drafter.commit`."""
        if not len(token_ids):
            return
        session = self._sessions[session_id]
        computed = self._computed(session, path)
        self._contexts.append(session.place, np.array([len(token_ids)]), token_ids)
        if computed:
            slots = np.array([node.slot for node in computed], np.int32)
            self._contexts.settle(session.place, np.array([len(slots)]), slots)
        session.length += len(token_ids)
        gone = session.cut(path[-1] if len(path) == len(token_ids) else None)
        kept = {id(node) for node in computed}
        self._free(node for node in gone if id(node) not in kept)

    def rewind(self, session_id: int, length: int) -> bool:
        """Forget committed tokens beyond `length`, and all nodes; see `Drafter.rewind`."""
        session = self._sessions[session_id]
        self._free(session.cut(None))
        self._contexts.rewind(session_id, length)
        session.length = min(session.length, length)
        return True

    def _num_pending(self, session: TreeSession) -> int:
        return int(self._contexts.num_pending(session.place)[0])

    def _may_have_children(self, request: Expansion) -> bool:
        """Return whether children are requested at a supported position; EngineError for an unknown node."""
        position = self._sessions[request.session_id].child_position(request.node_id)
        return position < self.info.max_length and bool(request.child_ids)

    def _asked(self, requests: Iterable[Expansion]) -> Asked:
        """Return the nodes of a pass: all requested nodes that may have children."""
        asked: dict[int, set[int]] = {}
        for request in requests:
            if self._may_have_children(request):
                asked.setdefault(request.session_id, set()).add(request.node_id)
        return {session_id: sorted(node_ids) for session_id, node_ids in asked.items()}

    def _computed(self, session: TreeSession, path: Sequence[int]) -> list[Node]:
        """Return the nodes at the start of the path that have KV, together with all tokens before them."""
        computed: list[Node] = []
        for node_id in path if not self._num_pending(session) else ():
            node = session.nodes.get(node_id)
            if node is None or node.slot == NO_SLOT:
                break
            computed.append(node)
        return computed

    def _free(self, nodes: Iterable[Node]) -> None:
        slots = [node.slot for node in nodes if node.slot != NO_SLOT]
        self._pool.give(np.array(slots, np.int32))
