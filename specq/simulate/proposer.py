"""A draft model that only takes time: a stub that fulfils `specq.drafting.Proposer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specq.drafting import Children, Expansion
from specq.protocol import EngineError, Int32Array, ModelInfo, SamplingParams
from specq.simulate.curve import HardwareCurve
from specq.simulate.settings import DrafterSettings
from specq.simulate.stub_text import StubGuesses

CONTEXT = -1  # the node id that stands for the committed context
_MOST_NODES = 4096  # of one session, before those that were passed are forgotten


@dataclass(slots=True)
class _Session:
    """nodes: id -> (token, position), of which `expanded` were; pending: committed tokens without KV."""

    length: int
    last_token: int
    pending: int
    nodes: dict[int, tuple[int, int]] = field(default_factory=dict)
    expanded: set[int] = field(default_factory=set)


class TimedProposer:
    """Proposes by the stub guesses. `busy_s` grows by what each pass takes: its curve's time for the rows (nodes to be
    expanded, and committed tokens that have no KV yet)."""

    def __init__(self, settings: DrafterSettings, guesses: StubGuesses, info: ModelInfo) -> None:
        self.settings, self.guesses, self.info = settings, guesses, info
        self.busy_s = 0.0
        self.num_passes = self.num_rows = 0
        self._curve = HardwareCurve(settings.pass_ms)
        self._sessions: dict[int, _Session] = {}

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """Start a session; its context is computed by the first pass."""
        self._sessions[session_id] = _Session(len(token_ids), int(token_ids[-1]), len(token_ids))

    def close(self, session_id: int) -> None:
        """Forget a session."""
        self._sessions.pop(session_id, None)

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """Append committed tokens; those that were drafted and expanded have their KV already."""
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
        """Answer all requests, and take the time of one pass."""
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
            raise EngineError(f"draft node {request.node_id} is unknown or was cut")
        token, position = session.nodes[request.node_id]
        return token, position + 1
