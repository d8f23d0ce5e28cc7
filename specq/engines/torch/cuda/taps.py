"""Hidden states that the fused decoder keeps, at fixed addresses for CUDA graphs."""

from __future__ import annotations

import numpy as np
import torch

from specq.engines.native.rows import RowTap
from specq.verification.transfers import to_device


class Taps:
    """The hidden states of all rows of a pass after these layers. `layers` as in `specq.protocol.Tap`."""

    def __init__(self, layers: tuple[int, ...], num_rows: int, embedding: torch.Tensor) -> None:
        self.layers = layers
        self._hidden = embedding.shape[1]
        self._values = embedding.new_zeros(num_rows, len(layers) * self._hidden)

    def keep(self, layer: int, x: torch.Tensor, delta: torch.Tensor | None = None) -> None:
        """Keep x + delta [rows, hidden] of this layer, if it is requested."""
        for column, wanted in enumerate(self.layers):
            if wanted == layer:
                out = self._values[: len(x), column * self._hidden : (column + 1) * self._hidden]
                out.copy_(x) if delta is None else torch.add(x, delta, out=out)

    def pick(self, tap: RowTap) -> torch.Tensor:
        """Return a copy of the requested rows, [n, layers * hidden], without waiting for the device."""
        return self._values.index_select(0, to_device(tap.rows.astype(np.int64), self._values.device))
