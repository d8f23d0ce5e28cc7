"""`text`: string-level matching (Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding
Algorithms for Heterogeneous Vocabularies", string-level exact match).

The draft model goes on with the text, greedily and in its own tokens; what it says is made text and cut by the target's
tokenizer. So any token of the target may be drafted, by any proposer; but nodes are point masses, one child each, also
where the job draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specq.drafting.interface import CONTEXT, NO_CHILDREN, Children, Expansion
from specq.drafting.vocabulary.drafted_text import DraftedText
from specq.drafting.vocabulary.retelling import RetellingDrafter, RetoldSession
from specq.protocol import EngineError, Int32Array, SamplingParams
from specq.text import Retold


@dataclass(slots=True)
class _Session(RetoldSession):
    """`nodes`: for each of ours how many drafted tokens it ends, counted from the session's beginning; `num_followed`:
    how many of these were committed."""

    drafted: DraftedText
    nodes: dict[int, int] = field(default_factory=dict)
    num_followed: int = 0
    next_id: int = 0  # of the draft model's nodes

    def depth(self, node_id: int) -> int:
        """Return how many drafted tokens lead from the context to a node, or to the context."""
        if node_id == CONTEXT:
            return 0
        if node_id not in self.nodes:
            raise EngineError(f"draft node {node_id} is unknown or was cut")
        return self.nodes[node_id] - self.num_followed


class TextVocabulary(RetellingDrafter[_Session]):
    """See the module; the arguments are those of `RetellingDrafter`."""

    def _session(self, token_ids: list[int], params: SamplingParams) -> _Session:
        greedy = replace(params, temperature=0.0)
        return _Session(greedy, Retold(self.vocabularies, token_ids), DraftedText(self.vocabularies))

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """Keep what was drafted beyond the committed tokens if all of them were drafted; else begin anew."""
        session, tokens, followed = self._sessions[session_id], token_ids.tolist(), len(path)
        pieces = session.drafted.follow(followed)
        own = [piece.token_id for piece in pieces]
        session.text.follow(tokens[:followed], own)
        if own:
            self.draft.commit(session_id, np.array(own, np.int32), [piece.node_id for piece in pieces])
        session.num_followed += followed
        session.nodes = {i: end for i, end in session.nodes.items() if end > session.num_followed}
        if followed < len(tokens):
            session.nodes.clear()
            session.drafted = DraftedText(self.vocabularies)
            self._correct(session_id, tokens[followed:])

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """Draft as far as the requested nodes need, all sessions in a pass; each node has at most one child."""
        depths = [self._sessions[request.session_id].depth(request.node_id) for request in requests]
        needed = dict[int, int]()
        for request, depth in zip(requests, depths, strict=True):
            if request.child_ids:
                needed[request.session_id] = max(needed.get(request.session_id, 0), depth + 1)
        while short := [i for i, count in needed.items() if self._is_short(self._sessions[i].drafted, count)]:
            self._draft_on(short)
        return [self._answer(request, depth) for request, depth in zip(requests, depths, strict=True)]

    def _is_short(self, drafted: DraftedText, count: int) -> bool:
        return len(drafted.told) < count and not drafted.ended

    def _draft_on(self, session_ids: Sequence[int]) -> None:
        """Let the draft model draft one more token of its own for each session."""
        sessions = [self._sessions[session_id] for session_id in session_ids]
        asked = [
            Expansion(session_id, session.drafted.node_id, (session.next_id,))
            for session_id, session in zip(session_ids, sessions, strict=True)
        ]
        for session, children in zip(sessions, self.draft.expand(asked), strict=True):
            if len(children.token_ids):
                session.drafted.add(session.next_id, int(children.token_ids[0]), float(children.scores[0]))
                session.next_id += 1
            else:
                session.drafted.end()

    def _answer(self, request: Expansion, depth: int) -> Children:
        session = self._sessions[request.session_id]
        if not request.child_ids or depth >= len(session.drafted.told):
            return NO_CHILDREN
        told = session.drafted.told[depth]
        session.nodes[request.child_ids[0]] = session.num_followed + depth + 1
        return Children(np.array([told.token_id], np.int32), np.array([told.score], np.float32))
