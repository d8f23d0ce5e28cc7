"""Rotary positions of Llama-like decoders as tables of cosines and sines, in NumPy.

Angles are float32 products of a position and a frequency, as in transformers. Powers are computed in float64 and
rounded. Cosines and sines come from additions, multiplications and rounding in float64 alone, which have one correct
result: those of a library differ between processors.

Kinds are those of `rope_parameters` in `config.json`. To add one, add a line to `KINDS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specq.protocol import ConfigError, Float32Array, Float64Array

MAX_ROPE_POSITIONS = 1 << 20
BETA_FAST, BETA_SLOW = 32, 1  # of YaRN: rotations within the original context that stay, and that are scaled

_HALF_PI_HIGH, _HALF_PI_LOW = 1.57079632673412561417, 6.07710050650619224932e-11  # 33 bits, and the rest
_SINE: tuple[float, ...] = (1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06)
_SINE += (-1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01)
_COSINE: tuple[float, ...] = (-1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07)
_COSINE += (2.48015872894767294178e-05, -1.38888888888741095749e-03, 4.16666666666666019037e-02)
_AT_ONCE = 4096  # positions


def rotary_tables(inverse: Float32Array, length: int, scale: float = 1.0) -> tuple[Float32Array, Float32Array]:
    """Return cosines and sines f32[length, n], times `scale`, of the inverse frequencies f32[n]."""
    cosines, sines = (np.empty((length, len(inverse)), np.float32) for _ in range(2))
    for start in range(0, length, _AT_ONCE):
        end = min(start + _AT_ONCE, length)
        angles = np.arange(start, end, dtype=np.float32)[:, None] * inverse
        found = _cosine_and_sine(angles.astype(np.float64))
        cosines[start:end], sines[start:end] = (one.astype(np.float32) * np.float32(scale) for one in found)
    return cosines, sines


def rope_tables(
    said: Mapping[str, Any], head_dim: int, factors: Float32Array | None, length: int
) -> tuple[Float32Array, Float32Array]:
    """Return cosines and sines f32[length, head_dim / 2] for `rope_parameters`; `factors` as below.

    At most MAX_ROPE_POSITIONS positions.
    """
    inverse = inverse_frequencies(said, head_dim, factors)
    return rotary_tables(inverse, min(length, MAX_ROPE_POSITIONS), attention_scale(said))


def inverse_frequencies(said: Mapping[str, Any], head_dim: int, factors: Float32Array | None) -> Float32Array:
    """Return f32[head_dim / 2] for `rope_parameters`; `factors` f32[head_dim / 2] divide them."""
    inverse = KINDS[said["rope_type"]](said, head_dim)
    if factors is None:
        return inverse
    if inverse.shape != factors.shape:
        raise ConfigError(f"rope_freqs.weight has {factors.size} values; {inverse.size} are needed")
    return inverse / factors


def attention_scale(said: Mapping[str, Any]) -> float:
    """Return the factor of cosines and sines."""
    return 0.1 * math.log(said["factor"]) + 1.0 if said["rope_type"] == "yarn" and said["factor"] > 1 else 1.0


def _powers(said: Mapping[str, Any], head_dim: int) -> Float32Array:
    exponents = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    return np.power(np.float64(said["rope_theta"]), exponents.astype(np.float64)).astype(np.float32)


def _default(said: Mapping[str, Any], head_dim: int) -> Float32Array:
    return np.float32(1) / _powers(said, head_dim)


def _linear(said: Mapping[str, Any], head_dim: int) -> Float32Array:
    return _default(said, head_dim) / np.float32(said["factor"])


def _yarn(said: Mapping[str, Any], head_dim: int) -> Float32Array:
    """Scale low frequencies and keep high ones (Peng et al. 2023, arXiv 2309.00071)."""
    base, length = said["rope_theta"], said["original_max_position_embeddings"]

    def dim_of(rotations: float) -> float:
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dim_of(BETA_FAST)), 0), min(math.ceil(dim_of(BETA_SLOW)), head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / ((high - low) or 0.001)
    kept = 1 - np.clip(ramp, 0, 1).astype(np.float32)
    powers = _powers(said, head_dim)
    scaled = np.float32(1) / (np.float32(said["factor"]) * powers)
    found: Float32Array = (scaled * (1 - kept) + np.float32(1) / powers * kept).astype(np.float32)
    return found


def _llama3(said: Mapping[str, Any], head_dim: int) -> Float32Array:
    """Scale low frequencies, keep high ones, and blend between, as Llama 3.1 does (Grattafiori et al. 2024)."""
    inverse, factor = _default(said, head_dim), np.float32(said["factor"])
    low, high = said["low_freq_factor"], said["high_freq_factor"]
    rotations = inverse * np.float32(said["original_max_position_embeddings"] / (2 * math.pi))
    kept = np.clip((rotations - np.float32(low)) / np.float32(high - low), 0, 1)
    found: Float32Array = (inverse / factor * (1 - kept) + inverse * kept).astype(np.float32)
    return found


KINDS: Mapping[str, Callable[[Mapping[str, Any], int], Float32Array]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _cosine_and_sine(angles: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Reduce to at most pi / 4, and take fdlibm's polynomials."""
    turns = np.rint(angles * (2 / math.pi))
    x = angles - turns * _HALF_PI_HIGH - turns * _HALF_PI_LOW
    square = x * x
    sine = x + x * square * _polynomial(_SINE, square)
    cosine = 1.0 - 0.5 * square + square * square * _polynomial(_COSINE, square)
    quarter = turns.astype(np.int64) & 3
    is_odd, flips_cosine, flips_sine = quarter % 2 == 1, (quarter == 1) | (quarter == 2), quarter >= 2
    turned = np.where(is_odd, sine, cosine), np.where(is_odd, cosine, sine)
    return np.where(flips_cosine, -turned[0], turned[0]), np.where(flips_sine, -turned[1], turned[1])


def _polynomial(coefficients: tuple[float, ...], x: Float64Array) -> Float64Array:
    found = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        found = found * x + coefficient
    return found
