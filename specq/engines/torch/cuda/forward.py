"""The fast path on a GPU: packed rows through the fused decoder and CUDA graphs.

A step copies integers to the device and replays one graph. The graph has all layers, for a padded number of rows. Then
it runs the final norm and the head for the judged rows. No part of it waits for the device. Logits stay there, and the
host is free while the layers run.

A graph is captured when its size is first used. The engine's profile at start-up uses all sizes. A step may exceed the
largest size, or the room for lists of slots. It then runs the same kernels without a graph. Passes that return hidden
states have their own graphs for each set of layers. These are also captured at first use.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import torch

from specq.engines.arithmetic import INVARIANT
from specq.engines.native.loaded import ForwardOutput
from specq.engines.native.rows import PackedRows, RowTap
from specq.engines.torch.cuda.attention_plan import BlockLayout, lay_out, line_places, max_list_length
from specq.engines.torch.cuda.invariant import EqualProducts, forbid_splits
from specq.engines.torch.cuda.layers import Batch, FusedDecoder, Scratch
from specq.engines.torch.cuda.replays import Inbox
from specq.engines.torch.cuda.taps import Taps
from specq.engines.torch.cuda.tiles import NARROW
from specq.engines.torch.cuda.weights import merge
from specq.engines.torch.forward import Feed, KvStore, work_of

SIZES = (*NARROW, 48, 64, 96, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512, 576, 640, 704, 768)
BEYOND = 64  # sizes above the largest are multiples of this
LIST_ROOM = 1 << 20  # slots; 64 contexts of 16k tokens
NUM_INBOXES = 2


class FusedForward:
    """Runs packed rows of one model on a GPU, or on a CPU under Triton's interpreter; see `weights.supports`.

    arithmetic  its name. With `is_invariant` the device's name is part of it: another device may add in another order.
    """

    is_helped = False
    is_fed: ClassVar[bool] = True

    def __init__(
        self, model: Any, kv: KvStore, *, graphs: bool | None = None, pdl: bool | None = None,
        is_invariant: bool = False,
    ) -> None:  # fmt: skip
        """Make the forward. `graphs` and `pdl` (programmatic dependent launch) default to what the device supports.

        is_invariant: a row's bits do not depend on other rows. This changes the vendor's products in the whole process
        (`invariant.forbid_splits`).
        """
        self.kv, self.work = kv, work_of(model)
        self.device = kv.keys.device
        on_gpu = self.device.type == "cuda"
        can_pdl = on_gpu and torch.cuda.get_device_capability(self.device) >= (9, 0)
        self.uses_graphs = on_gpu if graphs is None else graphs
        pdl = can_pdl if pdl is None else pdl
        self.decoder = FusedDecoder(merge(model, kv.num_slots), kv, pdl=pdl, is_invariant=is_invariant)
        self.arithmetic = "fused"
        self.jumps: tuple[int, ...] = SIZES
        self._equal: EqualProducts | None = None
        if is_invariant:
            forbid_splits()
            least = next(size for size in SIZES if size not in NARROW)
            self._equal = EqualProducts(self.decoder.weights, self.decoder.multiply, least)
            self.arithmetic = f"{INVARIANT} {device_name(self.device)}"
            self.jumps = self._equal.among(SIZES)
            self.decoder.turned = self._equal.turned
        largest = self.decoder.layout(self.jumps[-1], self.jumps[-1])
        self._scratch = self.decoder.scratch(largest)
        self._block = torch.zeros(largest.starts()["lists"] + LIST_ROOM, dtype=torch.int32, device=self.device)
        self._inboxes = [Inbox(len(self._block), self.device) for _ in range(NUM_INBOXES)]
        self._batches: dict[BlockLayout, Batch] = {}  # all over the same block
        self._graphs: dict[tuple[BlockLayout, tuple[int, ...]], torch.cuda.CUDAGraph] = {}
        self._taps: dict[tuple[int, ...], Taps] = {}  # by layers
        self.num_tap_layers = len(self.decoder.weights.layers)

    @torch.no_grad()
    def __call__(self, rows: PackedRows, tap: RowTap | None = None, feed: Feed | None = None) -> ForwardOutput:
        """Write the rows' KV and return logits (in the model's dtype) and final hidden states of `rows.logit_rows`.

        `tap` requests more hidden states. `feed` has tokens that only the device knows.
        """
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            size = self._padded(rows.num_rows)
            if size > self.jumps[-1] or max_list_length(rows) > LIST_ROOM:
                return self._run_beyond(rows, size, tap, feed)
            batch = self._batch(self.decoder.layout(size, int(np.diff(rows.row_starts).max())))
            self._inboxes.append(self._inboxes.pop(0))
            _send(self._inboxes[0], rows, batch, self._block, feed)
            taps = None if tap is None else self._taps_of(tap.layers)
            self._run(batch, taps)
            return self._finish(rows, batch, self._scratch, taps, tap)

    def _padded(self, num_rows: int) -> int:
        """Return the number of rows with which a step, or the head, computes `num_rows` rows."""
        size = padded_size(num_rows, self.jumps)
        while self._equal is not None and not self._equal.are_equal(size):
            size += BEYOND
        return size

    def _taps_of(self, layers: tuple[int, ...]) -> Taps:
        if layers not in self._taps:
            self._taps[layers] = Taps(layers, self.jumps[-1], self.decoder.weights.embedding)
        return self._taps[layers]

    def _batch(self, layout: BlockLayout) -> Batch:
        if layout not in self._batches:
            self._batches[layout] = Batch.of(self._block, layout)
        return self._batches[layout]

    def _run(self, batch: Batch, taps: Taps | None) -> None:
        """Run all layers, from a graph if graphs are used."""
        if not self.uses_graphs:
            self.decoder.run(batch, self._scratch, taps)
            return
        key = (batch.layout, () if taps is None else taps.layers)
        if key not in self._graphs:
            self.decoder.run(batch, self._scratch, taps)  # compiles kernels, which is not allowed during a capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.decoder.run(batch, self._scratch, taps)
            self._graphs[key] = graph
        self._graphs[key].replay()

    def _run_beyond(self, rows: PackedRows, size: int, tap: RowTap | None, feed: Feed | None) -> ForwardOutput:
        """Run a step that fits no graph, in memory of its own."""
        layout = self.decoder.layout(size, rows.num_rows)
        length = layout.starts()["lists"] + max_list_length(rows)
        block = torch.zeros(length, dtype=torch.int32, device=self.device)
        scratch = self.decoder.scratch(layout)
        batch = Batch.of(block, layout)
        _send(Inbox(length, self.device), rows, batch, block, feed)
        taps = None if tap is None else Taps(tap.layers, size, self.decoder.weights.embedding)
        self.decoder.run(batch, scratch, taps)
        return self._finish(rows, batch, scratch, taps, tap)

    def _finish(
        self, rows: PackedRows, batch: Batch, scratch: Scratch, taps: Taps | None, tap: RowTap | None
    ) -> ForwardOutput:
        tapped = None if taps is None or tap is None else taps.pick(tap)
        num_judged = len(rows.logit_rows)
        if self._equal is None:
            size = next((size for size in NARROW if num_judged <= size), num_judged)
        else:
            size = self._padded(num_judged)
        hidden = self.kv.keys.new_empty(size, self.decoder.weights.hidden)
        if not num_judged:
            return ForwardOutput(self.kv.keys.new_empty(0, len(self.decoder.weights.head)), hidden[:0], tapped)
        self.decoder.hidden(batch, scratch, num_judged, hidden)
        return ForwardOutput(self.decoder.head(hidden)[:num_judged], hidden[:num_judged], tapped)


def _send(inbox: Inbox, rows: PackedRows, batch: Batch, block: torch.Tensor, feed: Feed | None) -> None:
    """Lay out a step's integers, copy them to the device, and add the device's own data."""
    inbox.wait()
    inbox.copy(lay_out(rows, batch.layout, inbox.array), block)
    if feed is None:
        return
    feed.put(batch.token_ids)
    if feed.lines is not None:
        feed.lines.put(block, batch.slots, line_places(inbox.array, batch.layout))


def padded_size(num_rows: int, sizes: tuple[int, ...] = SIZES) -> int:
    """Return the size of the graph for a step of `num_rows` rows, or the next multiple of BEYOND."""
    if num_rows > sizes[-1]:
        return -(-num_rows // BEYOND) * BEYOND
    return sizes[int(np.searchsorted(sizes, num_rows))]


def device_name(device: torch.device) -> str:
    """Return the kind of a device, for example NVIDIA H200."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
