"""Muon for the matrices, AdamW for the rest, and the learning-rate schedule.

Muon (Keller Jordan, 2024) is torch's own. With `adjust_lr_fn="match_rms_adamw"` an update of a matrix [rows, columns]
is scaled by 0.2 * sqrt(max(rows, columns)) (Liu et al., arXiv:2502.16982, eq. 4), so that one learning rate fits Muon
and AdamW. torch's default, "original", scales by sqrt(max(1, rows / columns)). For the shapes here this is 3 to 5 times
less, and the rates in `Settings` do not fit it. Momentum is Nesterov's. Weight decay is decoupled and not scaled.

The bundled pair was trained before torch had Muon, with our own version. It has the same formulas and constants, in
float32 on a CPU. torch's version computes in bfloat16 on every device. The losses of 120 steps on a CPU agree to
0.0001.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import isfinite

import torch
from torch import nn

from specq.protocol import ConfigError

MOMENTUM = 0.95
OUTSIDE = ("model.embed_tokens", "lm_head")  # outside of the layers


def build_optimizers(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    *,
    matrix_lr: float = 0.0,
    outside: tuple[str, ...] = OUTSIDE,
) -> list[torch.optim.Optimizer]:
    """Return Muon over the layers' matrices and AdamW over embeddings, head and norms.

    matrix_lr   Muon's own rate.
    outside     prefixes of the names of matrices outside of the layers.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"training needs torch 2.9 or later, which has Muon; this is {torch.__version__}")
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and not name.startswith(outside) else others).append(parameter)
    muon = torch.optim.Muon(
        matrices, lr=matrix_lr or lr, weight_decay=weight_decay, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-10)
    for group in chain(muon.param_groups, adamw.param_groups):
        group["peak_lr"] = group["lr"]
    return [muon, adamw]


def schedule(step: int, num_steps: int, closing_share: float) -> float:
    """Return the share of the peak rate: a short warm-up, a plateau, a linear fall over the closing share."""
    warm_up = min((step + 1) / max(0.02 * num_steps, 1), 1.0)
    return min(warm_up, (num_steps - step) / max(closing_share * num_steps, 1), 1.0)


def apply_gradients(model: nn.Module, optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """Clip the gradients, take one step at `rate` times the peak learning rate and clear them."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["peak_lr"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def check_losses(losses: Sequence[float], step: int) -> None:
    """Raise ConfigError for losses that are not finite: the network is spoilt, and must not be written."""
    if not all(map(isfinite, losses)):
        raise ConfigError(
            f"the loss is {losses} after step {step}: training has diverged; give lower rates (--lr, --matrix-lr)"
        )
