"""The network of a block drafter (DFlash, arXiv 2602.06036), for drafting and for training.

The hidden states of several target layers at a position are fused to a feature (`features`). Each layer makes keys and
values of the features (`feature_rows`), beside those of the block's own rows. The first row of a block is its anchor,
the others are masks. The output of a mask at a position predicts the token there.

The caller provides the attention of each layer. In training it covers many blocks of a text, in drafting one of each
text. Parameters have the names of `specq.drafting.block.form`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from specq.drafting.block import form as block_form
from specq.drafting.block.arrays import load_arrays
from specq.drafting.head_layers import Attend, HeadLayer, Positions, Rotations, fuse_maps, hidden_norm, rotate
from specq.engines.torch import pick_device
from specq.protocol import Int32Array, ModelInfo


class _FeatureMaps(NamedTuple):
    """Matrices of all layers that make keys and values of features, one below the other: those of keys come first.

    norms  [layers, 1, dim]: of the keys. None: they are not normed.
    """

    weights: torch.Tensor
    norms: torch.Tensor | None


class BlockNetwork(nn.Module):
    """A block drafter. The target's `embedding` [vocab, hidden] and `output` [columns, hidden] are not trained."""

    def __init__(self, shape: block_form.BlockShape, embedding: torch.Tensor, output: torch.Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.layers) * shape.target_hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm, self.norm = hidden_norm(shape), hidden_norm(shape)
        self.layers = nn.ModuleList(HeadLayer(shape) for _ in range(shape.num_layers))
        self.mask_embedding = nn.Parameter(torch.zeros(shape.hidden_size))
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("output", output, persistent=False)
        self.rotations = Positions(shape)
        self._joined: _FeatureMaps | None = None

    def fuse(self) -> None:
        """Join matrices with the same input, on their current device. Do not move them afterwards."""
        fuse_maps(self)
        self._joined = self._feature_maps()

    def _feature_maps(self) -> _FeatureMaps:
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        weights = [one.k_proj.weight for one in attentions] + [one.v_proj.weight for one in attentions]
        norms = [one.k_norm.weight for one in attentions] if self.shape.has_head_norms else []
        return _FeatureMaps(torch.cat(weights), torch.stack(norms)[:, None] if norms else None)

    def features(self, taps: torch.Tensor) -> torch.Tensor:
        """Return features [..., hidden] from the target's hidden states [..., layers * target's hidden]."""
        if self.shape.norms_states:
            size = self.shape.target_hidden_size
            parts = taps.float().view(*taps.shape[:-1], -1, size)  # squares of large states need the range of float32
            taps = functional.rms_norm(parts, (size,), eps=self.shape.rms_norm_eps).flatten(-2)
        found: torch.Tensor = self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)))
        return found

    def feature_rows(self, features: torch.Tensor, rotations: Rotations) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of features [b, rows, hidden], [b, rows, layers * kv_heads, dim] each."""
        maps, shape = self._joined or self._feature_maps(), self.shape
        found = functional.linear(features, maps.weights)
        size = 2, shape.num_layers, shape.num_key_value_heads, shape.head_dim
        keys, values = found.view(*features.shape[:-1], *size).unbind(-4)
        if maps.norms is not None:
            normed = functional.rms_norm(keys, (shape.head_dim,), eps=shape.rms_norm_eps)
            keys = normed * maps.norms.to(keys.dtype)
        return rotate(keys.flatten(-3, -2), *rotations), values.flatten(-3, -2)

    def blocks(self, anchors: torch.Tensor) -> torch.Tensor:
        """Return the input of blocks, [..., block_size, hidden], given their anchors i64[...]."""
        first = functional.embedding(anchors, self.get_buffer("embedding"))[..., None, :]
        masks = self.mask_embedding.to(first.dtype).expand(*first.shape[:-2], self.shape.num_places, -1)
        return torch.cat([first, masks], -2)

    def forward(self, x: torch.Tensor, rotations: Rotations, attend: Callable[[int], Attend]) -> torch.Tensor:
        """Return the output [b, rows, hidden] of rows of this shape; `attend`: returns the attention of a layer."""
        for number, layer in enumerate(self.layers):
            x = layer(x, rotations, attend(number))
        found: torch.Tensor = self.norm(x)
        return found

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [..., columns], given the output of `forward`."""
        return functional.linear(states, self.get_buffer("output").to(states.dtype))


@dataclass(frozen=True, eq=False)
class BlockDrafter:
    """A block drafter that fits its target.

    token_ids    i32[columns]: the token of each column of its logits, ascending. None: column i is token i.
    limit_vocab  drafted tokens are below this.
    """

    network: BlockNetwork
    token_ids: Int32Array | None
    limit_vocab: int


def load_block(heads: str, target: str, info: ModelInfo, device: str = "auto") -> BlockDrafter:
    """Load a block drafter; arguments and errors as for `specq.drafting.block.arrays.load_arrays`.

    On a CPU it computes in float32, else in bfloat16.
    """
    arrays, place = load_arrays(heads, target, info), pick_device(device)
    network = BlockNetwork(arrays.shape, torch.tensor(arrays.embedding), torch.tensor(arrays.output))
    weights = {name: torch.from_numpy(values) for name, values in arrays.weights.items()}
    network.load_state_dict(weights | {block_form.MASK: torch.from_numpy(arrays.mask)})
    network = network.to(place, torch.float32 if place.type == "cpu" else torch.bfloat16)
    network.requires_grad_(requires_grad=False)
    network.fuse()
    return BlockDrafter(network.eval(), arrays.token_ids, arrays.limit_vocab)
