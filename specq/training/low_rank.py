"""Low-rank changes of a model's matrices (LoRA, Hu et al. 2021, arXiv 2106.09685), which can be left out, and in the end become part of them.

The model itself stays as it is until `merge`: so the original and the changed model are one in memory, and what a training keeps is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specq.protocol import ConfigError


class LowRank(nn.Module):
    """x -> U D x, for a linear layer from `in` to `out`: D [rank, in] begins at random, U [out, rank] with zeros, so that nothing is changed."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) * linear.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.Module.to(self, linear.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(functional.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))


class Adapters(nn.ModuleList):
    """A low-rank change of each matrix in the layers of a transformers model, whose output matrix and embedding stay as they are."""

    def __init__(self, model: Any, rank: int) -> None:
        linears = [module for module in model.model.layers.modules() if isinstance(module, nn.Linear)]
        least = min(min(linear.weight.shape) for linear in linears)
        if rank > least:
            raise ConfigError(f"--rank is {rank}; the target's smallest matrix is of rank {least} at most")
        changes = [LowRank(linear, rank) for linear in linears]
        super().__init__(changes)
        self._pairs, self._is_on = list(zip(linears, changes, strict=True)), True
        for linear, change in self._pairs:
            linear.register_forward_hook(lambda _module, args, output, own=change: self._changed(own, args[0], output))

    def _changed(self, change: nn.Module, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return output + change(x) if self._is_on else output

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the model be the original one."""
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True

    @torch.no_grad()
    def merge(self) -> None:
        """Make the changes part of the model's own matrices, for good."""
        for linear, change in self._pairs:
            linear.weight.copy_(linear.weight.float() + change.up @ change.down)
        self._is_on = False
