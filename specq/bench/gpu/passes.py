"""Whole passes of a decoder, without an engine around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from specq.bench.gpu.parts import Found, Task
from specq.bench.gpu.timing import graph_ms
from specq.bench.report import Figure, figure
from specq.engines.torch.attention_plan import lay_out, max_list_length
from specq.engines.torch.fused_layers import Batch, FusedDecoder, Scratch
from specq.engines.torch.fused_tiles import NARROW
from specq.engines.torch.rows import pack_steps
from specq.protocol import SamplingParams, SessionStep, Tree

CONTEXT = 256
# Padded number of rows -> (sessions, drafted nodes of each)
PASSES = {1: (1, 0), 16: (1, 8), 32: (32, 0), 64: (64, 0), 96: (10, 8), 160: (32, 4), 288: (32, 8), 320: (64, 4)}
SIZES = {"target": tuple(PASSES), "draft": (1, 16, 32)}


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


def measure(task: Task) -> Found:
    """Time whole passes of both decoders; the narrow ones also without PDL."""
    figures: dict[str, Figure] = {}
    for role, model in task.pair.models.items():
        for size in SIZES[role]:
            name = f"{role} {size} rows"
            figures[name] = figure("ms", pass_ms(model.decoder, size))
            if model.decoder.pdl and size in NARROW:
                with without_pdl(model.decoder):
                    figures[f"{name} without PDL"] = figure("ms", pass_ms(model.decoder, size))
    return Found(figures)


def pass_ms(decoder: FusedDecoder, size: int) -> list[float]:
    """Return the milliseconds of a pass of so many padded rows."""
    batch, scratch = pass_batch(decoder, size)
    return graph_ms(lambda: decoder.run(batch, scratch))


@contextmanager
def without_pdl(decoder: FusedDecoder) -> Iterator[None]:
    """Launch the kernels one after the other meanwhile; with PDL, kernels wait inside each other's time."""
    before = decoder.pdl, decoder.launch_options
    decoder.pdl, decoder.launch_options = False, {}
    try:
        yield
    finally:
        decoder.pdl, decoder.launch_options = before
