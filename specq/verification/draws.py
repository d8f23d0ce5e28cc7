"""The random numbers of `probabilistic`, as an argument of the judge: tests integrate over them.

Each draw is keyed by the job's seed, the position and the token that it is about, so that it does not depend on the
batch; accepting and residual draws come from domains of their own.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from specq.protocol import Float64Array, Int64Array, UInt64Array
from specq.verification import host_kernels, noise
from specq.verification.seeds import Domain


class HashedDraws:
    """Fulfils `Draws` by `specq.verification.noise`; what a verifier uses."""

    def accept(self, seeds: UInt64Array, positions: Int64Array, token_ids: Int64Array) -> Float64Array:
        """See `specq.verification.interface.Draws`."""
        return uniforms(seeds, positions, token_ids, Domain.ACCEPT)

    def residual(self, seeds: UInt64Array, positions: Int64Array) -> Float64Array:
        """See `specq.verification.interface.Draws`."""
        return uniforms(seeds, positions, np.zeros_like(positions), Domain.RESIDUAL)


def uniforms(seeds: UInt64Array, positions: Int64Array, token_ids: Int64Array, domain: Domain) -> Float64Array:
    """Return f64[n] in (0, 1), a number for each seed, position and token."""
    library = host_kernels.kernels()
    if library is None:
        keys = noise.row_keys(seeds, positions, domain)
        return noise.uniforms(noise.hash_tokens(keys, token_ids.astype(np.int32)[:, None]))[:, 0]
    drawn = np.empty(len(seeds))
    arrays: list[npt.NDArray[np.generic]] = [np.ascontiguousarray(a) for a in (seeds, positions, token_ids)]
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*arrays, drawn)]
    library.specq_uniforms(len(seeds), *pointers[:3], int(domain), pointers[3])
    return drawn


HASHED = HashedDraws()
