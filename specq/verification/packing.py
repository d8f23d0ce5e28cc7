"""Where a step's rows lie in the packed logits, and what each row's token is drawn with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from specq.params import SamplingParams
from specq.types import SessionStep


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """A step and where its rows begin in the packed logits."""

    step: SessionStep
    first_row: int

    def row_positions(self) -> list[int]:
        """Return the position that each row's token takes: base_len for row 0, one more a generation."""
        base_len = self.step.base_len
        return [base_len, *(self.step.tree.depths() + base_len).tolist()]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of some steps, packed anew: logits [rows, vocab]; params and positions [rows]; first_rows [steps]."""

    logits: torch.Tensor
    params: list[SamplingParams]
    positions: list[int]
    first_rows: list[int]


def place(steps: Sequence[SessionStep]) -> list[JudgedStep]:
    """Return the steps that are judged, with their places."""
    placed, first_row = [], 0
    for step in steps:
        if step.judged:
            placed.append(JudgedStep(step, first_row))
            first_row += step.num_judged_rows
    return placed


def pack(steps: Sequence[JudgedStep], logits: torch.Tensor) -> PackedRows:
    """Return all rows of some steps of the packed logits [rows, vocab]."""
    sizes = [judged.step.num_judged_rows for judged in steps]
    rows = [judged.first_row + i for judged, size in zip(steps, sizes, strict=True) for i in range(size)]
    return PackedRows(
        logits=take_rows(logits, rows),
        params=[judged.step.params for judged, size in zip(steps, sizes, strict=True) for _ in range(size)],
        positions=[position for judged in steps for position in judged.row_positions()],
        first_rows=[0, *accumulate(sizes)][:-1],
    )


def take_rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some rows of [rows, vocab], in ascending order; without a copy where that is all of them."""
    if len(rows) == len(logits):
        return logits
    return logits[torch.tensor(rows, dtype=torch.long, device=logits.device)]
