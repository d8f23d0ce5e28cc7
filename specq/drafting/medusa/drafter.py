"""Medusa heads (Cai et al. 2024, arXiv 2401.10774) as a source of drafts: the likely tokens after each context.

The hidden states stay where the target computes. Only the likeliest tokens go elsewhere. Tokens are ranked like a draft
model's, by scores that the target's own noise perturbs. Where the verifier draws with other random numbers, they are
ranked by the heads' scores.

On a GPU this is recorded for numbers of contexts that are powers of two. The host waits only for the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from specq.drafting.interface import Pending, ranking_params
from specq.drafting.medusa.interface import HiddenRow
from specq.drafting.medusa.network import MedusaHeads
from specq.drafting.trees.ranked import Ranked
from specq.engines.models import rank_tokens
from specq.engines.torch import (
    BATCH_SIZES,
    Replays,
    RowNoise,
    Sampling,
    fetch,
    noise_of,
    padded_batch,
    rank_rows,
)
from specq.protocol import IntpArray, SamplingParams

USUAL_COUNT = 10

Wait = Callable[[], Ranked]


class Medusa:
    """Implements `HeadSource`.

    limit_vocab   drafted tokens are below this.
    replays       records passes. Default: as the device supports.
    """

    def __init__(self, heads: MedusaHeads, limit_vocab: int, replays: Replays | None = None) -> None:
        self.num_heads = heads.num_heads
        self._heads = heads
        self._num_columns = len(heads.token_ids) if heads.token_ids is not None else limit_vocab
        device = heads.output.device
        self._replays = replays or Replays.on(device)
        self._states = heads.output.new_zeros(BATCH_SIZES[-1], heads.output.shape[-1])  # of the recorded contexts
        names = heads.token_ids
        self._names = None if names is None else torch.from_numpy(names).to(device)
        self._count = 0

    def start(
        self, states: Sequence[HiddenRow], params: Sequence[SamplingParams], lengths: Sequence[int], count: int
    ) -> Pending[Ranked]:
        """Begin to rank; see `HeadSource`."""
        count = min(count, self._num_columns)
        sampling = [Sampling.of(ranking_params(own)) for own in params]
        rows, ends = _gathered(states), np.array(lengths)
        if self._replays is None:
            return Pending(self._start(rows, sampling, ends, count))
        is_free = np.array([own.is_free for own in sampling])
        parts: list[tuple[IntpArray, Wait]] = []
        for which, start in ((is_free, self._recorded), (~is_free, self._start)):
            places = which.nonzero()[0]
            for first in range(0, len(places), BATCH_SIZES[-1]):
                own = places[first : first + BATCH_SIZES[-1]]
                mine = rows if len(own) == len(rows) else rows[torch.from_numpy(own).to(rows.device)]
                parts.append((own, start(mine, [sampling[i] for i in own.tolist()], ends[own], count)))
        return Pending(parts[0][1] if len(parts) == 1 else partial(_joined, parts, len(states)))

    def _start(self, rows: torch.Tensor, sampling: list[Sampling], ends: IntpArray, count: int) -> Wait:
        """Begin to rank tokens after states [n, hidden], where the host may take part."""
        logits = self._heads.logits(rows)[:, :, : self._num_columns]  # [contexts, heads, columns]
        own = [one.params for one in sampling for _ in range(self.num_heads)]
        positions = (ends[:, None] + np.arange(self.num_heads)).reshape(-1).tolist()

        def finish() -> Ranked:
            tokens, scores = rank_tokens(logits.flatten(0, 1), own, positions, count, self._heads.token_ids)
            shape = len(rows), self.num_heads, -1
            return Ranked(tokens.reshape(shape), scores.reshape(shape))

        return finish

    @torch.no_grad()
    def _recorded(self, rows: torch.Tensor, sampling: list[Sampling], ends: IntpArray, count: int) -> Wait:
        """Begin to rank tokens after states [n, hidden] on the device."""
        assert self._replays is not None
        num_contexts, num_heads = len(rows), self.num_heads
        size = padded_batch(num_contexts)
        most = self._count = max(count, self._count)  # near the end of a text fewer are requested
        ints = np.zeros((size, 1 + 2 * num_heads), np.int32)
        inverse, keys = noise_of(sampling, ends[:, None] + np.arange(num_heads))
        ints[:num_contexts, 0], ints[:num_contexts, 1:] = inverse.view(np.int32), keys.reshape(num_contexts, -1)
        key = size, most
        block = self._replays.send(key, ints.reshape(-1)).view(size, -1)
        here = self._states[:size]
        here[:num_contexts].copy_(rows)

        def work() -> torch.Tensor:
            noise = RowNoise(
                block[:, 0].repeat(num_heads).view(torch.float32),
                block[:, 1:].reshape(size, num_heads, 2).transpose(0, 1).reshape(-1, 2),
            )
            logits = self._heads.rows(here).flatten(0, 1)[:, : self._num_columns]
            tokens, scores = rank_rows(logits, noise, most, self._names)
            return torch.stack([tokens, scores.view(torch.int32)]).view(2, num_heads, size, most)

        wait = fetch(self._replays.run(key, work))

        def finish() -> Ranked:
            tokens, scores = wait()[:, :, :num_contexts, :count].swapaxes(1, 2)
            return Ranked(tokens, scores.view(np.float32))

        return finish

    def warm_up(self, most_contexts: int) -> None:
        """Record what `most_contexts` contexts usually need, so that no context waits for a recording."""
        if self._replays is None:
            return
        greedy = Sampling.of(SamplingParams())
        for size in [size for size in BATCH_SIZES[::-1] if size < 2 * most_contexts]:
            ends = np.zeros(size, np.intp)
            self._recorded(self._states[:size], [greedy] * size, ends, min(USUAL_COUNT, self._num_columns))()
        self._replays.is_in_service = True


def _gathered(states: Sequence[HiddenRow]) -> torch.Tensor:
    """Return these rows [n, hidden] in new memory. Usually all are of one step."""
    values = states[0].values
    if any(state.values is not values for state in states):
        return torch.stack([torch.as_tensor(state.values[state.row]) for state in states])
    values = torch.as_tensor(values)  # an engine on the host has arrays
    rows = torch.tensor([state.row for state in states]).to(values.device, non_blocking=True)
    return torch.index_select(values, 0, rows)


def _joined(parts: list[tuple[IntpArray, Wait]], num_contexts: int) -> Ranked:
    """Return the result for all contexts from those of parts."""
    ranked = [(which, wait()) for which, wait in parts]
    shape = num_contexts, *ranked[0][1].token_ids.shape[1:]
    found = Ranked(np.empty(shape, np.int32), np.empty(shape, np.float32))
    for which, own in ranked:
        found.token_ids[which], found.scores[which] = own
    return found
