"""Shapes of passes that are recorded: numbers of texts and rooms of contexts are padded to powers of two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from specq.engines.torch import BATCH_SIZES, padded_batch
from specq.protocol import IntpArray

MOST_CONTEXTS = 1 << 16  # rows of all contexts in a pass with several contexts
LEAST_CONTEXT = 256  # rows
USUAL_ROOM = 512  # rows of contexts whose passes are recorded in advance

SizesFor = Callable[[int], Sequence[tuple[int, ...]]]  # from a number of sessions to the level sizes of usual trees


def room_of(lengths: IntpArray) -> int:
    """Return how many rows of contexts of these lengths a pass reads."""
    return max(1 << (int(lengths.max()) - 1).bit_length(), LEAST_CONTEXT)


def usual_rooms() -> Iterator[int]:
    """Yield the rooms of contexts whose passes are recorded in advance, the largest first."""
    room = USUAL_ROOM
    while room >= LEAST_CONTEXT:
        yield room
        room //= 2


def usual_batches(most_texts: int) -> list[int]:
    """Return the numbers of texts whose passes are recorded in advance, the largest first."""
    return [size for size in BATCH_SIZES[::-1] if size < 2 * most_texts]


def batches_of(lengths: IntpArray, most: int = BATCH_SIZES[-1]) -> Iterator[IntpArray]:
    """Yield the indices of texts that run in a pass together, at most `most`.

    Usually these are all texts. Texts with long contexts run apart from the others.
    """
    if 0 < len(lengths) <= most and padded_batch(len(lengths)) * room_of(lengths) <= MOST_CONTEXTS:
        yield np.arange(len(lengths))
        return
    order = np.argsort(lengths, kind="stable")
    while len(order):
        sizes = [size for size in BATCH_SIZES if size <= most and size < 2 * len(order)]
        count = max(size for size in sizes if size == 1 or size * room_of(lengths[order[:size]]) <= MOST_CONTEXTS)
        yield np.sort(order[:count])
        order = order[count:]
