"""Muon for the matrices, AdamW for the rest, and the learning-rate schedule.

Muon: Keller Jordan, 2024; the scale that lets it share AdamW's learning rate: Liu et al., arXiv:2502.16982, eq. 4.
"""

from collections import defaultdict

import torch
from torch import nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
RMS_OF_UPDATE = 0.2


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Move all singular values near 1, by five Newton-Schulz steps. [num, rows, columns] -> the same.

    It computes in bfloat16 on a GPU and in float32 on a CPU, where bfloat16 is slow.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    if wide := x.shape[1] > x.shape[2]:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if wide else x


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates; every parameter group holds matrices of one shape."""

    def __init__(self, groups: list[dict], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        """Take groups of {"params": matrices of one shape}."""
        super().__init__(groups, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self) -> None:
        """Update every matrix once, all of a shape together."""
        for group in self.param_groups:
            matrices = group["params"]
            gradients = torch.stack([matrix.grad for matrix in matrices])  # [num, rows, columns]
            average = self.state[matrices[0]].setdefault("momentum", torch.zeros_like(gradients))
            average.lerp_(gradients, 1 - group["momentum"])
            update = orthogonalise(gradients.lerp(average, group["momentum"])).to(gradients.dtype)
            scale = RMS_OF_UPDATE * max(gradients.shape[1:]) ** 0.5
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(matrices, list(update.unbind()), alpha=-group["lr"] * scale)


def build_optimizers(model: nn.Module, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Return Muon over the layers' matrices and AdamW over embeddings (tied to the head) and norms."""
    by_shape, others = defaultdict(list), []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            by_shape[parameter.shape].append(parameter)
        else:
            others.append(parameter)
    muon = Muon([{"params": members} for members in by_shape.values()], lr=lr, weight_decay=weight_decay)
    adamw = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-10)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["peak_lr"] = lr
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
