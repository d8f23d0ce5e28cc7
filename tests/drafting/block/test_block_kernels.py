"""Blocks by our own kernels are those of plain torch, except for rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specq.drafting.block.form import BlockShape
from specq.drafting.block.network import BlockNetwork
from specq.drafting.block.passes import BlockPasses, block_kernels
from specq.drafting.trees.cache import StateCache
from specq.testing.checkpoints_block import block_shape_of
from tests.devices import HAS_CUDA, NEEDS_CUDA, NEEDS_INTERPRETER

NEEDS_KERNELS = NEEDS_CUDA if HAS_CUDA else NEEDS_INTERPRETER
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
HALVES = (torch.float16, torch.bfloat16) if HAS_CUDA else (torch.float16,)  # the interpreter has no bfloat16 products
VOCAB, HIDDEN, ROOM = 97, 40, 256
SHAPE = block_shape_of(HIDDEN, VOCAB, (0, 2))


def made(shape: BlockShape, num_texts: int, dtype: torch.dtype = torch.float32) -> BlockPasses:
    """Return passes of a random drafter over random features; places other than the texts' would spoil all."""
    random = torch.Generator().manual_seed(7)
    embedding, output = (torch.randn(VOCAB, HIDDEN, generator=random) for _ in range(2))
    network = BlockNetwork(shape, embedding, output)
    for weight in network.parameters():
        weight.data = torch.randn(weight.shape, generator=random) * 0.3
    network = network.to(DEVICE, dtype).requires_grad_(requires_grad=False)
    network.fuse()
    cache = StateCache(shape.num_layers * shape.num_key_value_heads, shape.head_dim, 0, network.fc.weight)
    cache.reserve(ROOM, num_texts + 2)
    cache.rows.copy_(torch.randn(cache.rows.shape, generator=random))
    return BlockPasses(network, cache)


def both(passes: BlockPasses, lengths: list[int]) -> list[torch.Tensor]:
    """Return the logits of blocks behind texts of these lengths by torch and by kernels."""
    from specq.drafting.block.fused import FusedBlocks

    count = len(lengths)
    tokens = np.arange(count) * 31 - 1  # -1 and what is beyond the vocabulary are clipped
    texts = np.stack([tokens, np.array(lengths) + 5, lengths, np.arange(count, 0, -1)])
    given, found = torch.from_numpy(texts).to(DEVICE), list[torch.Tensor]()
    for kernels in (None, FusedBlocks(passes.network)):
        passes._kernels = kernels
        with torch.no_grad():
            found.append(passes.logits(given, ROOM).float().cpu())
    return found


@pytest.mark.parametrize("mark", [pytest.param("", marks=NEEDS_KERNELS)])
@pytest.mark.parametrize("lengths", [[150], [1, ROOM, 64, 65, 3]], ids=["one text", "several texts"])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"block_size": 2},
        {"block_size": 17, "num_layers": 3},
        {"has_head_norms": False},
        {"num_attention_heads": 6, "num_key_value_heads": 2},
        {"num_attention_heads": 20, "num_key_value_heads": 1},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
        {"intermediate_size": 1030},
    ],
    ids=str,
)
def test_blocks_are_those_of_torch(sizes: dict[str, Any], lengths: list[int], mark: str) -> None:
    plain, ours = both(made(replace(SHAPE, **sizes), len(lengths)), lengths)
    assert plain.std() > 0.5
    torch.testing.assert_close(ours, plain, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [pytest.param(each, marks=NEEDS_KERNELS) for each in HALVES], ids=str)
def test_half_precision_differs_by_its_rounding(dtype: torch.dtype) -> None:
    exact, _ = both(made(SHAPE, 3), [9, 200, 70])
    plain, ours = both(made(SHAPE, 3, dtype), [9, 200, 70])
    most = (plain - exact).abs().mean()
    assert (ours - exact).abs().mean() < 1.5 * most
    assert most > 0


@pytest.mark.parametrize("change", [{"windows": (0, 4)}, {"head_dim": 24}], ids=str)
def test_uncommon_layers_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    """Sliding windows and head sizes that our kernels do not have; and where there are no kernels at all."""
    assert made(SHAPE, 1)._kernels is None or HAS_CUDA
    monkeypatch.setattr("specq.drafting.block.passes.runs_triton", lambda _device: True)
    assert block_kernels(made(replace(SHAPE, **change), 1).network) is None
