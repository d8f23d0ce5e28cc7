"""Compiles kernels beforehand in many processes, so that a lease's time goes into measuring.

Triton compiles without a device if it is told what for; the results lie in its cache, where the measuring process finds
them. A process makes a decoder of one layer with memory that is never touched, and "launches" its kernels.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from specq.models import PRESETS

CAPABILITY = 90


def compile_all(tasks: list[tuple[str, int, dict[str, Any]]], max_workers: int | None = None) -> float:
    """Compile (shape, rows, tiles that differ from the default) in many processes; return the seconds."""
    started = time.perf_counter()
    workers = max_workers or os.cpu_count() or 1
    import multiprocessing

    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(compile_one, tasks):
            pass
    return time.perf_counter() - started


def compile_one(task: tuple[str, int, dict[str, Any]]) -> None:
    """Compile what one shape launches for one padded number of rows."""
    shape, rows, tiles = task
    pretend_device()
    from specq.engines.torch.fused_layers import Batch
    from specq.engines.torch.fused_tiles import NARROW

    decoder = hollow_decoder(shape)
    if rows in NARROW:
        decoder.tiles[rows] = replace(decoder.tiles[rows], **tiles)
    layout = decoder.layout(rows, rows)
    scratch = decoder.scratch(layout)
    batch = Batch.of(torch.zeros(layout.starts()["lists"] + 1024, dtype=torch.int32), layout)
    torch.mm = lambda *_args, **_options: None
    decoder.run(batch, scratch)
    if rows in NARROW:
        decoder.head(scratch.hidden[:rows])
    decoder.hidden(batch, scratch, 1, scratch.hidden)


def hollow_decoder(shape_name: str) -> Any:
    """Return a decoder of one layer whose weights are memory that nobody touches."""
    from specq.engines.torch.forward import KvStore
    from specq.engines.torch.fused_layers import FusedDecoder
    from specq.engines.torch.fused_weights import DecoderWeights, LayerWeights

    shape = PRESETS[shape_name]

    def make(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16)

    hidden, inner, dim = shape.hidden, shape.intermediate, shape.head_dim
    qkv = (shape.heads + 2 * shape.kv_heads) * dim
    layer = LayerWeights(
        make(hidden), make(hidden), make(qkv, hidden), make(qkv), None, None,
        make(hidden, shape.heads * dim), make(2 * inner, hidden), make(hidden, inner),
    )  # fmt: skip
    tables = torch.empty(2048, dim // 2), torch.empty(2048, dim // 2)
    embedding, head = make(shape.vocab, hidden), make(shape.vocab, hidden)
    sizes = shape.heads, shape.kv_heads, dim, inner
    weights = DecoderWeights([layer], embedding, make(hidden), head, *tables, *sizes, 1e-6, dim**-0.5)
    kv = KvStore(*(make(1, shape.kv_heads, 64, dim) for _ in range(2)))
    return FusedDecoder(weights, kv, pdl=True)


def pretend_device() -> None:
    """Make Triton compile for the device's architecture and launch nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Pretended:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", CAPABILITY, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _device: Any = None) -> int:
            return 0

    driver.set_active(Pretended())

    def compile_only(self: Any, grid: Any) -> Any:
        return lambda *args, **options: self.warmup(*args, grid=grid, **options)

    JITFunction.__getitem__ = compile_only
