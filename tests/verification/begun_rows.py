"""Asynchronous judging as on a GPU, without one: all that is known before the host asks is chosen at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from specq.verification import begun
from specq.verification.host_kernels import Rows
from specq.verification.judgements import Judgements
from specq.verification.torch_rows import TorchRows


class BegunRows(TorchRows):
    """Rows on a CPU that give their own tokens as `CudaRows` does: i32[3, rows], the bits of the largest logit, or of
    any number at T > 0, NaN where a row has none, and its token twice."""

    def __init__(self, logits: Any) -> None:
        super().__init__(torch.as_tensor(logits))

    def begin_own_tokens(self, rows: Rows) -> torch.Tensor:
        highest = self.logits.float().amax(1)
        is_bad = ~highest.isfinite()
        known = TorchRows(self.logits.masked_fill(is_bad[:, None], 0))
        tokens = torch.from_numpy(known.own_tokens(rows)())
        values = torch.where(is_bad, torch.nan, torch.ones_like(highest)).view(torch.int32)
        return torch.stack((values, tokens, tokens))


@contextmanager
def begun_rows() -> Iterator[None]:
    """Let `begin` judge so."""
    with mock.patch.object(begun, "target_rows", BegunRows):
        yield


def check_alike(one: Judgements, other: Judgements) -> None:
    """Check that two ways give the same log-probabilities, up to rounding and the order of equals."""
    assert one.logprobs.keys() == other.logprobs.keys()
    for i, mine in one.logprobs.items():
        theirs = other.logprobs[i]
        for mine_part, their_part in ((mine.tokens, theirs.tokens), (mine.top, theirs.top)):
            np.testing.assert_allclose(mine_part, their_part, rtol=1e-5, atol=1e-5)
        gaps = np.diff(np.maximum(mine.top, -1e9), axis=1, prepend=1e10, append=-1e10)
        is_alone = np.isfinite(mine.top) & (gaps[:, :-1] < -1e-4) & (gaps[:, 1:] < -1e-4)
        assert mine.top_ids[is_alone].tolist() == theirs.top_ids[is_alone].tolist()
