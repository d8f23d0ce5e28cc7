"""Seeds and keys of the counter-based draws, without torch. A client derives seeds from seeds, too.

A draw is identified by (domain, seed, position, token id). `row_keys` mixes the first three, `specq.verification.noise`
the token.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from specq.protocol import Int32Array, UInt64Array

_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment (Steele, Lea and Flood 2014)
_MASK64 = 2**64 - 1


class Domain(IntEnum):
    """The purpose of a draw. Draws of different domains are independent."""

    GUMBEL = 1  # the target's own noise under `deterministic`, shared with drafters
    ACCEPT = 2  # whether a sampled draft token is kept
    RESIDUAL = 3  # the token in place of a rejected one, and bonus tokens
    DRAFT = 4  # a drafter's own sampling
    JOB = 5  # seeds made from seeds


def row_keys(seeds: npt.ArrayLike, positions: npt.ArrayLike, domain: Domain) -> Int32Array:
    """Return i32[rows, 2]: the keys of each row's draws, from seeds in [0, 2**63) and positions >= 0."""
    mixed = _splitmix(np.asarray(seeds, np.uint64) ^ np.uint64(domain * _GOLDEN & _MASK64))
    mixed = _splitmix(mixed + np.asarray(positions, np.uint64))
    return mixed.view(np.int32).reshape(-1, 2)


def derived_seed(seed: int, index: int) -> int:
    """Return the seed in [0, 2**63) of the index-th completion of a job."""
    return int(_splitmix(row_keys([seed], [index], Domain.JOB).view(np.uint64).reshape(-1))[0]) >> 1


def _splitmix(x: UInt64Array) -> UInt64Array:
    """Return splitmix64's output function of each element. x is an array, whose sums and products wrap silently."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
