"""Chains of draft steps on the device, without the host. Each step's best token is the next input.

One CUDA graph has a whole step: all layers, the head, the choice of tokens, the update of the batch. A chain of K nodes
is K - 1 replays after the pass over the context. It also needs one copy to the device and one copy back. A row is one
chain. Rows of many sessions, or of branches of one session, run together.

A chain's own slots are its row's extras (see `attention_plan`). In each step the row sees one of them more.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
import triton

from specq.engines.native.rows import ChainStarts, PackedRows, pack_nodes
from specq.engines.torch.cuda.attention_plan import BlockLayout, lay_out
from specq.engines.torch.cuda.forward import FusedForward, padded_size
from specq.engines.torch.cuda.gpu_kernels.top import merge_kernel, tile_kernel
from specq.engines.torch.cuda.layers import Batch
from specq.engines.torch.cuda.replays import Inbox, fetch
from specq.protocol import Float32Array, Int32Array, SamplingParams
from specq.verification import strategy
from specq.verification.host_kernels import is_uncut
from specq.verification.noise import Domain, row_keys

MAX_STEPS = 32
MAX_ROWS = 256
LIST_ROOM = 1 << 20  # slots
TILE = 1024  # tokens
MAX_COUNT = 8


class CudaChainDrafter:
    """Drafts chains with one fused model.

    - runs_beside_host: whether `start` returns before the chains are complete (the host is free).
    """

    runs_beside_host: ClassVar[bool] = True

    def __init__(self, forward: FusedForward) -> None:
        self._forward, self._decoder, self._device = forward, forward.decoder, forward.device
        largest = self._decoder.layout(padded_size(MAX_ROWS), MAX_ROWS)
        length = largest.starts()["lists"] + LIST_ROOM
        self._block = torch.zeros(length, dtype=torch.int32, device=self._device)
        self._inbox = Inbox(length, self._device)
        self._state = torch.zeros(MAX_ROWS * _STATE_WIDTH, dtype=torch.int32, device=self._device)
        self._state_inbox = Inbox(len(self._state), self._device)
        self._scratch = self._decoder.scratch(largest)
        self._graphs: dict[tuple[BlockLayout, _Top], torch.cuda.CUDAGraph] = {}
        self._tops: dict[tuple[int, int], _Top] = {}

    def takes(self, params: Sequence[SamplingParams], lengths: Sequence[int], depth: int, count: int) -> bool:
        """Return whether these chains, after contexts of these lengths, can run in one batch.

        The host handles distributions that are cut (top-k, top-p, min-p) or sent with the draft.
        """
        num_slots = sum(lengths) + len(lengths) * 2 * MAX_STEPS
        is_size_ok = len(params) <= MAX_ROWS and depth <= MAX_STEPS and 1 <= count <= MAX_COUNT
        return is_size_ok and num_slots <= LIST_ROOM and all(map(_takes, params))

    def can_draft(self, params: SamplingParams) -> bool:
        """Return whether the device alone can draft for these parameters."""
        return _takes(params)

    @torch.no_grad()
    def start(
        self, logits: torch.Tensor, starts: ChainStarts, depth: int, count: int, limit_vocab: int
    ) -> ChainsOnDevice:
        """Begin to draft chains. Return an object that waits for the device and gives the results.

        The results are the `count` best tokens of each of `depth` steps of each chain, best first. They are i32[depth,
        rows, count], with their log-probabilities, f32. Each step follows the first token of the step before. The
        object's `tokens` are the same tokens on the device.

        logits [rows, vocab]: the model's outputs at the chains' starts, still on the device. Only tokens below
        limit_vocab are used.
        """
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            rows = _before_first(starts)
            layout = self._decoder.layout(padded_size(len(starts)), 1)
            top = self._top(count, min(limit_vocab, logits.shape[1]))
            self._send(rows, starts, layout, depth)
            batch = Batch.of(self._block, layout)
            if layout.num_rows > len(logits):
                logits = torch.nn.functional.pad(logits, (0, 0, 0, layout.num_rows - len(logits)))
            self._choose(logits, batch, top)
            for _ in range(depth - 1):
                self._step(batch, top)
            results = top.results[: depth * layout.num_rows * count * 2].view(depth, layout.num_rows, count, 2)
            return ChainsOnDevice(results[:, : len(starts)], top.num_tokens)

    def _top(self, count: int, num_tokens: int) -> _Top:
        key = (count, num_tokens)
        if key not in self._tops:
            self._tops[key] = _Top(count, num_tokens, self._device)
        return self._tops[key]

    def _send(self, rows: PackedRows, starts: ChainStarts, layout: BlockLayout, depth: int) -> None:
        """Copy the batch's integers and the chains' state to the device."""
        inbox, num_rows = self._inbox, layout.num_rows
        inbox.wait()
        used = lay_out(rows, layout, inbox.array)
        lengths = inbox.array[layout.starts()["lengths"] :]
        lengths[: len(starts)] -= starts.slots.shape[1]  # no row sees a slot of its chain yet
        inbox.copy(used, self._block)
        state = self._state_inbox
        state.wait()
        steps, inverse, slots, keys = _split_state(state.array, num_rows)
        steps[:] = 0
        inverse[:] = 0
        slots[:] = -1
        keys[:] = 0
        slots[: len(starts), : depth - 1] = starts.slots
        warm = [i for i, params in enumerate(starts.params) if params.temperature > 0]
        if warm:
            inverse[warm] = [1 / starts.params[i].temperature for i in warm]
            positions = np.add.outer(starts.positions[warm], np.arange(depth))
            seeds = [starts.params[i].seed for i in warm for _ in range(depth)]
            keys[warm, :depth] = row_keys(seeds, positions.reshape(-1), Domain.GUMBEL).reshape(-1, depth, 2)
        state.copy(num_rows * _STATE_WIDTH, self._state)

    def _step(self, batch: Batch, top: _Top) -> None:
        """Run one step on the device, from a graph if the forward uses graphs."""
        if not self._forward.uses_graphs:
            self._run_step(batch, top)
            return
        key = (batch.layout, top)
        if key not in self._graphs:
            self._graphs[key] = self._capture(batch, top)
        self._graphs[key].replay()

    def _capture(self, batch: Batch, top: _Top) -> torch.cuda.CUDAGraph:
        """Capture a step. The step that compiles the kernels first changes the state, so the state is restored."""
        kept = [self._block.clone(), self._state.clone(), top.results.clone()]
        self._run_step(batch, top)
        for tensor, before in zip((self._block, self._state, top.results), kept, strict=True):
            tensor.copy_(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._run_step(batch, top)
        return graph

    def _run_step(self, batch: Batch, top: _Top) -> None:
        num_rows = batch.layout.num_rows
        self._decoder.run(batch, self._scratch)
        hidden = self._scratch.hidden[:num_rows]
        self._decoder.hidden(batch, self._scratch, num_rows, hidden)
        self._choose(self._decoder.head(hidden), batch, top)

    def _choose(self, logits: torch.Tensor, batch: Batch, top: _Top) -> None:
        """Choose tokens from logits [rows, vocab] and advance the batch."""
        num_rows, decoder = batch.layout.num_rows, self._decoder
        steps, inverse, slots, keys = _split_device_state(self._state, num_rows)
        tile_kernel[(num_rows, top.num_tiles)](
            logits, logits.stride(0), top.num_tokens, inverse, keys, steps, top.scores, top.ids, top.sums, top.ids,
            MAX_STEPS, 1, NOISY=True, STEPPED=True, COUNT=top.count, BLOCK=TILE, PDL=decoder.pdl, NAMED=False,
            num_warps=4, **decoder.launch_options,
        )  # fmt: skip
        merge_kernel[(num_rows,)](
            top.scores, top.ids, top.sums, top.num_tiles, top.results, steps, batch.token_ids, batch.positions,
            batch.slots, batch.lengths, slots, MAX_STEPS, COUNT=top.count, WIDTH=top.width,
            TILES_PAD=top.tiles_pad, CHAIN=True, MAX_STEPS=MAX_STEPS, PDL=decoder.pdl, num_warps=4,
            **decoder.launch_options,
        )  # fmt: skip


class ChainsOnDevice:
    """Chains on their way to the host. A call waits for them.

    - tokens: i32[depth * rows * count] on the device, each below `num_tokens`. The order is by step, then by chain,
      best token first.
    """

    def __init__(self, results: torch.Tensor, num_tokens: int) -> None:
        """Start the copy. `results`, i32[depth, rows, count, 2], are tokens and the bits of their log-probabilities.

        Work that is launched later may reuse the memory of `results`.
        """
        self.tokens = results[..., 0].reshape(-1).clamp(0, num_tokens - 1)
        self._fetched = fetch(results)

    def __call__(self) -> tuple[Int32Array, Float32Array]:
        """Return tokens i32[depth, rows, count] and log-probabilities, f32."""
        found = self._fetched()
        return found[..., 0].copy(), found[..., 1].copy().view(np.float32)


class _Top:
    """Buffers for choosing `count` of `num_tokens` tokens per row: each tile's candidates, all steps' results."""

    def __init__(self, count: int, num_tokens: int, device: torch.device) -> None:
        self.count, self.num_tokens = count, num_tokens
        self.num_tiles = num_tiles = triton.cdiv(num_tokens, TILE)
        self.width, self.tiles_pad = (triton.next_power_of_2(size) for size in (num_tiles * count, num_tiles))

        def make(length: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(length, dtype=dtype, device=device)

        self.scores = make(MAX_ROWS * num_tiles * count, torch.float64)
        self.ids = make(MAX_ROWS * num_tiles * count, torch.int32)
        self.sums = make(MAX_ROWS * num_tiles * 2, torch.float64)
        self.results = make(MAX_STEPS * MAX_ROWS * count * 2, torch.int32)


# A chain's state, per row: step, 1 / temperature (f32), MAX_STEPS slots, MAX_STEPS pairs of keys.
_STATE_WIDTHS = (1, 1, MAX_STEPS, 2 * MAX_STEPS)
_STATE_WIDTH = sum(_STATE_WIDTHS)


def _state_spans(num_rows: int) -> list[slice]:
    """Return where each part of the state lies for `num_rows` rows."""
    ends = np.cumsum([0, *_STATE_WIDTHS]) * num_rows
    return [slice(int(start), int(end)) for start, end in pairwise(ends)]


def _split_state(state: Int32Array, num_rows: int) -> tuple[Int32Array, Float32Array, Int32Array, Int32Array]:
    """Return views: steps, inverse temperatures, slots [rows, MAX_STEPS], keys [rows, MAX_STEPS, 2]."""
    steps, inverse, slots, keys = (state[span] for span in _state_spans(num_rows))
    return steps, inverse.view(np.float32), slots.reshape(num_rows, -1), keys.reshape(num_rows, -1, 2)


def _split_device_state(state: torch.Tensor, num_rows: int) -> list[torch.Tensor]:
    parts = [state[span] for span in _state_spans(num_rows)]
    parts[1] = parts[1].view(torch.float32)
    return parts


def _takes(params: SamplingParams) -> bool:
    return params.temperature == 0 or (is_uncut(params) and not strategy(params.strategy).samples_drafts(params))


def _before_first(starts: ChainStarts) -> PackedRows:
    """Return the node before each chain's first node as rows.

    Its extras are its lineage and the chain's slots, into which the chain grows.
    """
    none = np.zeros(len(starts), np.int32)
    return pack_nodes(starts, none, none - 1, starts.positions - 1, starts.slots)
