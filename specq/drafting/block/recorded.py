"""Passes of a block drafter in a few fixed shapes, each recorded once and then replayed.

The numbers of rows and texts, and the room of their contexts, are padded. Padding reads and writes a place of the cache
that belongs to no text. A pass takes one copy of integers to the device. Trees with given level sizes grow there. For
others the host reads the likeliest tokens of each place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from specq.drafting.interface import Pending
from specq.drafting.trees.cache import NOBODY
from specq.drafting.trees.device_trees import (
    PLANES,
    RecordedPart,
    growing,
    likeliest_on_device,
    possible_sizes,
    warm_up,
)
from specq.drafting.trees.interface import Grown
from specq.drafting.trees.padding import USUAL_ROOM, SizesFor, batches_of, room_of, usual_batches, usual_rooms
from specq.drafting.trees.ranked import CHOICES, Ranked, RankWait
from specq.drafting.trees.texts import NewRows, taps_of
from specq.engines.torch import Replays, RowNoise, Sampling, fetch, noise_of, padded_batch, rank_rows
from specq.protocol import Int32Array, Int64Array, IntpArray, SamplingParams

ROWS = (8, 64, 512)  # of all texts in a pass: those of a round with few or many sessions, and those of a prompt
MOST_SESSIONS = 256  # sessions that have room from the start


class RecordedBlocks:
    """Passes of one drafter. `names`: the token of each column of its logits, None: the column number."""

    def __init__(self, passes: Any, names: Int32Array | None, replays: Replays) -> None:
        self._passes, self._cache, self._replays = passes, passes.cache, replays
        weight = passes.network.fc.weight
        self._names = None if names is None else torch.from_numpy(names).to(weight.device)
        self._num_columns = passes.num_columns
        self._taps = weight.new_zeros(ROWS[-1], passes.network.fc.in_features)  # hidden states of the rows of a pass
        self._num_moves, self._count = self._cache.num_moves, min(CHOICES, self._num_columns)

    @property
    def num_recorded(self) -> int:
        """How many passes were recorded so far."""
        return self._replays.num_recorded

    @torch.no_grad()
    def follow(self, rows: NewRows) -> None:
        """Compute the features of new rows."""
        self._reserve(0)
        values, which = taps_of(rows.parts)
        ints = np.stack([rows.positions, rows.places, rows.slots]).astype(np.int32)
        for first in range(0, len(which), ROWS[-1]):
            own = torch.from_numpy(which[first : first + ROWS[-1]]).to(values.device)
            self._taps[: len(own)].copy_(values.index_select(0, own))
            self._follow(ints[:, first : first + ROWS[-1]])

    def _follow(self, rows: Int32Array) -> None:
        """Run a pass over the first hidden states; rows i32[3, n] as in `BlockPasses.follow`."""
        num_rows = rows.shape[1]
        size = next(size for size in ROWS if size >= num_rows)
        padded = np.zeros((3, size), np.int32)
        padded[1] = NOBODY
        padded[:, :num_rows] = rows
        ints, here = self._replays.send(("rows", size), padded.ravel()).view(3, size), self._taps[:size]
        self._replays.run(("rows", size), lambda: self._passes.follow(here, ints))

    @torch.no_grad()
    def rank(self, texts: Int64Array, sampling: Sequence[Sampling], count: int) -> RankWait:
        """Begin to rank tokens behind texts, i64[4, n] as in `BlockPasses.logits`, whose sampling does not cut."""
        self._count = max(min(count, self._num_columns), self._count)

        def ranked(own: IntpArray) -> RankWait:
            wait = fetch(self._run(texts[:, own], [sampling[i] for i in own.tolist()], ()))

            def collect() -> Ranked:
                tokens, scores = wait()[:, : len(own), :, :count]
                return Ranked(tokens, scores.view(np.float32))

            return collect

        parts = [(own, ranked(own)) for own in batches_of(texts[2])]
        return lambda: Ranked.joined([(own, wait()) for own, wait in parts])

    @torch.no_grad()
    def grow(self, texts: Int64Array, sampling: Sequence[Sampling], level_sizes: Sequence[int]) -> Pending[Grown]:
        """Begin the trees of `likeliest_on_device` behind texts; the other arguments are as for `rank`."""
        sizes = possible_sizes(level_sizes, self._count)

        def part(own: IntpArray) -> RecordedPart:
            nodes = self._run(texts[:, own], [sampling[i] for i in own.tolist()], sizes)
            wait = fetch(nodes[:PLANES])
            return RecordedPart(own, lambda: wait()[:, : len(own)], nodes[:, : len(own)])

        return growing([part(own) for own in batches_of(texts[2])], np.arange(len(sizes)).repeat(sizes))

    def _run(self, texts: Int64Array, sampling: Sequence[Sampling], sizes: tuple[int, ...]) -> torch.Tensor:
        """Begin a pass behind texts. Return the nodes of trees of these level sizes.

        (): return the tokens of each place and the bits of their scores, i32[2, texts, places, count].
        """
        num_texts, num_places, count = texts.shape[1], self._passes.network.shape.num_places, self._count
        size, room = padded_batch(num_texts), room_of(texts[2])
        self._reserve(room)
        of_texts, keys = np.zeros((5, size), np.int32), np.zeros((size, num_places, 2), np.int32)
        of_texts[3], of_texts[2] = NOBODY, 1
        inverse, of_places = noise_of(list(sampling), texts[1][:, None] + 1 + np.arange(num_places))
        of_texts[:4, :num_texts], of_texts[4, :num_texts] = texts, inverse.view(np.int32)
        keys[:num_texts] = of_places
        key = ("blocks", size, room, count, sizes)
        ints = self._replays.send(key, np.concatenate([of_texts, keys, np.array(sizes, np.int32)], None))

        def work() -> torch.Tensor:
            given, end = ints[: 5 * size].view(5, size), 5 * size + keys.size
            noise = RowNoise(
                given[4].view(torch.float32).repeat_interleave(num_places), ints[5 * size : end].view(-1, 2)
            )
            logits = self._passes.logits(given[:4], room)
            ranked = rank_rows(logits.flatten(0, 1), noise, count, self._names)
            tokens, scores = (each.view(size, num_places, count) for each in ranked)
            if sizes:
                return likeliest_on_device(tokens, scores, sizes, ints[end:])
            return torch.stack([tokens, scores.view(torch.int32)])

        return self._replays.run(key, work)

    def _reserve(self, room: int) -> None:
        """Make room in the cache; if its memory moves, everything is recorded again."""
        self._cache.reserve(room)
        if self._num_moves != self._cache.num_moves:
            self._replays.forget()
            self._num_moves = self._cache.num_moves

    @torch.no_grad()
    def warm_up(
        self, most_sessions: int, sizes_for: SizesFor | None = None, warm_rows: Callable[[], None] | None = None
    ) -> None:
        """Record passes of usual sizes, the largest first, for at most `most_sessions` sessions.

        sizes_for: as for `BlockHead.warm_up`.
        warm_rows: records the passes that compute rows of texts. By default these are the passes of `follow`.
        """
        warm_up(self._passes, self._replays, lambda: self._warm_up(most_sessions, sizes_for, warm_rows))

    def _warm_up(self, most_sessions: int, sizes_for: SizesFor | None, warm_rows: Callable[[], None] | None) -> None:
        self._cache.reserve(2 * USUAL_ROOM, min(most_sessions, MOST_SESSIONS) + 1)
        self._reserve(0)  # first of all, because moved memory invalidates recordings
        if warm_rows is not None:
            warm_rows()
            self._replays.is_in_service = False  # blocks are still to be recorded
        else:
            for size in ROWS[::-1]:
                self._follow(np.zeros((3, size), np.int32))
        greedy = Sampling.of(SamplingParams())
        for size in usual_batches(most_sessions):
            for room in usual_rooms():
                texts = np.repeat([[0], [0], [room], [NOBODY]], size, 1)
                for sizes in ((), *(sizes_for(size) if sizes_for is not None else ())):
                    fetch(self._run(texts, [greedy] * size, possible_sizes(sizes, self._count)))()
