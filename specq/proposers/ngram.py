"""`ngram`: prompt lookup as a proposer. It needs no model, so it drafts for targets of any tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specq.proposers.interface import Children, Expansion, ProposerSpec
from specq.proposers.ngram_index import NgramIndex
from specq.proposers.paths import Paths
from specq.protocol import Int32Array, ModelInfo, SamplingParams

INFO = ModelInfo(
    name="ngram",
    fingerprint="ngram",
    dtype="none",
    engine="ngram",
    vocab_size=0,
    num_tokens=0,
    eos_ids=(),
    max_length=2**31 - 1,
    tokenizer_hash="",
)


@dataclass(slots=True)
class _Session:
    index: NgramIndex
    paths: Paths = field(default_factory=Paths)


class NgramProposer:
    """Fulfils `specq.proposers.Proposer`; takes and ignores what model proposers need."""

    def __init__(self, model: str = "", **options: Any) -> None:
        self.info = INFO
        self._sessions: dict[int, _Session] = {}

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams) -> None:
        """See `Proposer.open`."""
        self._sessions[session_id] = _Session(NgramIndex(token_ids.tolist()))

    def close(self, session_id: int) -> None:
        """See `Proposer.close`."""
        self._sessions.pop(session_id, None)

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """See `Proposer.commit`."""
        session, tokens = self._sessions[session_id], token_ids.tolist()
        session.index.token_ids.extend(tokens)
        session.paths.commit(tokens, path)

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """See `Proposer.expand`."""
        return [self._children(request) for request in requests]

    def _children(self, request: Expansion) -> Children:
        session = self._sessions[request.session_id]
        found = session.index.followers(session.paths[request.node_id], len(request.child_ids))
        tokens, scores = [token for token, _ in found], [score for _, score in found]
        session.paths.add(request, tokens)
        return Children(np.array(tokens, np.int32), np.array(scores, np.float32))


NGRAM = ProposerSpec(NgramProposer, needs_model=False)
