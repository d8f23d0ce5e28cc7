"""Cosines and sines of rotary positions, the same on every machine.

Rule: an angle is position x frequency, in float64. Its cosine comes from additions, multiplications and rounding alone,
which have one correct result. Cosines of a library differ between processors. Frequencies are rounded to float32, so
that the last bits of a power do not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from specq.protocol import Float32Array, Float64Array

_HALF_PI_HIGH, _HALF_PI_LOW = 1.57079632673412561417, 6.07710050650619224932e-11  # 33 bits, and the rest
_SINE: tuple[float, ...] = (1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06)
_SINE += (-1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01)
_COSINE: tuple[float, ...] = (-1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07)
_COSINE += (2.48015872894767294178e-05, -1.38888888888741095749e-03, 4.16666666666666019037e-02)
_AT_ONCE = 4096  # positions


def frequencies(rope: Mapping[str, Any], head_dim: int, factors: Float32Array | None) -> tuple[Float64Array, float]:
    """Return f64[head_dim / 2] and the factor of cosines and sines, for `rope_parameters` of a `config.json`.

    `factors` divide the frequencies, f32[head_dim / 2].
    """
    exponents = [2 * i / head_dim for i in range(head_dim // 2)]
    plain = np.array([float(rope["rope_theta"]) ** -exponent for exponent in exponents])
    if factors is not None:
        plain = plain / factors.astype(np.float64)
    scaled, factor = plain, 1.0
    if rope["rope_type"] == "linear":
        scaled = plain / rope["factor"]
    if rope["rope_type"] == "yarn":
        scaled, factor = _yarn(rope, head_dim, plain)
    return scaled.astype(np.float32).astype(np.float64), factor


def _yarn(rope: Mapping[str, Any], head_dim: int, plain: Float64Array) -> tuple[Float64Array, float]:
    """YaRN (arXiv:2309.00071, section 3.2 and 3.4) with its usual constants: beta 32 and 1."""
    theta, factor = float(rope["rope_theta"]), float(rope["factor"])
    length = rope["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return plain / factor * ramp + plain * (1 - ramp), 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_tables(of: Float64Array, factor: float, num_positions: int) -> tuple[Float32Array, Float32Array]:
    """Return cosines and sines, f32[num_positions, head_dim / 2], times `factor`."""
    cosines, sines = (np.empty((num_positions, len(of)), np.float32) for _ in range(2))
    for start in range(0, num_positions, _AT_ONCE):
        end = min(start + _AT_ONCE, num_positions)
        cosine, sine = _cosine_and_sine(np.arange(start, end, dtype=np.float64)[:, None] * of)
        cosines[start:end], sines[start:end] = cosine * factor, sine * factor
    return cosines, sines


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
