"""`shared`: token-level intersection (Timor et al. 2025).

The source is "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies".

The draft model's logits are cut down to the tokens that both vocabularies have, before children are made. So children
are ranked with the noise that the target draws with. A draft distribution covers the target's tokens, and its children
are drawn from it. So the verifier's proof holds unchanged. A node here is a node of the draft model with the same id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from specq.drafting.interface import Children, Drafter, Expansion
from specq.drafting.vocabulary.retelling import RetellingDrafter, RetoldSession
from specq.protocol import ConfigError, DraftDistribution, Int32Array, ModelInfo, SamplingParams
from specq.text import Retold, SharedTokens, Vocabularies
from specq.verification import Logits

if TYPE_CHECKING:
    from specq.drafting.draft_model.children import ChildMaker, ChildRequest


class SharedMaker:
    """Replaces a draft model's `ChildMaker`, and makes children of shared tokens only, with the draft model's ids.

    lead   returns for a session how much further a position is in the target's text.
    """

    def __init__(self, maker: ChildMaker, shared: SharedTokens, lead: Callable[[int], int]) -> None:
        columns = shared.draft_ids.astype(np.intp)
        if maker.token_ids is not None:
            columns = np.searchsorted(maker.token_ids, shared.draft_ids)
            found = maker.token_ids[np.minimum(columns, len(maker.token_ids) - 1)] == shared.draft_ids
            shared = SharedTokens(shared.draft_ids[found], shared.target_ids[found], shared.num_target)
            columns = columns[found]
        self.shared = shared
        self._columns, self._lead = columns, lead
        self._maker = replace(maker, token_ids=shared.target_ids)
        self._past_last = int(shared.target_ids[-1]) + 1 if len(shared) else 0

    def make(self, wanted: Sequence[ChildRequest], logits: Logits, limit_vocab: int) -> list[Children]:
        """Return children as `ChildMaker.make` does; the shared tokens already respect the limit."""
        placed = [replace(one, position=one.position + self._lead(one.session_id)) for one in wanted]
        made = self._maker.make(placed, logits[:, self._columns], self._past_last)
        return [renamed(children, self.shared.target_ids, self.shared.draft_ids) for children in made]


class SharedVocabulary(RetellingDrafter[RetoldSession]):
    """Drafts tokens that both vocabularies have. See the module; the arguments are those of `RetellingDrafter`."""

    def __init__(self, draft: Drafter, vocabularies: Vocabularies, info: ModelInfo) -> None:
        super().__init__(draft, vocabularies, info)
        if draft.maker is None:
            raise ConfigError(
                f"{draft.info.name} returns no logits, which vocabulary = shared needs; use vocabulary = text"
            )
        both = vocabularies.shared.within(min(draft.info.vocab_size, draft.info.num_tokens), info.num_tokens)
        draft.maker = made = SharedMaker(draft.maker, both, lambda session_id: self._sessions[session_id].lead)
        if not len(made.shared):
            raise ConfigError(f"{draft.info.name} cannot draft any token of the target; use vocabulary = text")
        shared = made.shared
        by_draft = np.argsort(shared.draft_ids)
        self._draft_ids, self._target_ids = shared.draft_ids[by_draft], shared.target_ids[by_draft]
        self._to_draft = dict(zip(shared.target_ids.tolist(), shared.draft_ids.tolist(), strict=True))

    def _session(self, token_ids: list[int], params: SamplingParams) -> RetoldSession:
        return RetoldSession(params, Retold(self.vocabularies, token_ids))

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """Let the draft model follow its nodes, and tokenize the rest again."""
        session, tokens, followed = self._sessions[session_id], token_ids.tolist(), len(path)
        if followed:
            drafted = [self._to_draft[token] for token in tokens[:followed]]
            session.text.follow(tokens[:followed], drafted)
            self.draft.commit(session_id, np.array(drafted, np.int32), path)
        if followed < len(tokens):
            self._correct(session_id, tokens[followed:])

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """Let the draft model draft, and translate its tokens to the target's."""
        return [renamed(children, self._draft_ids, self._target_ids) for children in self.draft.expand(requests)]


def renamed(children: Children, ids: Int32Array, others: Int32Array) -> Children:
    """Return children with other ids: others[i] for ids[i]. `ids` are ascending."""

    def rename(token_ids: Int32Array) -> Int32Array:
        if not len(token_ids):
            return token_ids
        places = np.searchsorted(ids, token_ids)
        return np.where(token_ids >= 0, others[np.minimum(places, len(ids) - 1)], -1).astype(np.int32)

    distribution = children.distribution
    if distribution is not None:
        distribution = DraftDistribution(rename(distribution.ids), distribution.weights)
    return replace(children, token_ids=rename(children.token_ids), distribution=distribution)
