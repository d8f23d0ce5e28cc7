"""A source of chains made of any proposer: for a colocated drafter whose draft model has another vocabulary than the target's.

A chain is drafted by one pass a level, when it is begun; nothing of it is left for `finish` to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice

import numpy as np

from specq.drafting.chains import expand_chain, level_ids
from specq.drafting.draft_model.interface import Chains
from specq.drafting.interface import CONTEXT, Children, Expansion, Proposer
from specq.protocol import DraftDistribution, EngineLostError, Int32Array, IntpArray, SamplingParams
from specq.verification import NO_TOKEN


class ProposerChains:
    """Fulfils `ChainSource`."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer, self.info = proposer, proposer.info
        self._drafted: dict[int, list[tuple[int, int]]] = {}  # of each session's last chain: tokens and node ids
        self._errors: dict[int, Exception] = {}  # what was raised for sessions that could not follow their text
        self._node_ids = count()
        self._begun: Chains | None = None

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """Start a session; see `ChainSource`."""
        self.proposer.open(session_id, token_ids, params, owner)

    def close(self, session_id: int) -> None:
        """Forget a session; see `ChainSource`."""
        self._drafted.pop(session_id, None)
        self._errors.pop(session_id, None)
        self.proposer.close(session_id)

    def commit(self, session_ids: Sequence[int], num_tokens: IntpArray, token_ids: Int32Array) -> IntpArray:
        """Append committed tokens; see `ChainSource`. What the proposer raises for a session is raised when a chain is asked for."""
        parts = np.split(token_ids, np.cumsum(num_tokens)[:-1])
        return np.array([self._follow(*one) for one in zip(session_ids, parts, strict=True)], np.intp)

    def _follow(self, session_id: int, token_ids: Int32Array) -> int:
        path: list[int] = []
        for token, (foreseen, node_id) in zip(token_ids.tolist(), self._drafted.pop(session_id, ()), strict=False):
            if token != foreseen:
                break
            path.append(node_id)
        try:
            self.proposer.commit(session_id, token_ids, path)
        except EngineLostError:
            raise
        except Exception as error:  # noqa: BLE001 - the other sessions have been told of theirs
            self._errors[session_id] = error
        return len(path)

    def start(self, session_ids: Sequence[int], depth: int, width: int) -> None:
        """Draft chains; see `ChainSource`."""
        for session_id in session_ids:
            if session_id in self._errors:
                raise self._errors[session_id]
        requests = [
            Expansion(session_id, CONTEXT, tuple(islice(self._node_ids, depth * width))) for session_id in session_ids
        ]
        answers = expand_chain(self.proposer, requests, depth)
        shape = len(requests), depth, width
        token_ids, scores = np.full(shape, NO_TOKEN, np.int32), np.zeros(shape, np.float32)
        distributions: list[Sequence[DraftDistribution]] = []
        for i, (request, levels) in enumerate(zip(requests, answers, strict=True)):
            for level, children in enumerate(levels):
                size = min(width, len(children.token_ids))
                token_ids[i, level, :size], scores[i, level, :size] = children.token_ids[:size], children.scores[:size]
            distributions.append(_distributions(levels))
            firsts = [ids[0] for ids in level_ids(request, depth)]
            self._drafted[request.session_id] = list(zip(token_ids[i, :, 0].tolist(), firsts, strict=True))
        self._begun = Chains(token_ids, scores, distributions)

    def on_device(self) -> None:
        """The host has read them already; see `ChainSource`."""

    def finish(self) -> Chains:
        """Return the chains; see `ChainSource`."""
        assert self._begun is not None
        chains, self._begun = self._begun, None
        return chains


def _distributions(levels: Sequence[Children]) -> tuple[DraftDistribution, ...]:
    """Return what the children of each level were drawn from; () where they are point masses."""
    return tuple(children.distribution for children in levels if children.distribution is not None)
