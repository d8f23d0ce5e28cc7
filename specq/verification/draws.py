"""The random numbers of `probabilistic`, as an argument of the judge: tests integrate over them.

Each draw is keyed by the job's seed, the position and the token that it is about, so that it does not depend on the
batch; accepting and residual draws come from domains of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specq.types import Int32Array
from specq.verification import noise

Float64Array = npt.NDArray[np.float64]


class Draws(Protocol):
    """Uniform numbers in (0, 1)."""

    def accept(self, seeds: Sequence[int], positions: Sequence[int], token_ids: Int32Array) -> Float64Array:
        """Return f64[n]: one for each node, whose token i32[n] would take the position."""
        ...

    def residual(self, seeds: Sequence[int], positions: Sequence[int]) -> Float64Array:
        """Return f64[s]: one for each session, whose correction or bonus takes the position."""
        ...


class HashedDraws:
    """Draws by `specq.verification.noise`; what a verifier uses."""

    def accept(self, seeds: Sequence[int], positions: Sequence[int], token_ids: Int32Array) -> Float64Array:
        """See `Draws`."""
        keys = noise.row_keys(seeds, positions, noise.Domain.ACCEPT)
        return noise.uniforms(noise.hash_tokens(keys, token_ids[:, None]))[:, 0]

    def residual(self, seeds: Sequence[int], positions: Sequence[int]) -> Float64Array:
        """See `Draws`."""
        keys = noise.row_keys(seeds, positions, noise.Domain.RESIDUAL)
        return noise.uniforms(noise.hash_tokens(keys, np.zeros((1, 1), np.int32)))[:, 0]


HASHED = HashedDraws()
