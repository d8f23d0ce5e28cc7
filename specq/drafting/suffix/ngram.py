"""`ngram`: suffix decoding in a draft worker. It needs no model, so it drafts for targets with any tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specq.drafting.interface import Children, Drafter, Expansion
from specq.drafting.paths import DraftPaths
from specq.drafting.suffix import DEPTH, SuffixTree, draft, make_tree
from specq.drafting.table import DrafterSpec
from specq.protocol import Int32Array, ModelInfo, SamplingParams

FLOOR = 0.01  # minimum probability of a child
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
    tail: list[int]  # the last tokens
    tree: SuffixTree = field(default_factory=make_tree)
    paths: DraftPaths = field(default_factory=DraftPaths)

    def extend(self, token_ids: list[int]) -> None:
        self.tree.extend(token_ids)
        self.tail = [*self.tail, *token_ids][-DEPTH:]


class NgramDrafter(Drafter):
    """Drafts by suffix decoding. It ignores the arguments of drafters with models."""

    def __init__(self, model: str = "", **options: Any) -> None:
        self.info = INFO
        self._sessions: dict[int, _Session] = {}

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """See `Drafter.open`."""
        self._sessions[session_id] = session = _Session([])
        session.extend(token_ids.tolist())

    def close(self, session_id: int) -> None:
        """See `Drafter.close`."""
        self._sessions.pop(session_id, None)

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """See `Drafter.commit`."""
        session, tokens = self._sessions[session_id], token_ids.tolist()
        session.extend(tokens)
        session.paths.commit(tokens, path)

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """See `Drafter.expand`."""
        return [self._children(request) for request in requests]

    def _children(self, request: Expansion) -> Children:
        session = self._sessions[request.session_id]
        tail, count = [*session.tail, *session.paths[request.node_id]], len(request.child_ids)
        found = draft((session.tree,), tail, count, most_depth=1, fan_out=count, floor=FLOOR)
        session.paths.add(request, found.token_ids)
        return Children(np.array(found.token_ids, np.int32), np.log(np.array(found.probs, np.float32)))


NGRAM = DrafterSpec(NgramDrafter, needs_model=False)
