"""Whole passes of a decoder, without an engine around it: what each of its tricks brings, and where the time goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gpu_bench_lib.profile import kernels
from gpu_bench_lib.timing import graph_ms
from specq.engines.torch.attention_plan import lay_out, max_list_length
from specq.engines.torch.fused_layers import Batch, FusedDecoder, Scratch
from specq.engines.torch.fused_tiles import NARROW
from specq.engines.torch.rows import pack_steps
from specq.protocol.params import SamplingParams
from specq.protocol.types import SessionStep, Tree

CONTEXT = 256
# Padded number of rows -> (sessions, drafted nodes of each)
PASSES = {1: (1, 0), 16: (1, 8), 32: (32, 0), 64: (64, 0), 96: (10, 8), 160: (32, 4), 288: (32, 8), 320: (64, 4)}


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


def measure(decoder: FusedDecoder, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Time whole passes, as they are and with one trick left out at a time."""
    found: dict[str, Any] = {}
    for size in sizes:
        figures = {"ms": _pass_ms(decoder, size)}
        if decoder.pdl and size in NARROW:
            figures["without pdl"] = _with(decoder, size, pdl=False, launch_options={})
        found[str(size)] = figures
    return found


def profile(decoder: FusedDecoder, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return the kernels of whole passes; without PDL, under which kernels wait inside each other's time."""
    before = decoder.pdl, decoder.launch_options
    decoder.pdl, decoder.launch_options = False, {}
    found = {}
    for size in sizes:
        batch, scratch = pass_batch(decoder, size)
        found[str(size)] = kernels(lambda batch=batch, scratch=scratch: decoder.run(batch, scratch))
    decoder.pdl, decoder.launch_options = before
    return found


def _with(decoder: FusedDecoder, size: int, **changes: Any) -> float:
    before = {name: getattr(decoder, name) for name in changes}
    for name, value in changes.items():
        setattr(decoder, name, value)
    ms = _pass_ms(decoder, size)
    for name, value in before.items():
        setattr(decoder, name, value)
    return ms


def _pass_ms(decoder: FusedDecoder, size: int) -> float:
    batch, scratch = pass_batch(decoder, size)
    return round(graph_ms(lambda: decoder.run(batch, scratch)), 4)
