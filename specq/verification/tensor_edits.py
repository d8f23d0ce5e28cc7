"""Logits on a device with temporary changes, for `specq.verification.processors`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from specq.protocol import IntpArray
from specq.verification.host_logits import Logits, Places
from specq.verification.transfers import to_device


class TensorEdits:
    """The same as `HostEdits` for tensors. If the type or the layout does not fit, a copy is changed."""

    def __init__(self, logits: torch.Tensor) -> None:
        num_rows, vocab = logits.shape
        is_plain = logits.dtype == torch.float32 and logits.stride(-1) == 1 and logits.stride(0) >= vocab
        own = logits if is_plain else logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self.logits: Logits = own
        self._rows_of, self.stride, self.vocab = own, own.stride(0), vocab
        self._flat = own.as_strided(((num_rows - 1) * self.stride + vocab,), (1,))
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._whole: list[tuple[torch.Tensor, torch.Tensor]] = []

    def put(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """See `HostEdits`."""
        return to_device(array, self._rows_of.device)

    @torch.inference_mode()  # the logits may be inference tensors
    def change(self, places: Places, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """See `HostEdits`."""
        if not len(places):
            return
        index = self.put(places)
        before = self._flat.index_select(0, index)
        self._before.append((index, before))
        self._flat.scatter_(0, index, how(before))

    @torch.inference_mode()
    def keep(self, rows: slice, token_ids: IntpArray) -> None:
        """See `HostEdits`."""
        own, kept = self._rows_of[rows], self.put(token_ids)
        before = own.clone()
        self._whole.append((own, before))
        own[:] = -torch.inf
        own.index_copy_(1, kept, before.index_select(1, kept))

    @torch.inference_mode()
    def restore(self) -> None:
        """See `HostEdits`."""
        while self._before:
            self._flat.scatter_(0, *self._before.pop())
        while self._whole:
            own, before = self._whole.pop()
            own.copy_(before)
