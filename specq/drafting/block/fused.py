"""Blocks behind texts on a GPU by our own kernels.

Only modules that import this one need Triton. The arithmetic is that of `BlockPasses.logits` except for rounding. The
features of texts are read in place.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from specq.drafting.block.gpu_kernels import enter_block_kernel
from specq.drafting.block.network import BlockNetwork
from specq.drafting.trees.fused_layers import LayerKernels, Rows


class FusedBlocks:
    """The layers of a block drafter, without sliding windows."""

    def __init__(self, network: BlockNetwork) -> None:
        self._network, self._layers = network, LayerKernels(network.shape)

    def states(self, kept: torch.Tensor, texts: torch.Tensor, room: int) -> torch.Tensor:
        """Return the output of blocks, [texts, block_size, hidden].

        kept   [2, places, layers * kv_heads, room, dim]: keys and values of the features of all texts, by place.
        texts, room  as for `BlockPasses.logits`; texts are i32.
        """
        network, shape, num_texts = self._network, self._network.shape, texts.shape[1]
        size, hidden, heads, dim = shape.block_size, shape.hidden_size, shape.num_key_value_heads, shape.head_dim
        count = num_texts * size
        x = kept.new_empty(count, hidden, dtype=torch.float32)
        normed, contexts = kept.new_empty(count, hidden), texts.new_empty(2, num_texts)
        ints, spans, paths = texts.new_empty(5, count), texts.new_empty(count, 2), texts.new_empty(count, size)
        seen = self._layers.seen(kept, contexts, room, size)
        layers: list[Any] = list(network.layers)
        norms = [layer.input_layernorm.weight for layer in layers] + [network.norm.weight]
        enter_block_kernel[(num_texts, size)](
            texts, network.get_buffer("embedding"), network.mask_embedding, norms[0], x, normed, ints, spans, paths,
            contexts, len(network.get_buffer("embedding")), seen.chunk, 1 + seen.num_parts, shape.rms_norm_eps,
            SIZE=size, SIZE_PAD=triton.next_power_of_2(size), HIDDEN=hidden, HIDDEN_PAD=triton.next_power_of_2(hidden),
            num_warps=8,
        )  # fmt: skip
        at = torch.arange(size, device=texts.device)
        cos, sin = network.rotations(texts[1][:, None] + at, torch.float32)
        rotations = cos.reshape(count, -1), sin.reshape(count, -1)
        keys, values = kept.new_empty(2, heads, count, dim)
        rows = Rows(ints, spans, keys, values, keys.stride(0), paths, size, 0)
        for number, (layer, norm) in enumerate(zip(layers, norms[1:], strict=True)):
            own = seen._replace(kept=kept[:, :, number * heads : (number + 1) * heads])
            normed = self._layers.compute(layer, rows, normed, x, rotations, own, norm)
        return normed.view(num_texts, size, hidden)
