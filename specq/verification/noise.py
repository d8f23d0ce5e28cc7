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

from typing import Any

import numpy as np

from specq.protocol import Float32Array, Float64Array, Int32Array
from specq.verification.seeds import Domain, row_keys

__all__ = [
    "Domain",
    "gumbel",
    "gumbel_of_hash",
    "hash_tokens",
    "mix",
    "row_keys",
    "uniforms",
]


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
