"""`ngram`: prompt lookup as a proposer. It needs no model, so it drafts for targets of any tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specq.proposers.interface import Children, Expansion, ProposerSpec
from specq.proposers.ngram_index import NgramIndex
from specq.protocol import Int32Array, ModelInfo, SamplingParams

CONTEXT = -1

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
    """`paths`: node -> the tokens from the context down to it."""

    index: NgramIndex
    paths: dict[int, tuple[int, ...]] = field(default_factory=lambda: {CONTEXT: ()})


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
        session, tokens = self._sessions[session_id], tuple(token_ids.tolist())
        session.index.token_ids.extend(tokens)
        depth = len(tokens)
        kept = session.paths.items() if len(path) == depth else ()
        session.paths = {i: p[depth:] for i, p in kept if len(p) > depth and p[:depth] == tokens} | {CONTEXT: ()}

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """See `Proposer.expand`."""
        return [self._children(request) for request in requests]

    def _children(self, request: Expansion) -> Children:
        session = self._sessions[request.session_id]
        path = session.paths[request.node_id]
        found = session.index.followers(path, len(request.child_ids))
        for child_id, (token, _) in zip(request.child_ids, found, strict=False):
            session.paths[child_id] = (*path, token)
        tokens, scores = [token for token, _ in found], [score for _, score in found]
        return Children(np.array(tokens, np.int32), np.array(scores, np.float32))


NGRAM = ProposerSpec(NgramProposer, needs_model=False)
