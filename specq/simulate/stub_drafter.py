"""A draft model that only takes time: it proposes what `specq.simulate.stubs.StubGuesses` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specq.drafting import CONTEXT, Children, Drafter, Expansion
from specq.protocol import EngineError, Int32Array, ModelInfo, SamplingParams
from specq.simulate.scenarios import HardwareCurve
from specq.simulate.settings import DrafterSettings
from specq.simulate.stubs import StubGuesses

_MOST_NODES = 4096  # of one session, before passed nodes are forgotten


@dataclass(slots=True)
class _Session:
    """A session at the stub drafter.

    nodes      id -> (token, position).
    expanded   the ids of expanded nodes.
    pending    committed tokens without KV.
    """

    length: int
    last_token: int
    pending: int
    nodes: dict[int, tuple[int, int]] = field(default_factory=dict)
    expanded: set[int] = field(default_factory=set)


class TimedProposer(Drafter):
    """Proposes by the stub guesses.

    `busy_s` grows by the time of each pass: its curve's time for the rows (nodes to be expanded, and committed tokens
    without KV).
    """

    def __init__(self, settings: DrafterSettings, guesses: StubGuesses, info: ModelInfo) -> None:
        self.settings, self.guesses, self.info = settings, guesses, info
        self.busy_s = 0.0
        self.num_passes = self.num_rows = 0
        self._curve = HardwareCurve(settings.pass_ms)
        self._sessions: dict[int, _Session] = {}

    @property
    def has_chains(self) -> bool:
        """See `Drafter.has_chains`."""
        return self.settings.chain > 1

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """Start a session; the first pass computes its context."""
        self._sessions[session_id] = _Session(len(token_ids), int(token_ids[-1]), len(token_ids))

    def close(self, session_id: int) -> None:
        """Forget a session."""
        self._sessions.pop(session_id, None)

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """Append committed tokens; drafted and expanded ones have their KV already."""
        session = self._sessions[session_id]
        session.length += len(token_ids)
        session.last_token = int(token_ids[-1])
        session.pending += len(token_ids) - sum(node_id in session.expanded for node_id in path)
        if len(path) < len(token_ids):
            session.nodes, session.expanded = {}, set()
        elif len(session.nodes) > _MOST_NODES:
            session.nodes = {i: node for i, node in session.nodes.items() if node[1] >= session.length}
            session.expanded &= session.nodes.keys()

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """Answer all requests, and add the time of one pass."""
        num_rows = 0
        answers = []
        for request in requests:
            session = self._sessions[request.session_id]
            num_rows += session.pending
            num_rows += request.node_id != CONTEXT or not session.pending  # the last token again, for its logits
            session.pending = 0
            answers.append(self._children(session, request))
        self.busy_s += self._curve(num_rows)
        self.num_passes += 1
        self.num_rows += num_rows
        return answers

    def _children(self, session: _Session, request: Expansion) -> Children:
        token, position = self._place(session, request)
        count = len(request.child_ids)
        tokens, scores = self.guesses.children(request.session_id, position, token, count)
        for child_id, child in zip(request.child_ids, tokens, strict=False):
            session.nodes[child_id] = (child, position)
        session.expanded.add(request.node_id)
        return Children(np.array(tokens, np.int32), scores)

    def _place(self, session: _Session, request: Expansion) -> tuple[int, int]:
        """Return (a node's token, the position of its children)."""
        if request.node_id == CONTEXT:
            return session.last_token, session.length
        if request.node_id not in session.nodes:
            raise EngineError(f"draft node {request.node_id} is unknown or was removed")
        token, position = session.nodes[request.node_id]
        return token, position + 1
