"""The target's noise at some positions, as keys from which a device generates it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from specq.protocol import Float32Array, Int32Array, SamplingParams
from specq.verification.host_kernels import is_uncut
from specq.verification.noise import Domain, row_keys
from specq.verification.torch_noise import gumbel_torch


class RowNoise(NamedTuple):
    """The noise of some rows: inverse temperatures f32[rows], 0 at temperature 0, and keys i32[rows, 2]."""

    inverse: torch.Tensor
    keys: torch.Tensor

    def perturbed(self, logits: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        """Return `near_scores` of the logits, f32[rows, columns], for parameters that are all `is_uncut`.

        No data is copied to the host. token_ids, i32[columns]: each column's token, if that is not its number.
        """
        if token_ids is None:
            token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        inverse, logits = self.inverse[:, None], logits.float()
        noisy = logits * inverse + gumbel_torch(self.keys, token_ids)
        return torch.where(inverse > 0, noisy, logits)


class Sampling(NamedTuple):
    """The sampling parameters of a session. `is_free`: the device can rank its tokens without the host."""

    params: SamplingParams
    inverse: float
    is_free: bool

    @classmethod
    def of(cls, params: SamplingParams) -> Sampling:
        """Return the value for these parameters."""
        return cls(params, 1 / params.temperature if params.temperature else 0.0, is_uncut(params))


def noise_of(sampling: list[Sampling], positions: np.ndarray) -> tuple[Float32Array, Int32Array]:
    """Return the fields of `RowNoise` for n sessions and positions i64[n, m] after each.

    Returns f32[n] and i32[n, m, 2].
    """
    inverse = np.array([one.inverse for one in sampling], np.float32)
    if not inverse.any():
        return inverse, np.zeros((*positions.shape, 2), np.int32)
    seeds = np.array([one.params.seed for one in sampling], np.uint64)
    return inverse, row_keys(seeds[:, None], positions, Domain.GUMBEL).reshape(*positions.shape, 2)
