"""Texts whose start vLLM's drafter does not know, because it did not follow some steps.

Its KV lacks the positions of these steps, and vLLM's attention cannot leave them out. So the drafter is given these
texts as if they began behind the gap, at the block where it follows them again. Rotations are relative, so the same
drafts follow. The rest of that block is unknown, too, which costs at most some of the first drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from specq.protocol import IntpArray
from specq.verification import StepBatch
from specq.verification.transfers import to_device


class KnownTexts:
    """From where on the drafter of `runner` knows the text of each request, and up to where."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._ends: dict[str, int] = {}
        self._firsts: dict[str, int] = {}  # 0 if a request is missing

    def meet(self, new: Iterable[tuple[str, int]], ended: Iterable[str]) -> None:
        """Note new requests, each with the end of its cached prefix, and forget ended ones."""
        self._ends.update(new)
        for name in ended:
            self._ends.pop(name, None)
            self._firsts.pop(name, None)

    def follow(self, names: Sequence[str], batch: StepBatch) -> IntpArray:
        """Note that the drafter follows a step. Return the first known position of each text, i64[n]."""
        ends = (batch.base_lens + batch.num_nodes).tolist()  # at most: nodes may be rejected
        for name, start, end in zip(names, batch.starts.tolist(), ends, strict=True):
            if start > self._ends.get(name, start):
                self._firsts[name] = start // self._block_size * self._block_size
            self._ends[name] = end
        return np.array([self._firsts.get(name, 0) for name in names], np.intp)

    @property
    def _block_size(self) -> int:
        return max(int(getattr(self._runner.drafter, "block_size", 1)), 1)

    @contextmanager
    def shortened(self, common: Any, firsts: IntpArray, sizes: IntpArray) -> Iterator[None]:
        """Let texts begin at these positions, i64[requests], while the drafter runs.

        `common` is vLLM's description of a batch, which is changed. sizes: i64[requests], the rows of each request.
        """
        if not firsts.any():
            yield
            return
        device = self._runner.device
        for name, value in vars(common).items():
            if "seq_lens" in name and isinstance(value, torch.Tensor):
                value[: len(firsts)] -= to_device(firsts, value.device).to(value.dtype)
        table = common.block_table_tensor
        at = np.arange(table.shape[1]) + (firsts // self._block_size)[:, None]
        moved = table[: len(firsts)].gather(1, to_device(at.clip(max=table.shape[1] - 1), device))
        common.block_table_tensor = moved
        before = to_device(firsts.repeat(sizes), device)
        positions = self._runner.positions[: len(before)]
        positions -= before
        try:
            yield
        finally:
            positions += before
