"""Passes of a block drafter whose arguments are integers on its device: features of texts, and blocks behind them.

This module neither waits for a device nor reads its values. So all of it may be recorded.
"""

from __future__ import annotations

import torch

from specq.drafting.block.network import BlockNetwork
from specq.drafting.head_layers import Attend, attend_to
from specq.drafting.trees.cache import StateCache

ALIGNED = 8  # keys of a block are padded to a multiple of this, for kernels that need such lengths


class BlockPasses:
    """Passes of one drafter over one cache, which has the keys and values of all layers beside each other."""

    def __init__(self, network: BlockNetwork, cache: StateCache) -> None:
        self.network, self.cache = network, cache
        self._num_tokens = len(network.get_buffer("embedding"))

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
        anchors, positions, lengths, places = texts.long()
        x = network.blocks(anchors.clamp(0, self._num_tokens - 1))  # a block behind an unknown token is useless
        at = torch.arange(room + -(-size // ALIGNED) * ALIGNED, device=texts.device)
        rotations = network.rotations(positions[:, None] + at[:size], x.dtype)
        is_seen = (at < lengths[:, None]) | ((at >= room) & (at < room + size))
        states = network(x, rotations, _Attention(self, places, room, is_seen[:, None].expand(-1, size, -1)))
        return network.logits(states[:, 1:])


class _Attention:
    """The attention of each layer over features and the block's own rows."""

    def __init__(self, passes: BlockPasses, places: torch.Tensor, room: int, is_seen: torch.Tensor) -> None:
        self._num_heads, self._room, self._is_seen = passes.network.shape.num_key_value_heads, room, is_seen
        self._kept = passes.cache.read(places, room, is_seen.shape[2] - room)

    def __call__(self, layer: int) -> Attend:
        own = slice(layer * self._num_heads, (layer + 1) * self._num_heads)

        def attention(queries: torch.Tensor, *new: torch.Tensor) -> torch.Tensor:
            keys, values = (of_all[:, own] for of_all in self._kept)
            for kept, rows in zip((keys, values), new, strict=True):
                kept[:, :, self._room : self._room + rows.shape[1]] = rows.transpose(1, 2)
            return attend_to(queries, keys, values, self._is_seen)

        return attention
