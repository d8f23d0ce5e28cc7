"""Passes of a block drafter whose arguments are integers on its device: features of texts, and blocks behind them.

This module neither waits for a device nor reads its values. So all of it may be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from specq.drafting.block.network import BlockNetwork
from specq.drafting.head_layers import HEAD_DIMS, Attend, attend_to
from specq.drafting.trees.cache import StateCache
from specq.engines.torch import runs_triton

if TYPE_CHECKING:
    from specq.drafting.block.fused import FusedBlocks

ALIGNED = 8  # keys of a block are padded to a multiple of this, for kernels that need such lengths


class BlockPasses:
    """Passes of one drafter over one cache, which has the keys and values of all layers beside each other."""

    def __init__(self, network: BlockNetwork, cache: StateCache) -> None:
        self.network, self.cache = network, cache
        self.num_columns = len(network.get_buffer("output"))
        self._kernels = block_kernels(network)
        self._num_tokens = len(network.get_buffer("embedding"))

    @property
    def has_kernels(self) -> bool:
        return self._kernels is not None

    def use_torch(self) -> None:
        """Stop using our own kernels, if they turn out not to run."""
        self._kernels = None

    def follow(self, taps: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Store the keys and values of features; return the keys, [rows, layers * kv_heads, dim].

        taps  [rows, width]: the target's hidden states.
        rows  [3, rows]: their positions, and the places and slots where they are kept.
        """
        positions, places, slots = rows.long()
        features = self.network.features(taps)[None]
        rotations = self.network.rotations(positions[None], features.dtype)
        keys, values = self.network.feature_rows(features, rotations)
        self.cache.write(places, slots, keys[0], values[0])
        return keys[0]

    def logits(self, texts: torch.Tensor, room: int) -> torch.Tensor:
        """Return the logits [texts, places, columns] of a block behind each text.

        texts  [4, texts]: the last token, its position, how many features are before it, and the place in the cache.
        room   maximum features of a text.
        """
        network, size = self.network, self.network.shape.block_size
        if self._kernels is not None:
            states = self._kernels.states(self.cache.rows, texts.to(torch.int32), room)
            return network.logits(states[:, 1:])
        anchors, positions, lengths, places = texts.long()
        x = network.blocks(anchors.clamp(0, self._num_tokens - 1))  # a block behind an unknown token is useless
        at = torch.arange(room + -(-size // ALIGNED) * ALIGNED, device=texts.device)
        rotations = network.rotations(positions[:, None] + at[:size], x.dtype)
        seen = {window: self._seen(at, lengths, room, window) for window in {0, *network.shape.windows}}
        is_seen = [seen[window] for window in network.shape.windows or (0,) * network.shape.num_layers]
        states = network(x, rotations, BlockAttention(self.cache, places, room, is_seen))
        return network.logits(states[:, 1:])

    def _seen(self, at: torch.Tensor, lengths: torch.Tensor, room: int, window: int) -> torch.Tensor:
        """Return which keys each row sees, bool[texts, rows, keys]; `window`: maximum features, 0 for all."""
        shape = self.network.shape
        features, rows = (at < lengths[:, None])[:, None], (at >= room) & (at < room + shape.block_size)
        if window:
            features = features & (at >= lengths[:, None] - window)[:, None]
            if shape.is_causal:
                rows = rows & (at - room <= at[: shape.block_size, None])
        return (features | rows).expand(-1, shape.block_size, -1)


class BlockAttention:
    """The attention of each layer over the kept rows of texts, and over a block's own rows behind these.

    room     maximum kept rows of a text.
    is_seen  of each layer: bool[texts, rows, keys].
    """

    def __init__(self, cache: StateCache, places: torch.Tensor, room: int, is_seen: Sequence[torch.Tensor]) -> None:
        self._room, self._is_seen = room, is_seen
        self._kept = cache.read(places, room, is_seen[0].shape[2] - room)

    def __call__(self, layer: int) -> Attend:
        return partial(self.attend, layer=layer)

    def attend(self, queries: torch.Tensor, *new: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """See `Attend`; `layer`: its number."""
        num_heads = new[0].shape[2]
        keys, values = (of_all[:, layer * num_heads : (layer + 1) * num_heads] for of_all in self._kept)
        for kept, rows in zip((keys, values), new, strict=True):
            kept[:, :, self._room : self._room + rows.shape[1]] = rows.transpose(1, 2)
        return attend_to(queries, keys, values, self._is_seen[layer])


def block_kernels(network: BlockNetwork) -> FusedBlocks | None:
    """Return our own kernels for blocks. None if its device does not run them, or its layers are uncommon."""
    shape, is_fused = network.shape, network.layers[0].self_attn.fused.weight.numel() > 0  # type: ignore[union-attr, operator]
    if not (runs_triton(network.fc.weight.device) and is_fused and shape.head_dim in HEAD_DIMS and not shape.windows):
        return None
    from specq.drafting.block.fused import FusedBlocks

    return FusedBlocks(network)
