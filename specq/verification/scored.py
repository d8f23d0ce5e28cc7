"""The log-probabilities of scored rows (`ScoredRows`), on their way to the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from specq.protocol import Logprobs, ScoredRows
from specq.verification.sampling import BegunLogprobs
from specq.verification.transfers import to_device


class ScoredLogprobs:
    """Begins to compute them where the logits live. `wait` returns them."""

    def __init__(self, scored: Mapping[int, ScoredRows], logits: torch.Tensor) -> None:
        """Take the scored rows by place, and their plain logits [rows, vocab] in that order."""
        self._parts: dict[int, BegunLogprobs] = {}
        first = 0
        for place, rows in scored.items():
            token_ids = to_device(rows.token_ids.astype(np.int64), logits.device)
            own = logits[first : first + rows.num_rows]
            self._parts[place] = BegunLogprobs(own, token_ids, rows.num_top)
            first += rows.num_rows

    def wait(self) -> dict[int, Logprobs]:
        """Return them by place."""
        found = {}
        for place, begun in self._parts.items():
            values, top_ids = begun.wait()
            found[place] = Logprobs(values[:, 0].copy(), top_ids.copy(), values[:, 1:].copy())
        return found
