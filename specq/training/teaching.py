"""A target's output at the positions of a batch whose next token is its own, and the loss of a network that learns it.

The loss of a position is that of `distil.token_losses`: (1 - h) KL(target || draft) + h CE(argmax of target, draft).
Here it is computed as the cross entropy to one distribution, `Taught.wanted`. This is made once a batch, for any number
of steps or places that learn from it.

Rule: this module never makes the host wait for the device. The number of rows has few values, so that memory is reused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from specq.protocol import Int64Array
from specq.training.distil import RolloutBatch, send

BLOCKS = 16  # the rows of a batch are padded to a multiple of this part of its tokens


@dataclass(frozen=True)
class Taught:
    """What to learn at n positions of a batch; padding does not count.

    places   i64[n], each row * length + position. The token after it is the target's own.
    counted  f32[n], 1 or 0.
    wanted   [n, columns], the distribution to learn.
    floor    f32[n], the part of the cross entropy to it that is not a loss.
    """

    places: torch.Tensor
    counted: torch.Tensor
    wanted: torch.Tensor
    floor: torch.Tensor


def fill_up(indices: Int64Array, batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded indices i64[n], and f32[n], 1 for real ones and 0 for padding.

    The padding indices differ, because gradients that meet in one row wait for each other.
    """
    block = -(-batch.on_host.size // BLOCKS)
    num_filled = max(-(-len(indices) // block), 1) * block - len(indices)
    filled = np.stack(
        [np.append(indices, np.arange(num_filled)), np.append(np.ones_like(indices), np.zeros(num_filled, np.int64))]
    )
    places, counted = send(filled, batch.token_ids.device)
    return places, counted.float()


@torch.no_grad()
def teach(hidden: torch.Tensor, output: torch.Tensor, batch: RolloutBatch, hard_weight: float) -> Taught:
    """Return a target's output, given its hidden states [rows, length, hidden] and its head [columns, hidden]."""
    places, counted = fill_up(batch.on_host.ravel().nonzero()[0], batch)
    logits = functional.linear(hidden.flatten(0, 1).index_select(0, places), output)
    logs = functional.log_softmax(logits, -1, dtype=torch.float32)
    wanted = (1 - hard_weight) * logs.exp()
    floor = -(wanted * logs).sum(-1)
    wanted.scatter_add_(1, logits.argmax(-1, keepdim=True), torch.full_like(wanted[:, :1], hard_weight))
    return Taught(places, counted, wanted.to(logits.dtype), floor)


def mean_loss(
    states: torch.Tensor, matrix: torch.Tensor, wanted: torch.Tensor, floor: torch.Tensor, counted: torch.Tensor
) -> torch.Tensor:
    """Return the mean loss of the rows that count.

    The logits are states [n, hidden] times matrix [columns, hidden]. The other arguments are as in `Taught`.
    """
    shares = counted / counted.sum().clamp(min=1)
    losses: torch.Tensor = _CrossEntropy.apply(states, matrix, wanted, shares)  # type: ignore[no-untyped-call]
    return losses.sum() - (shares * floor).sum()


class _CrossEntropy(torch.autograd.Function):
    """f32[n]: weights [n] times the cross entropy of softmax(states @ matrix.T) to `wanted` [n, columns].

    Each row of `wanted` sums to 1. The computation uses the number format of `wanted`, and reads [n, columns] as rarely
    as possible. Only the shares are kept for the gradient. In bfloat16 the loss is right to 0.01, and the gradient is
    as precise as any in bfloat16.
    """

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, matrix: torch.Tensor, wanted: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        rows, columns = states.to(wanted.dtype), matrix.to(wanted.dtype)
        with torch.autocast(states.device.type, enabled=False):  # it would convert the output of softmax to float32
            logits = rows @ columns.T
            shares = logits.softmax(-1)
        logarithm = logits.amax(-1).float() - shares.amax(-1).float().log()  # of the sum of all exponentials
        ctx.save_for_backward(rows, columns, shares, wanted, weights)
        ctx.formats = states.dtype, matrix.dtype
        return weights * (logarithm - (wanted * logits).sum(-1, dtype=torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, columns, shares, wanted, weights = ctx.saved_tensors
        scale = (gradient * weights)[:, None]
        apart = shares.sub_(wanted)  # the shares are not needed any more
        of_states = ((apart @ columns) * scale).to(ctx.formats[0])
        of_matrix = apart.T @ (rows * scale.to(rows.dtype)) if ctx.needs_input_grad[1] else None
        return of_states, None if of_matrix is None else of_matrix.to(ctx.formats[1]), None, None
