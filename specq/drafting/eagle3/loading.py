"""Load an EAGLE-3 head as a network of torch: for GPUs and for training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specq.drafting.eagle3.arrays import load_arrays
from specq.drafting.eagle3.form import KIND
from specq.drafting.eagle3.network import EagleNetwork
from specq.drafting.head_layers import HEAD_DIMS
from specq.engines.torch import pick_device, runs_triton
from specq.protocol import Int32Array, ModelInfo

if TYPE_CHECKING:
    from specq.drafting.eagle3.fused import FusedEagle


@dataclass(frozen=True, eq=False)
class EagleHead:
    """A head that fits its target.

    layers     the target's layers whose hidden states it reads. See `Tap`.
    token_ids  i32[columns]: the token of each column of its logits, ascending. None: column i is token i.
    """

    network: EagleNetwork
    layers: tuple[int, ...]
    token_ids: Int32Array | None

    @property
    def limit_vocab(self) -> int:
        """Drafted tokens are below this."""
        return self.network.lm_head.out_features if self.token_ids is None else int(self.token_ids.max()) + 1

    @property
    def names(self) -> torch.Tensor | None:
        """The token of each column, on the device."""
        return None if self.token_ids is None else torch.from_numpy(self.token_ids).to(self.network.fc.weight.device)


def load_eagle(heads: str, target: str, info: ModelInfo, device: str = "auto") -> EagleHead:
    """Load a head as a network; arguments and errors as for `specq.drafting.eagle3.arrays.load_arrays`.

    On a CPU the head computes in float32, else in bfloat16.
    """
    arrays, place = load_arrays(heads, target, info), pick_device(device)
    network = EagleNetwork(arrays.shape, torch.from_numpy(arrays.embedding))
    network.load_state_dict({name: torch.from_numpy(values) for name, values in arrays.weights.items()})
    network = network.to(place, torch.float32 if place.type == "cpu" else torch.bfloat16)
    network.requires_grad_(requires_grad=False)
    network.fuse()
    return EagleHead(network.eval(), arrays.layers, arrays.token_ids)


def eagle_kernels(head: EagleHead) -> FusedEagle | None:
    """Return our own kernels for the rows of a head.

    None if its device does not run them, or it has uncommon sizes, or is of another kind.
    """
    network = head.network
    is_fused = network.midlayer.self_attn.fused.weight.numel() > 0 and network.shape.kind == KIND
    if not (runs_triton(network.fc.weight.device) and is_fused and network.shape.head_dim in HEAD_DIMS):
        return None
    from specq.drafting.eagle3.fused import FusedEagle

    return FusedEagle(network, head.names)
