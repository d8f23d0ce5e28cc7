"""Counter-based random numbers: a draw is a pure function of (domain, seed, position, token id).

Rule: the draws use neither a state nor a batch index. So a draw does not depend on its caller, its batch, or the number
of calls. NumPy and torch (`torch_noise`), CPU and CUDA give the same bits. Integers make that exact. Only the two
logarithms of `gumbel` use the library, in float64. A library's last-bit error there survives rounding to float32 about
once in 2**28.

The host mixes a 128-bit counter (domain, seed, position) to two 32-bit keys per row. For each token, a 32-bit mixer
takes one key before and one in the middle. It is the xorshift-multiply scheme of MurmurHash3's finaliser with constants
of C. Wellons' hash prospector. So rows that share one key by chance still differ.

Unsigned hashes are held in int32, since torch lacks unsigned arithmetic. The int32 v stands for the hash h = v + 2**31.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from specq.protocol import Float32Array, Float64Array, Int32Array, UInt64Array

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


def hash_tokens(keys: Int32Array, token_ids: Int32Array) -> Int32Array:
    """Return the hash, as int32, of each token id under keys i32[..., 2]. Token ids broadcast against keys[..., :1]."""
    hashes: Int32Array = mix(token_ids, keys[..., 0:1], keys[..., 1:2])
    return hashes


def uniforms(hashes: Int32Array) -> Float64Array:
    """Return (h + 0.5) * 2**-32 of hashes held in int32: in (0, 1), never 0 or 1."""
    return (hashes.astype(np.float64) + 2147483648.5) * 2.0**-32


def gumbel(keys: Int32Array, token_ids: Int32Array) -> Float32Array:
    """Return float32 Gumbel noise, in [-3.14, 22.88], of each token id under keys[..., 2]."""
    return gumbel_of_hash(hash_tokens(keys, token_ids))


def gumbel_of_hash(hashes: Int32Array) -> Float32Array:
    """Return float32(-log(-log1p(-u))), computed in float64, with u = `uniforms(hashes)`.

    float32 arithmetic differs between libraries in a third of the values. u = h * 2**-32 would give infinities.
    """
    return (-np.log(-np.log1p(-uniforms(hashes)))).astype(np.float32)


def mix(token_ids: Any, key0: Any, key1: Any) -> Any:
    """Hash int32 arrays of NumPy or torch. Products wrap. Multipliers are the int32 forms of odd 32-bit constants."""
    x = token_ids * -1640531535 + key0  # 0x9E3779B1: separates neighbouring ids
    x ^= (x >> 15) & 0x1FFFF  # the mask makes the arithmetic shift a logical one
    x *= 0x7FEB352D
    x += key1
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= -2073254261  # 0x846CA68B
    x ^= (x >> 16) & 0xFFFF
    return x
