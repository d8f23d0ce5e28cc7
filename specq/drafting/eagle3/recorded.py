"""Passes of an EAGLE-3 head in a few fixed shapes, each recorded once and then replayed.

They compute rows of texts, and whole trees. The number of sessions and the context lengths are padded to a power of
two. Padding reads and writes a place of the cache that belongs to no text. A pass takes one copy of integers to the
device, and trees one copy back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from specq.drafting.eagle3.levels import Level
from specq.drafting.eagle3.loading import EagleHead
from specq.drafting.eagle3.passes import Passes
from specq.drafting.trees.cache import NOBODY, StateCache
from specq.drafting.trees.device_trees import PLANES, RecordedPart, Wait, warm_up
from specq.drafting.trees.padding import USUAL_ROOM, batches_of, room_of, usual_batches, usual_rooms
from specq.drafting.trees.texts import FollowedText, WaitingText
from specq.engines.torch import Replays, RowNoise, Sampling, fetch, noise_of, padded_batch
from specq.protocol import Float32Array, Int32Array, IntpArray
from specq.verification import starts_of

ROWS = (4, 8, 16, 128)  # rows of a text in a pass: those of a round, and those of a prompt
MOST_ROWS = 1024  # rows of all texts in a pass
MANY_SESSIONS = 128  # up to this number each session has twice that room from the start
MOST_SESSIONS = 256  # sessions that have room from the start

Noise = tuple[Float32Array, Int32Array]  # see `noise_of`


class RecordedTrees:
    """Passes of one head over one cache."""

    def __init__(self, head: EagleHead, cache: StateCache, replays: Replays) -> None:
        self._cache, self._replays = cache, replays
        self._device = replays.device
        self._num_moves = cache.num_moves
        network = head.network
        self._taps = network.fc.weight.new_zeros(0, network.shape.width)  # hidden states of the rows of a pass
        self._passes = Passes(head, cache)

    @property
    def num_recorded(self) -> int:
        """How many passes were recorded so far."""
        return self._replays.num_recorded

    # --- rows of texts ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def follow(self, texts: Sequence[FollowedText]) -> None:
        """Compute waiting rows of these texts, of each as many as a pass takes."""
        counts = np.array([min(text.num_waiting, ROWS[-1]) for text in texts])
        ends = np.array([text.length for text in texts]) + counts
        is_few = counts <= ROWS[-2]
        for own in (is_few.nonzero()[0], (~is_few).nonzero()[0]):
            most = 0 if not len(own) else MOST_ROWS // _num_rows(counts[own])
            for part in batches_of(ends[own], most):
                which = own[part]
                self._follow([texts[i] for i in which.tolist()], counts[which], room_of(ends[which]))

    def _follow(self, texts: list[FollowedText], counts: IntpArray, room: int) -> None:
        shape = padded_batch(len(texts)), _num_rows(counts), room
        of_texts = np.zeros((5, shape[0]), np.int32)
        of_texts[0] = NOBODY
        of_texts[:, : len(texts)] = (
            [text.place for text in texts],
            [text.first for text in texts],
            [text.length for text in texts],
            counts,
            starts_of(counts),
        )
        parts = [part for text, count in zip(texts, counts.tolist(), strict=True) for part in text.take(count)]
        order, taps = _by_step(parts)
        rows = np.zeros((3, shape[0] * shape[1]), np.int32)
        own = rows[:, : len(order)]
        own[0] = [row for part in parts for row in part.rows]
        own[2] = [token for part in parts for token in part.token_ids]
        if len(taps) > 1:
            own[0], own[1, order] = own[0, order], np.arange(len(order))
        else:
            own[1] = order
        self._compute(shape, taps, rows, of_texts)

    def _compute(
        self, shape: tuple[int, int, int], taps: Sequence[_Taps], rows: Int32Array, of_texts: Int32Array
    ) -> None:
        """Run a pass; shape: the numbers of texts, their rows, and rows of a context.

        rows      i32[3, texts * rows]: rows of the hidden states, one step after the other. For the computed rows, one
                  text after the other: the index of the state before each, and tokens.
        of_texts  i32[5, texts]: places, first positions, lengths so far, numbers of rows to compute, and their starts
                  in `rows`.
        """
        size, num_rows, room = shape
        count = size * num_rows
        self._reserve(room, count)
        ints = self._replays.send(("rows", *shape), np.concatenate([rows, of_texts], None))
        here = self._taps[:count]
        for values, own in taps:
            here[own].copy_(values.index_select(0, ints[own].to(values.device)))

        def work() -> torch.Tensor:
            given, of_texts = ints[count : 3 * count].view(2, count), ints[3 * count :].view(5, size)
            return self._passes.follow(room, here, given, of_texts)

        self._replays.run(("rows", *shape), work)

    # --- trees --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def grow(
        self,
        which: IntpArray,
        places: IntpArray,
        lengths: IntpArray,
        ends: IntpArray,
        sampling: list[Sampling],
        levels: list[Level],
    ) -> list[RecordedPart]:
        """Begin trees of the texts in `which`; nodes as from `specq.drafting.eagle3.rows.grow`."""
        found = list[RecordedPart]()
        for part in batches_of(lengths[which]):
            own = which[part]
            noise = noise_of([sampling[i] for i in own.tolist()], ends[own, None] + np.arange(len(levels)))
            roots = np.stack([places[own], lengths[own], ends[own]]).astype(np.int32)
            found.append(RecordedPart(own, *self._grow(levels, room_of(lengths[own]), roots, noise)))
        return found

    def _grow(self, levels: list[Level], room: int, roots: Int32Array, noise: Noise) -> tuple[Wait, torch.Tensor]:
        """Begin trees; roots i32[3, n]: places, lengths, ends; noise of n, with keys i32[n, levels, 2]."""
        num_trees = roots.shape[1]
        size = padded_batch(num_trees)
        self._reserve(room, 0)
        of_trees, keys = np.zeros((4, size), np.int32), np.zeros((size, len(levels), 2), np.int32)
        of_trees[:3, num_trees:] = [[NOBODY], [1], [1]]
        of_trees[:3, :num_trees], of_trees[3, :num_trees], keys[:num_trees] = roots, noise[0].view(np.int32), noise[1]
        key = ("trees", size, room, id(levels))
        ints = self._replays.send(key, np.concatenate([of_trees, keys], None))

        def work() -> torch.Tensor:
            of_trees = ints[: 4 * size].view(4, size)
            noise = RowNoise(of_trees[3].view(torch.float32), ints[4 * size :].view(size, -1, 2))
            return self._passes.grow(of_trees[:3], noise, room, levels)

        nodes = self._replays.run(key, work)
        wait = fetch(nodes[:PLANES])
        return lambda: wait()[:, :num_trees], nodes[:, :num_trees]

    # --- memory -------------------------------------------------------------------------------------------------------

    def _reserve(self, room: int, num_taps: int) -> None:
        """Make room in the cache and for `num_taps` rows of hidden states.

        If memory moves, everything is recorded again.
        """
        self._cache.reserve(room)
        if num_taps > len(self._taps):
            self._taps = self._taps.new_zeros(num_taps, self._taps.shape[1])
            self._num_moves = -1
        if self._num_moves != self._cache.num_moves:
            self._replays.forget()
            self._num_moves = self._cache.num_moves

    def forget_trees(self) -> None:
        """Forget the kinds of trees."""
        self._replays.forget()

    def warm_up(self, most_sessions: int, kinds: Callable[[int], Sequence[list[Level]]]) -> None:
        """Record passes of usual sizes, the largest first.

        They cover at most `most_sessions` sessions, contexts up to USUAL_ROOM, and the `kinds` of trees for each number
        of sessions. If our own kernels do not run, those of torch are used from then on.
        """
        warm_up(self._passes, self._replays, lambda: self._warm_up(most_sessions, kinds))

    def _warm_up(self, most_sessions: int, kinds: Callable[[int], Sequence[list[Level]]]) -> None:
        room = USUAL_ROOM if most_sessions > MANY_SESSIONS else 2 * USUAL_ROOM
        self._cache.reserve(room, min(most_sessions, MOST_SESSIONS) + 1)
        self._reserve(room, MOST_ROWS)  # first of all, because moved memory invalidates recordings
        taps = [_Taps(self._taps.new_zeros(1, self._taps.shape[1]), slice(0, 1))]
        for size in usual_batches(most_sessions):
            for room in usual_rooms():
                for num_rows in [num_rows for num_rows in ROWS[::-1] if size * num_rows <= MOST_ROWS]:
                    nothing = np.zeros((3, size * num_rows), np.int32), np.zeros((5, size), np.int32)
                    self._compute((size, num_rows, room), taps, *nothing)
                for levels in kinds(size):
                    roots = np.repeat(np.array([[NOBODY], [1], [1]], np.int32), size, 1)
                    noise = np.zeros(size, np.float32), np.zeros((size, len(levels), 2), np.int32)
                    wait, _ = self._grow(levels, room, roots, noise)
                    wait()


class _Taps(NamedTuple):
    """Hidden states [n, width] of a step, and the span of the rows that use them."""

    values: torch.Tensor
    span: slice


def _by_step(parts: Sequence[WaitingText]) -> tuple[IntpArray, list[_Taps]]:
    """Return the order i64[rows] of the rows of parts by the step of their hidden states, and the span of each step."""
    firsts = parts[0].values
    if all(part.values is firsts for part in parts):
        num_rows = sum(len(part.rows) for part in parts)
        return np.arange(num_rows), [_Taps(firsts, slice(0, num_rows))]
    steps = {id(part.values): part.values for part in parts}
    numbers = {step: number for number, step in enumerate(steps)}
    steps_of = np.array([numbers[id(part.values)] for part in parts]).repeat([len(part.rows) for part in parts])
    ends = np.bincount(steps_of).cumsum().tolist()
    spans = map(slice, [0, *ends], ends)
    taps = [_Taps(values, span) for values, span in zip(steps.values(), spans, strict=True)]
    return np.argsort(steps_of, kind="stable"), taps


def _num_rows(counts: IntpArray) -> int:
    """Return how many rows of each text a pass has that computes these counts."""
    most = int(counts.max())
    return next(num_rows for num_rows in ROWS if num_rows >= most)
