"""From logits to the distribution that a job samples from, and to its token. Judge and drafters share it.

The order for one row of logits l, all in float32:

1. temperature: s = (l - max l) / T. T = 0 stops here: the argmax of the plain logits is the token.
2. top-k: keep s >= the k-th largest.
3. top-p: of the top-k tokens, keep s >= the first sorted value at which the mass reaches top_p times their mass.
4. min-p: keep s >= log(min_p). The probability is then at least min_p times the likeliest token's.
5. noise: add `noise.gumbel` of (seed, position, token id) to the kept s. The rest are -inf. The argmax is an exact draw
   from softmax(s) (Gumbel 1954; Maddison et al. 2014).

Every filter is a lower bound on s. So the kept set does not depend on the order in which equal logits are sorted.
**Tokens that tie with the last kept token are kept too.** An argmax takes the lowest token id among equals.

The judge uses `specq.verification.target_rows` for these values. This module computes the same values for whole rows:
arrays of arrays, tensors of tensors (`tensors`).

Log-probabilities for users come from the target's plain logits, before temperature, bias, penalties and cuts. OpenAI's
API and vLLM's default report the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specq.protocol import Float32Array, Int32Array, SamplingParams
from specq.verification import noise
from specq.verification.devices import target_rows
from specq.verification.host_kernels import CUT, GREEDY, NearNoise, Rows, by_kind, is_uncut, make_rows, noise_keys
from specq.verification.host_logits import Logits

NO_NODES = np.zeros(0, np.int64)


def choose_tokens(logits: Logits, params: Sequence[SamplingParams], positions: Sequence[int]) -> Int32Array:
    """Return i32[rows] on the host: each row's own token, the argmax of its perturbed scores.

    Raises EngineError if a row has none, because its logits are NaN, infinite, or all banned.
    """
    return target_rows(logits).own_tokens(make_rows(params, positions))()


def perturbed_scores(
    logits: Logits,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    token_ids: Int32Array | None = None,
) -> Any:
    """Return [rows, vocab], whose argmax is each row's token: at T = 0 the logits, else steps 1 to 5 above in float32.

    - `logits`: [rows, vocab] of any float type.
    - `positions`: the position of each row's token in the context.
    - `token_ids`: the token of each column, if the columns are not all tokens in order.
    """
    if not isinstance(logits, np.ndarray):
        from specq.verification import tensors

        return tensors.perturbed_scores(logits, params, positions, token_ids)
    found = np.empty(logits.shape, np.float32)
    for kind, which, own in by_kind(make_rows(params, positions)):
        rows = logits[which]
        found[which] = rows if kind == GREEDY else _noisy(rows, own, token_ids, is_cut=kind == CUT)
    return found


def near_scores(
    logits: Logits,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    token_ids: Int32Array | None = None,
) -> Any:
    """Return `perturbed_scores` precise enough for guesses.

    Those of arrays are exact to about 1e-5 if all rows are sampled from all tokens.
    """
    is_free = all(own.temperature and is_uncut(own) for own in params)
    if not (is_free and isinstance(logits, np.ndarray) and NearNoise.is_known()):
        return perturbed_scores(logits, params, positions, token_ids)
    logits = logits if logits.strides[1] == logits.itemsize else np.ascontiguousarray(logits)
    noise_of, found = NearNoise.of(params, positions), np.empty(logits.shape, np.float32)
    columns = None if token_ids is None else token_ids.ctypes.data
    of_logits = logits.ctypes.data, logits.strides[0] // logits.itemsize, logits.shape[1]
    noise_of.function(*of_logits, len(params), noise_of.rows.ctypes.data, columns, 0, found.ctypes.data)
    return found


def target_probs(logits: Logits, params: Sequence[SamplingParams]) -> Any:
    """Return f64[rows, vocab], each row's distribution after steps 1 to 4. At T = 0 all mass is on the argmax.

    Raises EngineError as `choose_tokens` does.
    """
    if not isinstance(logits, np.ndarray):
        from specq.verification import tensors

        return tensors.target_probs(logits, params)
    probs = np.zeros(logits.shape)
    target = target_rows(logits)
    for kind, which, own in by_kind(make_rows(params, [0] * len(params))):
        if kind == GREEDY:
            probs[which, target.own_tokens(own)()] = 1
            continue
        distributions, _ = target.distributions(own)(NO_NODES, NO_NODES[:, None])
        _, bounds, masses, _ = distributions.found.T[..., None]
        scaled = scale(logits[which], own)
        probs[which] = np.where(scaled >= bounds, np.exp(scaled, dtype=np.float64), 0) / masses
    return probs


def scale(logits: Float32Array, rows: Rows) -> Float32Array:
    """Return f32[rows, vocab]: logits relative to each row's largest (so that no temperature overflows), over T > 0."""
    with np.errstate(all="ignore"):  # at a low temperature all but the largest may become -inf
        found: Float32Array = (logits - logits.max(-1, keepdims=True)) / rows["temperature"][:, None]
    return found


def _noisy(logits: Float32Array, rows: Rows, token_ids: Int32Array | None, *, is_cut: bool) -> Float32Array:
    """Return f32[rows, vocab] of rows with T > 0: scaled logits plus noise, -inf if they are cut."""
    scaled = scale(logits, rows)
    if not is_cut:
        columns = np.arange(scaled.shape[1], dtype=np.int32) if token_ids is None else token_ids
        scaled += noise.gumbel(noise_keys(rows), columns)
        return scaled
    own = rows.copy()
    own["logit_row"] = np.arange(len(rows))
    distributions, _ = target_rows(logits).distributions(own)(NO_NODES, NO_NODES[:, None])
    scaled[scaled < distributions.found[:, 1:2].astype(np.float32)] = -np.inf
    return _add_to_kept(scaled, rows, token_ids)


def _add_to_kept(scaled: Float32Array, rows: Rows, token_ids: Int32Array | None) -> Float32Array:
    """Add noise to the kept tokens, which usually are few."""
    flat = scaled.reshape(-1)
    places = np.flatnonzero(flat > -np.inf)
    of_row, columns = np.divmod(places, scaled.shape[1])
    tokens = columns.astype(np.int32) if token_ids is None else token_ids[columns]
    flat[places] += noise.gumbel(noise_keys(rows)[of_row], tokens[:, None])[:, 0]
    return scaled
