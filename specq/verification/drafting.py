"""The drafter's side of `probabilistic`: compact distributions for the wire, and children drawn from exactly these.

The verifier divides a node's integer weight by the sum of its distribution's weights. The text is exact only if the
node was drawn with the same probabilities. So the distribution is first truncated and rounded, then sampled as
integers.

The drafter has its own randomness. It must not know the job's seed, which determines the verifier's draws.

This module also has the random numbers of `probabilistic`, as an argument of the judge. Tests integrate over them. The
job's seed, the position and the token determine each draw. It does not depend on the batch. Acceptance and residual
draws have separate domains.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specq.protocol import Float32Array, Float64Array, Int32Array, Int64Array, SamplingParams, UInt16Array, UInt64Array
from specq.verification import host_kernels, noise
from specq.verification.host_logits import Logits, on_host
from specq.verification.logprobs import likeliest
from specq.verification.noise import Domain
from specq.verification.sampling import target_probs


class HashedDraws:
    """Implements `Draws` with `specq.verification.noise`. Verifiers use it."""

    def accept(self, seeds: UInt64Array, positions: Int64Array, token_ids: Int64Array) -> Float64Array:
        """See `specq.verification.interface.Draws`."""
        return uniforms(seeds, positions, token_ids, Domain.ACCEPT)

    def residual(self, seeds: UInt64Array, positions: Int64Array) -> Float64Array:
        """See `specq.verification.interface.Draws`."""
        return uniforms(seeds, positions, np.zeros_like(positions), Domain.RESIDUAL)


def uniforms(seeds: UInt64Array, positions: Int64Array, token_ids: Int64Array, domain: Domain) -> Float64Array:
    """Return f64[n] in (0, 1): one number for each seed, position and token."""
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

    - `ids` i32[rows, k], `weights` u16[rows, k]: the distributions, as in `specq.protocol.types.DraftDistributions`.
    - `token_ids` i32[rows, c]: -1 if a distribution had no more tokens.
    - `scores` f32[rows, c]: log of the probability that a draw from the target agrees. It assumes that the target has
      the draft's distribution. So it is the sum of squares, known before the token is drawn. A score that depends on
      the token would bias the verifier's choice of nodes.
    """

    ids: Int32Array
    weights: UInt16Array
    token_ids: Int32Array
    scores: Float32Array


def truncated_distributions(
    logits: Logits, params: Sequence[SamplingParams], size: int = 32
) -> tuple[Int32Array, UInt16Array]:
    """Return (ids i32[rows, k], weights u16[rows, k]), k <= size: the likeliest tokens of draft logits [rows, vocab].

    The distribution is that of `sampling.target_probs`. `params` are those of candidates (their own temperature and
    top-p).
    """
    logits, size = on_host(logits), min(size, logits.shape[1])
    probs = target_probs(logits, params)
    if isinstance(logits, np.ndarray):
        ids = likeliest(probs, size)
        top = np.take_along_axis(probs, ids, 1)
    else:
        top, ids = (part.cpu().numpy() for part in probs.topk(size, dim=-1))
    weights = np.rint(top / top[:, :1] * FULL).astype(np.uint16)
    return np.where(weights > 0, ids, -1).astype(np.int32), weights


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
