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

The judge uses `specq.verification.target_rows` for these values. This module computes the same values for whole rows.

Log-probabilities for users come from the target's plain logits, before temperature, bias, penalties and cuts. OpenAI's
API and vLLM's default report the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specq.protocol import Float32Array, Int32Array, Logprobs, SamplingParams
from specq.verification import noise, torch_rows
from specq.verification.devices import target_rows
from specq.verification.host_kernels import CUT, GREEDY, NearNoise, Rows, by_kind, is_uncut, make_rows, noise_keys
from specq.verification.transfers import Fetched, to_device

NO_NODES = np.zeros(0, np.int64)


def choose_tokens(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Int32Array:
    """Return i32[rows] on the host: each row's own token, the argmax of its perturbed scores.

    Raises EngineError if a row has none, because its logits are NaN, infinite, or all banned.
    """
    return target_rows(logits).own_tokens(make_rows(params, positions))()


def perturbed_scores(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    token_ids: Int32Array | None = None,
) -> torch.Tensor:
    """Return [rows, vocab], whose argmax is each row's token: at T = 0 the logits, else steps 1 to 5 above in float32.

    - `logits`: [rows, vocab] of any float type.
    - `positions`: the position of each row's token in the context.
    - `token_ids`: the token of each column, if the columns are not all tokens in order.
    """
    parts = []
    for kind, which, own in by_kind(make_rows(params, positions)):
        rows = logits if len(which) == len(logits) else logits[torch.from_numpy(which).to(logits.device)]
        parts.append((which, rows if kind == GREEDY else _noisy(rows, own, token_ids, is_cut=kind == CUT)))
    if len(parts) == 1:
        return parts[0][1]
    order = np.argsort(np.concatenate([which for which, _ in parts]))
    return torch.cat([scores.float() for _, scores in parts])[torch.from_numpy(order).to(logits.device)]


def near_scores(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    token_ids: Int32Array | None = None,
) -> torch.Tensor:
    """Return `perturbed_scores` precise enough for guesses.

    On a CPU they are exact to about 1e-5 if all rows are sampled from all tokens.
    """
    is_free = all(own.temperature and is_uncut(own) for own in params)
    if not (is_free and logits.is_cpu and logits.dtype == torch.float32 and NearNoise.is_known()):
        return perturbed_scores(logits, params, positions, token_ids)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    noise_of, found = NearNoise.of(params, positions), torch.empty(logits.shape)
    columns = None if token_ids is None else token_ids.ctypes.data
    of_logits = logits.data_ptr(), logits.stride(0), logits.shape[1]
    noise_of.function(*of_logits, len(params), noise_of.rows.ctypes.data, columns, 0, found.data_ptr())
    return found


def target_probs(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return f64[rows, vocab], each row's distribution after steps 1 to 4. At T = 0 all mass is on the argmax.

    Raises EngineError as `choose_tokens` does.
    """
    probs = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    target = target_rows(logits)
    for kind, which, own in by_kind(make_rows(params, [0] * len(params))):
        at = torch.from_numpy(which).to(logits.device)
        if kind == GREEDY:
            tokens = torch.from_numpy(target.own_tokens(own)()).to(logits.device)
            probs[at, tokens.long()] = 1
            continue
        distributions, _ = target.distributions(own)(NO_NODES, NO_NODES[:, None])
        _, bounds, masses, _ = torch.from_numpy(distributions.found).to(logits.device).T[..., None]
        scaled = torch_rows.scale(logits[at], own)
        probs[at] = torch.where(scaled >= bounds, scaled.double().exp() / masses, 0)
    return probs


def _noisy(logits: torch.Tensor, rows: Rows, token_ids: Int32Array | None, *, is_cut: bool) -> torch.Tensor:
    """Return f32[rows, vocab] of rows with T > 0: scaled logits plus noise, -inf if they are cut."""
    scaled = torch_rows.scale(logits, rows)
    if not is_cut:
        return torch_rows.add_noise(scaled, rows, token_ids)
    own = rows.copy()
    own["logit_row"] = np.arange(len(rows))
    distributions, _ = target_rows(logits).distributions(own)(NO_NODES, NO_NODES[:, None])
    bounds = torch.from_numpy(distributions.found[:, 1:2].astype(np.float32)).to(logits.device)
    scaled.masked_fill_(scaled < bounds, -torch.inf)
    add = _add_to_kept if logits.device.type == "cpu" else torch_rows.add_noise
    return add(scaled, rows, token_ids)


def _add_to_kept(scaled: torch.Tensor, rows: Rows, token_ids: Int32Array | None) -> torch.Tensor:
    """Add noise to the kept tokens, which usually are few."""
    flat = scaled.view(-1).numpy()
    places = np.flatnonzero(flat > -np.inf)
    of_row, columns = np.divmod(places, scaled.shape[1])
    tokens = columns.astype(np.int32) if token_ids is None else token_ids[columns]
    flat[places] += noise.gumbel(noise_keys(rows)[of_row], tokens[:, None])[:, 0]
    return scaled


class BegunLogprobs:
    """Log-probabilities of emitted tokens i64[m] and of the `num_top` likeliest, on their way to the host.

    `logits`: [m, vocab].
    """

    def __init__(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> None:
        logits = logits.float()
        norm = logits.logsumexp(-1, keepdim=True)
        top, top_ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)
        own = logits.gather(1, token_ids[:, None])
        self._values = Fetched(torch.cat((own, top), 1) - norm)
        self._top_ids = Fetched(top_ids.to(torch.int32))

    def wait(self) -> tuple[Float32Array, Int32Array]:
        """Return f32[m, 1 + num_top], of the emitted tokens first, and the ids of the others, i32[m, num_top]."""
        return self._values.wait(), self._top_ids.wait()


def logprobs(logits: torch.Tensor, token_ids: Int32Array, num_top: int) -> Logprobs:
    """Return the log-probabilities of emitted tokens i32[m] and of the num_top likeliest. Logits [m, vocab]."""
    index = to_device(token_ids.astype(np.int64), logits.device)
    values, top_ids = BegunLogprobs(logits, index, num_top).wait()
    return Logprobs(tokens=values[:, 0].copy(), top_ids=top_ids.copy(), top=values[:, 1:].copy())
