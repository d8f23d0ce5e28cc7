"""Where a pass's time goes, kernel by kernel; without PDL, under which kernels wait inside each other's time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity

from bench.gpu.parts import Found, Task
from bench.report import tell
from specq.engines.native.rows import pack_steps
from specq.engines.torch.cuda.attention_plan import lay_out, max_list_length
from specq.engines.torch.cuda.layers import Batch, FusedDecoder, Scratch
from specq.protocol import SamplingParams, SessionStep, Tree

MOST = 16  # kernels that are reported, and FEW that are shown
FEW = 11
SIZES = {"target": (1, 16, 64, 320), "draft": (1, 16)}
CONTEXT = 256
PASSES = {1: (1, 0), 16: (1, 8), 64: (64, 0), 320: (64, 4)}  # padded rows -> (sessions, drafted nodes of each)


def measure(task: Task) -> Found:
    """Return the kernels of whole passes of both decoders."""
    found: dict[str, list[dict[str, Any]]] = {}
    for role, model in task.pair.models.items():
        for size in SIZES[role]:
            found[f"{role} {size} rows"] = pass_kernels(model.decoder, size)
    for name, entries in found.items():
        tell(
            "\n".join(
                [name, *(f"{one['us_each']:10.2f} us x {one['count']:6}  {one['kernel']}" for one in entries[:FEW])]
            )
        )
    return Found(results=found)


def pass_kernels(decoder: FusedDecoder, size: int) -> list[dict[str, Any]]:
    """Return the kernels of a pass of so many padded rows; see `kernels`."""
    batch, scratch = pass_batch(decoder, size)
    with without_pdl(decoder):
        return kernels(lambda: decoder.run(batch, scratch))


def kernels(work: Callable[[], object], repeats: int = 3) -> list[dict[str, Any]]:
    """Return the kernels of `work` by total time: count and microseconds each, and of all a step."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            totals[event.name].append(event.device_time)
    ranked = sorted(totals.items(), key=lambda item: -sum(item[1]))[:MOST]
    return [
        {
            "kernel": name[:60],
            "count": round(len(times) / repeats, 1),
            "us_each": round(sum(times) / len(times), 2),
            "us_a_step": round(sum(times) / repeats, 1),
        }
        for name, times in ranked
    ]


def pass_batch(decoder: FusedDecoder, num_padded: int) -> tuple[Batch, Scratch]:
    """Return a batch of PASSES and what it needs; keys and values are whatever lies in the slots."""
    num_sessions, num_nodes = PASSES[num_padded]
    tree = Tree(np.ones(num_nodes, np.int32), np.arange(num_nodes, dtype=np.int32) - 1, np.zeros(num_nodes, np.float32))
    num_slots = decoder.kv.num_slots
    slots = np.random.default_rng(0).permutation(num_slots).astype(np.int32)
    each = CONTEXT + num_nodes
    steps, tables, own = [], [], []
    for i in range(num_sessions):
        mine = slots[np.arange(i * each, (i + 1) * each) % num_slots]
        tables.append(mine[:CONTEXT])
        own.append(mine[CONTEXT - 1 :])
        steps.append(SessionStep(i, CONTEXT - 1, np.ones(1, np.int32), SamplingParams(), tree))
    rows = pack_steps(steps, np.concatenate(own), tables)
    layout = decoder.layout(num_padded, 1 + num_nodes)
    array = np.zeros(layout.starts()["lists"] + max_list_length(rows), np.int32)
    lay_out(rows, layout, array)
    return Batch.of(torch.from_numpy(array).to(decoder.kv.keys.device), layout), decoder.scratch(layout)


@contextmanager
def without_pdl(decoder: FusedDecoder) -> Iterator[None]:
    """Launch the kernels one after the other meanwhile; with PDL, kernels wait inside each other's time."""
    before = decoder.pdl, decoder.launch_options
    decoder.pdl, decoder.launch_options = False, {}
    try:
        yield
    finally:
        decoder.pdl, decoder.launch_options = before
