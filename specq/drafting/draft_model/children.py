"""From draft logits to children.

Children are the likeliest by the target's perturbed scores, or drawn tokens with their distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specq.drafting.interface import Children, draws_children
from specq.engines.models import rank_tokens
from specq.protocol import DraftDistribution, Float32Array, Int32Array, SamplingParams
from specq.verification import Logits
from specq.verification.drafting import draw_children, truncated_distributions


@dataclass(frozen=True, slots=True)
class ChildRequest:
    """A request to one row of logits: `count` children for a position of a session."""

    params: SamplingParams
    position: int
    count: int
    session_id: int = -1


@dataclass(frozen=True, slots=True)
class ChildMaker:
    """Makes children.

    distribution_size   maximum tokens of a draft distribution that is sent.
    rng                 draws from the distributions. It must be the drafter's own generator, because the job's seed
                        reveals what the verifier will draw.
    token_ids           i32[columns]: the token of each column of the logits, ascending. None: column i is token i.
    """

    distribution_size: int
    rng: np.random.Generator
    token_ids: Int32Array | None = None

    def make(self, wanted: Sequence[ChildRequest], logits: Logits, limit_vocab: int) -> list[Children]:
        """Return the children of each row of logits [rows, columns], with tokens below limit_vocab.

        Some rows may have more children than requested.
        """
        ids = self.token_ids
        logits = logits[:, : limit_vocab if ids is None else int(np.searchsorted(ids, limit_vocab))]
        drawn = [i for i, of_row in enumerate(wanted) if draws_children(of_row.params)]
        ranked = [i for i in range(len(wanted)) if i not in set(drawn)]
        found: dict[int, Children] = {}
        for make, chosen in ((self._rank, ranked), (self._draw, drawn)):
            if chosen:
                rows = logits if len(chosen) == len(logits) else logits[chosen]
                own = [wanted[i] for i in chosen]
                most = min(max(of_row.count for of_row in own), logits.shape[1])
                found.update(zip(chosen, make(own, rows, most), strict=True))
        return [found[i] for i in range(len(wanted))]

    def _draw(self, wanted: Sequence[ChildRequest], logits: Logits, most: int) -> list[Children]:
        """Return tokens drawn without replacement, with the distributions that they were drawn from."""
        params = [of_row.params for of_row in wanted]
        ids, weights = truncated_distributions(logits, params, self.distribution_size)
        if self.token_ids is not None:
            ids = np.where(ids >= 0, self.token_ids[ids], -1)
        drawn = draw_children(ids, weights, most, self.rng)
        counts = (drawn.token_ids >= 0).sum(1).tolist()
        return [
            Children(
                drawn.token_ids[row, :count],
                drawn.scores[row, :count],
                DraftDistribution(drawn.ids[row], drawn.weights[row]),
            )
            for row, count in enumerate(counts)
        ]

    def _rank(self, wanted: Sequence[ChildRequest], logits: Logits, most: int) -> list[Children]:
        """Return the tokens with the highest perturbed scores."""
        params, positions = [of_row.params for of_row in wanted], [of_row.position for of_row in wanted]
        token_ids = None if self.token_ids is None else self.token_ids[: logits.shape[1]]
        tokens, log_probs = rank_tokens(logits, params, positions, most, token_ids)
        counts = np.isfinite(log_probs).sum(-1).tolist()  # tokens that the sampler excludes are not children
        return [Children(tokens[row, :count], log_probs[row, :count]) for row, count in enumerate(counts)]


def mask_row(logits: Float32Array, words: Int32Array | None, token_ids: Int32Array | None) -> bool:
    """Set the logits f32[columns] of tokens that a mask i32[words] forbids to -inf; return whether it allows any.

    If it allows none, the logits stay as they are. token_ids: as in `ChildMaker`.
    """
    if words is None or not words.any():
        return False
    is_allowed = np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_)
    allowed = is_allowed[: len(logits)] if token_ids is None else is_allowed[token_ids[token_ids < len(is_allowed)]]
    if not allowed.any():
        return False
    logits[: len(allowed)][~allowed] = -np.inf
    logits[len(allowed) :] = -np.inf
    return True
