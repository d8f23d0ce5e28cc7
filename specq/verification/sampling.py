"""From logits to the law that a job samples from, and to the token that it draws; shared by judge and drafters.

The order for one row of logits l, all in float32:
1. temperature  s = (l - max l) / T; T = 0 stops here: the plain logits, whose argmax is the token
2. top-k        keep s >= the k-th largest
3. top-p        of what top-k kept, keep s >= the first sorted value at which the mass (of what top-k kept) reaches
                top_p times the whole
4. min-p        keep s >= log(min_p): probability at least min_p of the likeliest token's
5. noise        the kept s get `noise.gumbel` of (seed, position, token id); the rest are -inf. The argmax is an exact
                draw from softmax(s) (Gumbel 1954; Maddison et al. 2014)

Every filter is a lower bound on s (`specq.verification.bounds`), so the kept set does not depend on the order in which
equal logits are sorted: **tokens that tie with the last one kept are kept too**, and an argmax takes the lowest token
id among equals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from specq.errors import EngineError
from specq.params import SamplingParams
from specq.types import Float32Array, Int32Array
from specq.verification import noise
from specq.verification.bounds import lower_bounds

Int64Array = npt.NDArray[np.int64]
Rows = Sequence[SamplingParams]
Sampled = Callable[[torch.Tensor, Rows, Sequence[int]], torch.Tensor]


def perturbed_scores(logits: torch.Tensor, params: Rows, positions: Sequence[int]) -> torch.Tensor:
    """Return [rows, vocab], whose argmax is each row's token: at T = 0 the logits, else steps 1 to 5 above in float32.

    logits [rows, vocab] of any float type; positions: where each row's token would stand in the context.
    """
    return _by_kind(logits, params, positions, lambda greedy: greedy, _noisy, _noisy_cut)


def choose_tokens(logits: torch.Tensor, params: Rows, positions: Sequence[int]) -> Int32Array:
    """Return i32[rows] on the host: each row's own token, the argmax of its perturbed scores.

    Raises EngineError where a row has none, because its logits are NaN, infinite, or all banned.
    """

    def choose_noisy(logits: torch.Tensor, params: Rows, positions: Sequence[int]) -> torch.Tensor:
        return _argmax(_noisy(logits, params, positions))

    def choose_cut(logits: torch.Tensor, params: Rows, positions: Sequence[int]) -> torch.Tensor:
        if logits.device.type != "cpu":
            return _argmax(_noisy_cut(logits, params, positions))
        return torch.from_numpy(_argmax_of_kept(*_kept_scores(logits, params, positions), logits.shape))

    return _by_kind(logits, params, positions, _argmax, choose_noisy, choose_cut).to(torch.int32).cpu().numpy()


def target_probs(logits: torch.Tensor, params: Rows) -> torch.Tensor:
    """Return f64[rows, vocab], each row's law after steps 1 to 4; at T = 0 all mass is on the argmax.

    Raises EngineError as `choose_tokens` does.
    """

    def greedy(logits: torch.Tensor) -> torch.Tensor:
        return torch.zeros(logits.shape, dtype=torch.float64, device=logits.device).scatter_(
            1, _argmax(logits)[:, None], 1.0
        )

    def free(logits: torch.Tensor, params: Rows, _: Sequence[int]) -> torch.Tensor:
        return _softmax(scaled_logits(logits, params))

    def cut(logits: torch.Tensor, params: Rows, _: Sequence[int]) -> torch.Tensor:
        if logits.device.type != "cpu":
            return _softmax(_cut(logits, params))
        return torch.from_numpy(_probs_of_kept(*_kept(logits, params), logits.shape))

    return _by_kind(logits, params, [0] * len(params), greedy, free, cut)


def _argmax(scores: torch.Tensor) -> torch.Tensor:
    tokens = scores.argmax(-1)  # of a NaN, if there is one
    _check_numbers(bool(scores.gather(1, tokens[:, None]).isfinite().all()))
    return tokens


def _softmax(scaled: torch.Tensor) -> torch.Tensor:
    probs = scaled.double().softmax(-1)
    _check_numbers(not bool(probs[:, 0].isnan().any()))  # one NaN makes a whole row NaN
    return probs


def _check_numbers(ok: bool) -> None:
    if not ok:
        raise EngineError("the target's logits are not finite numbers, or every token is banned")


def _by_kind(
    logits: torch.Tensor,
    params: Rows,
    positions: Sequence[int],
    greedy: Callable[[torch.Tensor], torch.Tensor],
    free: Sampled,
    cut: Sampled,
) -> torch.Tensor:
    """Apply one function each to rows with T = 0, rows sampled from all tokens, and rows sampled from a part of them;
    return the results in the rows' order, in float32 or the functions' own type."""
    kinds = [0 if p.temperature == 0 else 2 if p.top_k or p.top_p < 1 or p.min_p else 1 for p in params]
    functions: tuple[Sampled, Sampled, Sampled] = (lambda logits, _params, _positions: greedy(logits), free, cut)
    present = sorted(set(kinds))
    if len(present) == 1:
        return functions[present[0]](logits, params, positions)
    order, parts = [], []
    for kind in present:
        rows = [row for row, k in enumerate(kinds) if k == kind]
        own = logits[torch.as_tensor(rows, device=logits.device)]
        parts.append(functions[kind](own, [params[r] for r in rows], [positions[r] for r in rows]))
        order.extend(rows)
    return torch.cat([p.float() if p.dtype.is_floating_point and p.itemsize < 4 else p for p in parts])[
        np.argsort(order)
    ]


def scaled_logits(logits: torch.Tensor, params: Rows) -> torch.Tensor:
    """Return f32[rows, vocab]: logits relative to the row's largest (so that no temperature overflows), over T > 0."""
    temperature = torch.from_numpy(np.array([[p.temperature] for p in params], np.float32)).to(logits.device)
    logits = logits.float()
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature)


