"""Medusa heads as matrices of torch, from hidden states to logits: for GPUs and for training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from specq.checkpoints import draft_form
from specq.drafting.head_files import Tensors
from specq.drafting.medusa.arrays import load_arrays
from specq.engines.torch import pick_device
from specq.protocol import Float32Array, Int32Array, ModelInfo


@dataclass(frozen=True, eq=False)
class MedusaHeads:
    """K heads.

    blocks     (weights [K, hidden, hidden], biases [K, 1, hidden]) of each residual block.
    output     [columns, hidden] for all heads, or [K, columns, hidden].
    token_ids  i32[columns]: the token of each column, ascending. None: column i is token i.
    """

    blocks: list[tuple[torch.Tensor, torch.Tensor]]
    output: torch.Tensor
    token_ids: Int32Array | None

    @property
    def num_heads(self) -> int:
        return len(self.blocks[0][0])

    @torch.no_grad()
    def rows(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [K, n, columns] from hidden states [n, hidden], in the heads' number format."""
        x = states.to(self.output.dtype).expand(self.num_heads, -1, -1)  # [K, n, hidden]
        for weights, biases in self.blocks:
            x = x + functional.silu(torch.baddbmm(biases, x, weights.mT))
        if self.output.ndim == 3:
            return torch.bmm(x, self.output.mT)
        return functional.linear(x.reshape(-1, x.shape[-1]), self.output).view(*x.shape[:2], -1)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits f32[n, K, columns] from hidden states [n, hidden]."""
        return self.rows(states).transpose(0, 1).float()


def load_heads(heads: str, target: str, info: ModelInfo, device: str = "auto") -> MedusaHeads:
    """Load heads as tensors; arguments and errors as for `specq.drafting.medusa.arrays.load_arrays`.

    On a CPU they compute in float32, else in bfloat16.
    """
    arrays, place = load_arrays(heads, target, info), pick_device(device)
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16

    def there(values: Float32Array) -> torch.Tensor:
        return torch.tensor(values, device=place, dtype=dtype)

    blocks = [(there(weights), there(biases)) for weights, biases in arrays.blocks]
    return MedusaHeads(blocks, there(arrays.output), arrays.token_ids)


def tensor_value(name: str, tensors: Tensors) -> torch.Tensor:
    """Return a tensor's values; 8-bit values are rounded to bfloat16, to be the same everywhere."""
    scale = tensors.get(name + draft_form.SCALE)
    return tensors[name] if scale is None else (tensors[name].float() * scale[:, None]).bfloat16()
