"""Medusa heads on a CPU: matrices of NumPy rank the likely tokens after each context. Otherwise as `drafter`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.drafting.interface import Pending, ranking_params
from specq.drafting.medusa.arrays import HeadArrays
from specq.drafting.medusa.interface import HiddenRow
from specq.drafting.trees.ranked import Ranked
from specq.engines.models import rank_tokens
from specq.protocol import Float32Array, SamplingParams
from specq.verification import on_host


class HostMedusa:
    """Implements `HeadSource`. `limit_vocab`: drafted tokens are below this."""

    def __init__(self, heads: HeadArrays, limit_vocab: int) -> None:
        self.num_heads = len(heads.blocks[0][0])
        self._heads = heads
        self._num_columns = len(heads.token_ids) if heads.token_ids is not None else limit_vocab

    def start(
        self, states: Sequence[HiddenRow], params: Sequence[SamplingParams], lengths: Sequence[int], count: int
    ) -> Pending[Ranked]:
        """Rank at once; see `HeadSource`."""
        rows = np.stack([np.asarray(on_host(state.values)[state.row], np.float32) for state in states])
        logits = self.logits(rows)[..., : self._num_columns]
        own = [one for given in params for one in (ranking_params(given),) * self.num_heads]
        positions = (np.array(lengths)[:, None] + np.arange(self.num_heads)).reshape(-1).tolist()
        most, token_ids = min(count, self._num_columns), self._heads.token_ids
        tokens, scores = rank_tokens(logits.reshape(len(own), -1), own, positions, most, token_ids)
        shape = len(rows), self.num_heads, -1
        ranked = Ranked(tokens.reshape(shape), scores.reshape(shape))
        return Pending(lambda: ranked)

    def warm_up(self, most_contexts: int) -> None:
        """Do nothing: there is nothing to record."""

    def logits(self, states: Float32Array) -> Float32Array:
        """Return logits f32[n, K, columns] from hidden states f32[n, hidden]."""
        x = np.broadcast_to(states, (self.num_heads, *states.shape))
        for weights, biases in self._heads.blocks:
            inner = x @ weights.swapaxes(1, 2) + biases
            x = x + inner / (1.0 + np.exp(-inner))
        output = self._heads.output
        if output.ndim == 3:
            return np.asarray((x @ output.swapaxes(1, 2)).swapaxes(0, 1))
        rows = x.swapaxes(0, 1).reshape(-1, x.shape[-1])  # one product reads the matrix once
        return np.asarray((rows @ output.T).reshape(len(states), self.num_heads, -1))
