"""What a verifier's colocated drafter needs of whatever drafts: one chain a round for each of many sessions, in arrays.

`specq.drafting.draft_model.chain_model` fulfils it with a draft model; `ProposerChains` with any drafter, for a
draft model that has another vocabulary than the target's. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from specq.drafting.interface import CONTEXT, Children, Expansion, Proposer, expand_chain, level_ids
from specq.protocol import (
    DraftDistribution,
    EngineLostError,
    Float32Array,
    Int32Array,
    IntpArray,
    ModelInfo,
    SamplingParams,
)
from specq.verification import NO_TOKEN


class Chains(NamedTuple):
    """Drafted chains.

    token_ids  i32[sessions, depth, width]: the children at each level, likeliest first or in the order in which they
               were drawn, NO_TOKEN where there is none; those of a level follow the first of the one before
    scores     f32[sessions, depth, width]: log-probabilities, as in `specq.drafting.Children`
    distributions   for each session the draft distributions of each level's children; () where they are point masses
    """

    token_ids: Int32Array
    scores: Float32Array
    distributions: list[Sequence[DraftDistribution]]


class ChainSource(Protocol):
    """What a colocated drafter needs of whatever drafts. Driven by one thread."""

    info: ModelInfo

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """Start a session with this context i32[n]; `owner` as of `Proposer.open`."""
        ...

    def close(self, session_id: int) -> None:
        """Forget a session, between `finish` and `start`; unknown ones are ignored."""
        ...

    def commit(self, session_ids: Sequence[int], num_tokens: IntpArray, token_ids: Int32Array) -> IntpArray:
        """Append committed tokens, so many to each session, at least one; return how many of them each session's last
        chain had foreseen, i64[sessions]. Raises with nothing changed."""
        ...

    def start(self, session_ids: Sequence[int], depth: int, width: int) -> None:
        """Begin to draft a chain for each of these sessions. EngineError, with nothing changed, if KV runs short."""
        ...

    def on_device(self) -> Any:
        """Return the tokens of the chains that were begun, before the host has read them: a tensor i32[depth * sessions
        * width], level by level, on the device of the target, where the draft model drafts there without the host; else
        None. They are tokens below `info.num_tokens`, and every chain is as deep as was asked for."""
        ...

    def finish(self) -> Chains:
        """Return the chains that were begun."""
        ...


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
        """Append committed tokens; see `ChainSource`. What the proposer raises for a session is raised when a chain is
        asked for."""
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
