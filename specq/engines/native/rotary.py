"""Rotary positions of Llama-like decoders as tables of cosines and sines, in NumPy.

Angles are float32 products of a position and a frequency, as in transformers. Powers, cosines and sines are computed in
float64 and rounded. So they do not depend on a library's float32 functions.

Kinds are those of `rope_parameters` in `config.json`. To add one, add a line to `KINDS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specq.protocol import ConfigError, Float32Array

MAX_ROPE_POSITIONS = 1 << 20
BETA_FAST, BETA_SLOW = 32, 1  # of YaRN: rotations within the original context that stay, and that are scaled


def rotary_tables(inverse: Float32Array, length: int, scale: float = 1.0) -> tuple[Float32Array, Float32Array]:
    """Return cosines and sines f32[length, n], times `scale`, of the inverse frequencies f32[n]."""
    angles = np.arange(length, dtype=np.float32)[:, None] * inverse
    wide = angles.astype(np.float64)
    cos, sin = (table(wide).astype(np.float32) * np.float32(scale) for table in (np.cos, np.sin))
    return cos, sin


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


KINDS: Mapping[str, Callable[[Mapping[str, Any], int], Float32Array]] = {
    "default": _default,
    "linear": _linear,
    "yarn": _yarn,
}
