"""The masks of a step's sessions, computed when the judge asks for them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from specq.grammar.session_grammar import SessionGrammar
from specq.protocol import Int32Array
from specq.verification import StepBatch, TokenMasks


class StepMasks(TokenMasks):
    """The masks of sessions with these grammars, by session id, in one step.

    They follow the transcripts as these are when the judge asks. That is after the step before has been committed, and
    before this one is.
    """

    def __init__(self, grammars: Mapping[int, SessionGrammar]) -> None:
        self._grammars = grammars
        self._known: dict[int, Int32Array] = {}
        self._reasons: dict[int, str] = {}

    def of(self, judged: StepBatch) -> Mapping[int, Int32Array]:
        """See `TokenMasks`."""
        found = {}
        for i, session_id in enumerate(judged.session_ids):
            grammar = self._grammars.get(session_id)
            if grammar is None:
                continue
            if session_id not in self._known:
                self._known[session_id] = self._made(session_id, grammar, judged, i)
            found[i] = self._known[session_id]
        return found

    def _made(self, session_id: int, grammar: SessionGrammar, judged: StepBatch, place: int) -> Int32Array:
        tree = judged[place].tree if judged.num_nodes[place] else None
        masks = np.empty((1 + (0 if tree is None else tree.num_nodes), grammar.num_words), np.int32)
        if tree is None:
            grammar.fill((), (), masks)
        else:
            grammar.fill(tree.token_ids.tolist(), tree.parents.tolist(), masks)
        if reason := grammar.reason():
            self._reasons[session_id] = reason
        return masks

    def reason(self, session_id: int) -> str:
        """See `TokenMasks`."""
        return self._reasons.get(session_id, "")
