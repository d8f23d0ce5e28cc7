"""Medusa heads (Cai et al. 2024, arXiv 2401.10774) as a source of drafts: which tokens they think likely after each context.

The hidden states stay where the target computes, and so does all but the likeliest tokens. Tokens are ranked as a draft model's are:
by the scores that the target's own noise perturbs; where the verifier draws otherwise, by what the heads say alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from specq.engines.torch import MedusaHeads, rank_tokens
from specq.proposers.head_source import HiddenRow, Ranked
from specq.proposers.interface import ranking_params
from specq.protocol import Float32Array, Int32Array, SamplingParams


class Medusa:
    """Fulfils `HeadSource`; `limit_vocab`: tokens from this one on are not drafted."""

    def __init__(self, heads: MedusaHeads, limit_vocab: int) -> None:
        self.num_heads = heads.num_heads
        self._heads, self._limit_vocab = heads, limit_vocab

    def start(
        self, states: Sequence[HiddenRow], params: Sequence[SamplingParams], lengths: Sequence[int], count: int
    ) -> Callable[[], Ranked]:
        """Begin to rank; see `HeadSource`."""
        logits = self._heads.logits(_gathered(states))  # [contexts, heads, columns]
        if self._heads.token_ids is None:
            logits = logits[:, :, : self._limit_vocab]
        own = [one for of_context in map(ranking_params, params) for one in (of_context,) * self.num_heads]
        positions = [length + i for length in lengths for i in range(self.num_heads)]

        def finish() -> Ranked:
            found = rank_tokens(
                logits.flatten(0, 1), own, positions, min(count, logits.shape[2]), self._heads.token_ids
            )
            return Ranked(*(_by_context(values, len(states)) for values in found))

        return finish


def _gathered(states: Sequence[HiddenRow]) -> torch.Tensor:
    """Return [n, hidden]: these rows, in memory of their own. As a rule all are of one step."""
    values = states[0].values
    if any(state.values is not values for state in states):
        return torch.stack([state.values[state.row] for state in states])
    rows = torch.tensor([state.row for state in states]).to(values.device, non_blocking=True)
    return torch.index_select(values, 0, rows)


def _by_context(values: Int32Array | Float32Array, num_contexts: int) -> np.ndarray:
    return values.reshape(num_contexts, -1, values.shape[-1])
