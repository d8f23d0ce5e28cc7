"""What `specq.verification.sampling` computes of whole rows, for tensors on any device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specq.protocol import Int32Array, SamplingParams
from specq.verification import torch_rows
from specq.verification.devices import target_rows
from specq.verification.host_kernels import CUT, GREEDY, Rows, by_kind, make_rows

NO_NODES = np.zeros(0, np.int64)


def perturbed_scores(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    token_ids: Int32Array | None = None,
) -> torch.Tensor:
    """See `specq.verification.sampling`."""
    parts = []
    for kind, which, own in by_kind(make_rows(params, positions)):
        rows = logits if len(which) == len(logits) else logits[torch.from_numpy(which).to(logits.device)]
        parts.append((which, rows if kind == GREEDY else _noisy(rows, own, token_ids, is_cut=kind == CUT)))
    if len(parts) == 1:
        return parts[0][1]
    order = np.argsort(np.concatenate([which for which, _ in parts]))
    return torch.cat([scores.float() for _, scores in parts])[torch.from_numpy(order).to(logits.device)]


def target_probs(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """See `specq.verification.sampling`."""
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
    return torch_rows.add_noise(scaled, rows, token_ids)
