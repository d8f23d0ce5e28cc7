"""The noise of rows that C adds to scores itself, near enough for guesses. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from specq.protocol import SamplingParams
from specq.verification import host_kernels
from specq.verification.row_params import Rows, make_rows


def is_uncut(params: SamplingParams) -> bool:
    """Whether all tokens count: no top-k, top-p or min-p, or temperature 0."""
    return params.temperature == 0 or not (params.top_k or params.top_p < 1 or params.min_p)


class NearNoise(NamedTuple):
    """What C needs to add the noise of rows itself, as `near_scores` does.

    function  specq_near_scores of kernels/guess.h; None where there is no library
    rows      [num_rows] of `row_params.ROW`
    """

    function: Any
    rows: Rows

    @staticmethod
    def is_known() -> bool:
        """Whether there is a function."""
        return host_kernels.near_scores() is not None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], positions: Sequence[int]) -> NearNoise:
        """Return it for rows with these parameters, whose tokens would stand at these positions."""
        return cls(host_kernels.near_scores(), make_rows(params, positions))
