"""What a verifier's colocated drafter needs of whatever drafts: one chain a round for each of many sessions, in arrays.

`specq.drafting.draft_model.chain_model` fulfils it with a draft model; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from specq.protocol import DraftDistribution, Float32Array, Int32Array, IntpArray, ModelInfo, SamplingParams


class Chains(NamedTuple):
    """Drafted chains.

    token_ids  i32[sessions, depth, width]: the children at each level, likeliest first or in the order in which they were
               drawn, NO_TOKEN where there is none; those of a level follow the first of the one before
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
        """Append committed tokens, so many to each session, at least one; return how many of them each session's last chain had
        foreseen, i64[sessions]. Raises with nothing changed."""
        ...

    def start(self, session_ids: Sequence[int], depth: int, width: int) -> None:
        """Begin to draft a chain for each of these sessions. EngineError, with nothing changed, if KV runs short."""
        ...

    def on_device(self) -> Any:
        """Return the tokens of the chains that were begun, before the host has read them: a tensor i32[depth * sessions * width], level by
        level, on the device of the target, where the draft model drafts there without the host; else None. They are tokens below
        `info.num_tokens`, and every chain is as deep as was asked for."""
        ...

    def finish(self) -> Chains:
        """Return the chains that were begun."""
        ...
