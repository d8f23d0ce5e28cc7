"""Pack documents into rows of equal length, for training without wasted positions."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy as np

from specq.training.dataset import Dataset

SMALLEST_GAP = 8  # a row with less room counts as full


def cut_pieces(documents: Sequence[np.ndarray], row_length: int) -> list[np.ndarray]:
    """Cut documents that are longer than a row into pieces that fit."""
    return [
        document[start : start + row_length]
        for document in documents
        for start in range(0, max(len(document) - 1, 1), row_length)
    ]


def assign_rows(sizes: Sequence[int], row_length: int) -> list[list[int]]:
    """Place each piece in the fullest row that still has room (best fit); return the pieces of each row."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free positions, row), sorted
    for piece, size in enumerate(sizes):
        place = bisect_left(room, (size, -1))
        if place == len(room):
            rows.append([])
            free, row = row_length, len(rows) - 1
        else:
            free, row = room.pop(place)
        rows[row].append(piece)
        if free - size >= SMALLEST_GAP:
            insort(room, (free - size, row))
    return rows


def pack_rows(documents: Sequence[np.ndarray], row_length: int, pad_id: int) -> np.ndarray:
    """Pack documents into rows that each begin with one. Returns [num_rows, row_length] int64."""
    pieces = cut_pieces(documents, row_length)
    assigned = assign_rows([len(piece) for piece in pieces], row_length)
    rows = np.full((len(assigned), row_length), pad_id, dtype=np.int64)
    for row, members in zip(rows, assigned, strict=True):
        joined = np.concatenate([pieces[piece] for piece in members])
        row[: len(joined)] = joined
    return rows


def row_batches(
    dataset: Dataset, *, phase: int, row_length: int, batch_rows: int, pad_id: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield batches of packed rows without end, packed again each epoch. Each is [batch_rows, row_length] int64."""
    left = np.empty((0, row_length), dtype=np.int64)
    while True:
        documents = [dataset.document(index) for index in dataset.sample_epoch(phase, rng)]
        rows = rng.permutation(np.concatenate([left, pack_rows(documents, row_length, pad_id)]))
        if len(rows) < batch_rows:
            rows = np.resize(rows, (batch_rows, row_length))
        full = len(rows) - len(rows) % batch_rows
        yield from np.split(rows[:full], full // batch_rows)
        left = rows[full:]