def _cut(logits: torch.Tensor, params: Rows) -> torch.Tensor:
    """Return `scaled_logits`, -inf where top-k, top-p or min-p cuts."""
    scaled = scaled_logits(logits, params)
    bounds = torch.from_numpy(lower_bounds(scaled, params)).to(logits.device)
    return scaled.masked_fill_(scaled < bounds[:, None], -torch.inf)


def _noisy(logits: torch.Tensor, params: Rows, positions: Sequence[int]) -> torch.Tensor:
    return _add_noise(scaled_logits(logits, params), params, positions)


def _noisy_cut(logits: torch.Tensor, params: Rows, positions: Sequence[int]) -> torch.Tensor:
    if logits.device.type != "cpu":
        return _add_noise(_cut(logits, params), params, positions)
    places, kept = _kept_scores(logits, params, positions)
    scores = np.full(logits.shape, -np.inf, np.float32)
    scores.reshape(-1)[places] = kept
    return torch.from_numpy(scores)


def _add_noise(scaled: torch.Tensor, params: Rows, positions: Sequence[int]) -> torch.Tensor:
    keys = noise.row_keys([p.seed for p in params], positions, noise.Domain.GUMBEL)
    token_ids = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
    return scaled.add_(noise.gumbel_torch(torch.from_numpy(keys).to(scaled.device), token_ids))


def _kept(logits: torch.Tensor, params: Rows) -> tuple[Int64Array, Float32Array]:
    """Return the kept tokens' places (row * vocab + token id, ascending) and scaled logits; all else is cheap then."""
    scaled = scaled_logits(logits, params)
    places = np.flatnonzero(scaled.numpy() >= lower_bounds(scaled, params)[:, None])
    return places, scaled.numpy().reshape(-1)[places]


def _kept_scores(logits: torch.Tensor, params: Rows, positions: Sequence[int]) -> tuple[Int64Array, Float32Array]:
    """Return the kept tokens' places and perturbed scores."""
    places, scaled = _kept(logits, params)
    rows, token_ids = np.divmod(places, logits.shape[1])
    keys = noise.row_keys([p.seed for p in params], positions, noise.Domain.GUMBEL)[rows]
    return places, scaled + noise.gumbel(keys, token_ids.astype(np.int32)[:, None])[:, 0]


def _row_spans(places: Int64Array, shape: Sequence[int]) -> tuple[Int64Array, Int64Array]:
    """Return where each row's kept tokens begin, and how many they are; a row of NaN keeps none, and is refused."""
    starts = np.searchsorted(places, np.arange(shape[0]) * shape[1])
    sizes = np.diff(starts, append=len(places))
    _check_numbers(bool(sizes.all()))
    return starts, sizes


def _probs_of_kept(places: Int64Array, scaled: Float32Array, shape: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return f64[rows, vocab]: the softmax of what is kept of each row. Every row keeps some."""
    weights = np.exp(scaled, dtype=np.float64)
    starts, sizes = _row_spans(places, shape)
    weights /= np.repeat(np.add.reduceat(weights, starts), sizes)
    probs = np.zeros(tuple(shape))
    probs.reshape(-1)[places] = weights
    return probs


def _argmax_of_kept(places: Int64Array, scores: Float32Array, shape: Sequence[int]) -> Int64Array:
    """Return i64[rows]: the token of each row's largest score, the lowest id among equals. Every row keeps some."""
    starts, sizes = _row_spans(places, shape)
    best = np.flatnonzero(scores == np.repeat(np.maximum.reduceat(scores, starts), sizes))
    first = best[np.searchsorted(best, starts)]
    return places[first] % shape[1]
