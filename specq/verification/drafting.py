"""The drafter's side of `probabilistic`: distributions that fit on the wire, and children drawn from exactly those.

The verifier divides a node's integer weight by the sum of its distribution's weights; the text is exact only if the
node was drawn with those very probabilities. So the distribution is truncated and rounded first, and sampled from as
integers.

The drafter's randomness is its own: it must not know the job's seed, which keys the verifier's draws.

The random numbers of `probabilistic`, as an argument of the judge: tests integrate over them.

Each draw is keyed by the job's seed, the position and the token that it is about, so that it does not depend on the
batch; accepting and residual draws come from domains of their own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specq.protocol import Float32Array, Float64Array, Int32Array, Int64Array, SamplingParams, UInt16Array, UInt64Array
from specq.verification import host_kernels, noise
from specq.verification.sampling import target_probs
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


FULL = 65535  # the weight of a distribution's likeliest token


@dataclass(frozen=True, slots=True)
class SampledChildren:
    """Children of some contexts, drawn without replacement, in draw order.

    ids i32[rows, k], weights u16[rows, k]: the distributions, as in `specq.protocol.types.DraftDistributions`
    token_ids i32[rows, c]: -1 where a distribution had no more tokens
    scores f32[rows, c]: log of the chance that a draw from the target would agree, if the target's distribution were
        the
                draft's: the sum of squares. It is known before the token is drawn; a score that depends on the token
                would bias what the verifier chooses to judge
    """

    ids: Int32Array
    weights: UInt16Array
    token_ids: Int32Array
    scores: Float32Array


def truncated_distributions(
    logits: torch.Tensor, params: Sequence[SamplingParams], size: int = 32
) -> tuple[Int32Array, UInt16Array]:
    """Return (ids i32[rows, k], weights u16[rows, k]), k <= size: the likeliest tokens of draft logits [rows, vocab].

    The distribution is that of `sampling.target_probs`. `params` are those of candidates (their own temperature and
    top-p).
    """
    top, ids = target_probs(logits, params).topk(min(size, logits.shape[1]), dim=-1)
    weights = (top / top[:, :1] * FULL).round().cpu().numpy().astype(np.uint16)
    return np.where(weights > 0, ids.cpu().numpy(), -1).astype(np.int32), weights


def draw_children(
    ids: Int32Array, weights: UInt16Array, num_children: int, rng: np.random.Generator
) -> SampledChildren:
    """Draw children without replacement from each of some distributions i32[rows, k], u16[rows, k]."""
    left = weights.astype(np.int64)
    token_ids = np.full((len(ids), num_children), -1, np.int32)
    scores = np.zeros((len(ids), num_children), np.float32)
    for rank in range(num_children):
        total = left.sum(1)
        rows = np.flatnonzero(total)
        aims = rng.integers(total[rows])
        column = (left[rows].cumsum(1) <= aims[:, None]).sum(1)
        scores[rows, rank] = np.log(((left[rows] / total[rows, None]) ** 2).sum(1))
        token_ids[rows, rank] = ids[rows, column]
        left[rows, column] = 0
    return SampledChildren(ids, weights, token_ids, scores)
