"""Compiles kernels beforehand in many processes, so that the device's time goes into measuring.

Triton compiles without a device if it is told what for; the results lie in its cache, where the measuring process finds
them. A process makes a decoder of one layer with memory that is never touched, and "launches" its kernels.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from specq.bench.gpu.candidates import Kernels, candidates
from specq.bench.gpu.parts import Found, Task
from specq.bench.report import figure
from specq.models import Shape
from specq.verification.ahead import pretend_device

CAPABILITY = 90
ROWS = (1, 16, 32, 64, 96)


def measure(task: Task) -> Found:
    """Compile what the pair's shapes launch, and what `tiles` tries if that is measured too; return the seconds."""
    shapes = task.pair.shapes
    kernels: list[Kernels] = [(shape, rows, {}) for shape in shapes.values() for rows in ROWS]
    kernels += candidates(shapes) if "tiles" in task.parts else []
    started = time.perf_counter()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(compile_one, kernels):
            pass
    return Found({"all kernels": figure("s", [time.perf_counter() - started])})


def compile_one(kernels: Kernels) -> None:
    """Compile what one shape launches for one padded number of rows."""
    shape, rows, tiles = kernels
    pretend_device(CAPABILITY)
    from specq.engines.torch.fused_layers import Batch
    from specq.engines.torch.fused_tiles import NARROW

    decoder = hollow_decoder(shape)
    if rows in NARROW:
        decoder.tiles[rows] = replace(decoder.tiles[rows], **tiles)
    layout = decoder.layout(rows, rows)
    scratch = decoder.scratch(layout)
    batch = Batch.of(torch.zeros(layout.starts()["lists"] + 1024, dtype=torch.int32), layout)
    torch.mm = lambda *_args, **_options: None  # type: ignore[assignment]
    decoder.run(batch, scratch)
    if rows in NARROW:
        decoder.head(scratch.hidden[:rows])
    decoder.hidden(batch, scratch, 1, scratch.hidden)


def hollow_decoder(shape: Shape) -> Any:
    """Return a decoder of one layer whose weights are memory that nobody touches."""
    from specq.engines.torch.forward import KvStore
    from specq.engines.torch.fused_layers import FusedDecoder
    from specq.engines.torch.fused_weights import DecoderWeights, LayerWeights

    def make(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16)

    hidden, inner, dim = shape.hidden, shape.intermediate, shape.head_dim
    qkv = (shape.heads + 2 * shape.kv_heads) * dim
    layer = LayerWeights(
        make(hidden), make(hidden), make(qkv, hidden), make(qkv) if shape.qkv_bias else None, None, None,
        make(hidden, shape.heads * dim), make(2 * inner, hidden), make(hidden, inner),
    )  # fmt: skip
    tables = torch.empty(2048, dim // 2), torch.empty(2048, dim // 2)
    embedding, head = make(shape.vocab, hidden), make(shape.vocab, hidden)
    sizes = shape.heads, shape.kv_heads, dim, inner
    weights = DecoderWeights([layer], embedding, make(hidden), head, *tables, *sizes, 1e-6, dim**-0.5)
    kv = KvStore(*(make(1, shape.kv_heads, 64, dim) for _ in range(2)))
    return FusedDecoder(weights, kv, pdl=True)
