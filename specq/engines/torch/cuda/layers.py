"""The fused decoder: launches the kernels of all layers for one padded batch.

A batch with few rows (NARROW) uses our own kernels, six per layer:

- norm + qkv + rotation + KV write.
- attention.
- its combination.
- output + residual.
- norm + gate/up + activation.
- down + residual.

A batch with many rows uses the vendor's matrix product, with small kernels in between. Both round in the same places.
Both work on buffers at fixed addresses, so that CUDA graphs can hold either. See `gpu_kernels.linear` for the split
norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton

from specq.engines.torch.cuda.attention_plan import UNIT, BlockLayout
from specq.engines.torch.cuda.gpu_kernels.attention import attend_kernel, combine_kernel
from specq.engines.torch.cuda.gpu_kernels.linear import add_kernel, gate_up_kernel, linear_kernel, qkv_kernel
from specq.engines.torch.cuda.gpu_kernels.rows import add_norm_kernel, embed_kernel, rotate_kernel, silu_kernel
from specq.engines.torch.cuda.taps import Taps
from specq.engines.torch.cuda.tiles import NARROW, Tile, choose_tiles, shared_bytes_of
from specq.engines.torch.cuda.weights import DecoderWeights, LayerWeights
from specq.engines.torch.forward import KvStore
from specq.protocol import FINAL

LOG2_E = 1.4426950408889634
STAGED_BYTES = 96 << 10  # most bytes of keys and values in flight to one program
TILE_LINES = 64  # rows times heads in one attention tile with many rows; FEW_LINES in a tile with few
FEW_LINES = 16
CROWD = 512  # rows times key-value heads from which a fourth program on each multiprocessor is worth fewer registers
CROWDED_REGISTERS = 128
SILU_BLOCK = 1024
ATTENTION_PROGRAMS = 128  # target number of programs for one long context, over all key-value heads
ROTATED_HEADS = 16  # heads that one program rotates


@dataclass(frozen=True, slots=True)
class Batch:
    """A padded batch's integers on the device, laid out by `attention_plan`."""

    layout: BlockLayout
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    spans: torch.Tensor
    logit_rows: torch.Tensor
    num_items: torch.Tensor
    items: torch.Tensor
    lists: torch.Tensor

    @staticmethod
    def of(block: torch.Tensor, layout: BlockLayout) -> Batch:
        """Split a block on the device into its parts."""
        starts = layout.starts()
        ends = [*list(starts.values())[1:], len(block)]
        parts = {name: block[start:end] for (name, start), end in zip(starts.items(), ends, strict=True)}
        return Batch(layout, **parts)


class Scratch:
    """Buffers for intermediate results of at most `num_rows` rows; see `gpu_kernels.linear` for x and xw.

    squares  of each norm: i64[2 * layers + 1, num_rows].
    """

    def __init__(self, weights: DecoderWeights, layout: BlockLayout) -> None:
        like, num_rows = weights.embedding, layout.num_rows
        heads, dim = weights.num_heads, weights.head_dim

        def make(*shape: int, dtype: torch.dtype = like.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=like.device)

        self.x = make(num_rows, weights.hidden, dtype=torch.float32)
        self.xw = make(num_rows, weights.hidden)
        self.squares = make(2 * len(weights.layers) + 1, num_rows, dtype=torch.int64)
        self.qkv = make(num_rows, weights.qkv_size)
        self.q = make(num_rows, heads * dim)
        self.attended = make(num_rows, heads * dim)
        self.gate_up = make(num_rows, 2 * weights.intermediate)
        self.inner = make(num_rows, weights.intermediate)
        self.delta = make(num_rows, weights.hidden)
        self.hidden = make(num_rows, weights.hidden)
        self.partials = make(layout.max_partials * heads * dim, dtype=torch.float32)
        self.sums = make(layout.max_partials * heads * 2, dtype=torch.float32)


class FusedDecoder:
    """Runs batches of one model on the device of its weights.

    is_invariant  our products add along K in one order, for any number of rows.
    turned        names of `Tiles` and numbers of rows: the product that is made as weights times rows, not rows times
                  weights. The vendor's library cuts it in another way.
    """

    def __init__(self, weights: DecoderWeights, kv: KvStore, *, pdl: bool = False, is_invariant: bool = False) -> None:
        self.weights, self.kv = weights, kv
        self.group = weights.num_heads // weights.num_kv_heads
        self.pdl = pdl
        shared_bytes = shared_bytes_of(weights.embedding)
        self.tiles = {rows: choose_tiles(weights, rows, shared_bytes, is_invariant=is_invariant) for rows in NARROW}
        self.turned: frozenset[tuple[str, int]] = frozenset()
        self.launch_options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
        block_bytes = 2 * UNIT * weights.head_dim * kv.keys.itemsize
        self._attention_stages = max(1, min(3, STAGED_BYTES // block_bytes))
        self._lines = max(TILE_LINES, triton.next_power_of_2(self.group))
        self._few = max(FEW_LINES, triton.next_power_of_2(self.group))

    def layout(self, num_rows: int, most: int) -> BlockLayout:
        """Return the layout of a batch padded to `num_rows` rows, of at most `most` rows per session."""
        lines = self._few if most * self.group <= self._few else self._lines
        num_chunks = max(ATTENTION_PROGRAMS // self.weights.num_kv_heads, 4)
        return BlockLayout(num_rows, lines // self.group, num_chunks)

    def scratch(self, layout: BlockLayout) -> Scratch:
        return Scratch(self.weights, layout)

    def run(self, batch: Batch, scratch: Scratch, taps: Taps | None = None) -> None:
        """Compute all layers. `taps` keeps the hidden states that it requests.

        Afterwards `scratch.x` holds the residual stream. If the batch is not narrow, `_delta` of "down" is still to be
        added.
        """
        if batch.layout.num_rows in NARROW:
            self._run_narrow(batch, scratch, taps)
        else:
            self._run_wide(batch, scratch, taps)
        if taps is not None and FINAL in taps.layers:
            self._keep_final(batch.layout.num_rows, scratch, taps)

    def _keep_final(self, num_rows: int, scratch: Scratch, taps: Taps) -> None:
        out = scratch.hidden[:num_rows]
        if num_rows not in NARROW:  # add the pending delta once
            delta = self._delta("down", scratch, num_rows)
            scratch.x[:num_rows] += delta
            delta.zero_()
        self._norm(scratch, self.weights.final_norm, out, None, num_rows)
        taps.keep(FINAL, out)

    def hidden(self, batch: Batch, scratch: Scratch, num_picked: int, out: torch.Tensor) -> None:
        """Write the final norm of the batch's first `logit_rows` to out [num_picked, hidden]."""
        num_rows = batch.layout.num_rows
        delta = None if num_rows in NARROW else self._delta("down", scratch, num_rows)
        self._norm(scratch, self.weights.final_norm, out, delta, num_picked, batch.logit_rows)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] of hidden: of all rows, or of a narrow batch."""
        return self.multiply(hidden, self.weights.head, "head")

    def multiply(self, rows: torch.Tensor, matrix: torch.Tensor, name: str) -> torch.Tensor:
        """Return rows [n, K] @ matrix.T as a step of n rows computes it; `name` is the matrix's in `Tiles`."""
        if len(rows) not in NARROW:
            return torch.mm(rows, matrix.T)
        out = rows.new_empty(len(rows), len(matrix))
        self._linear(rows, matrix, out, getattr(self.tiles[len(rows)], name))
        return out

    def _run_narrow(self, batch: Batch, scratch: Scratch, taps: Taps | None) -> None:
        num_rows = batch.layout.num_rows
        tiles = self.tiles[num_rows]
        self._embed(batch, scratch, num_rows)
        for index, layer, next_norm in self._layers():
            squares = scratch.squares[2 * index :]
            self._qkv(index, layer, batch, scratch, squares[0])
            self._attention(index, batch, scratch)
            self._add(scratch.attended, layer.out, layer.mlp_norm, scratch, squares[1], num_rows, tiles.out)
            self._gate_up(layer, scratch, squares[1], num_rows)
            self._add(scratch.inner, layer.down, next_norm, scratch, squares[2], num_rows, tiles.down)
            if taps is not None:
                taps.keep(index, scratch.x[:num_rows])

    def _run_wide(self, batch: Batch, scratch: Scratch, taps: Taps | None) -> None:
        num_rows = batch.layout.num_rows
        xw, qkv, attended = scratch.xw[:num_rows], scratch.qkv[:num_rows], scratch.attended[:num_rows]
        gate_up, inner, squares = scratch.gate_up[:num_rows], scratch.inner[:num_rows], scratch.squares[0]
        out, down = (self._delta(name, scratch, num_rows) for name in ("out", "down"))
        self._embed(batch, scratch, num_rows)
        for index, layer, _ in self._layers():
            self._norm(scratch, layer.attn_norm, xw, down if index else None, num_rows, squares=squares)
            torch.mm(xw, layer.qkv.T, out=qkv)
            self._rotate(index, layer, batch, scratch, squares)
            self._attention(index, batch, scratch)
            _multiply(attended, layer.out, out)
            self._norm(scratch, layer.mlp_norm, xw, out, num_rows, squares=squares)
            torch.mm(xw, layer.gate_up.T, out=gate_up)
            self._silu(scratch, squares, num_rows)
            _multiply(inner, layer.down, down)
            if taps is not None:
                taps.keep(index, scratch.x[:num_rows], down)

    def _delta(self, name: str, scratch: Scratch, num_rows: int) -> torch.Tensor:
        """Return where this product of a wide batch lies, [num_rows, hidden]."""
        if (name, num_rows) not in self.turned:
            return scratch.delta[:num_rows]
        return scratch.delta.view(-1)[: num_rows * self.weights.hidden].view(-1, num_rows).T

    def _layers(self) -> Iterator[tuple[int, LayerWeights, torch.Tensor]]:
        """Yield each layer with its index and the norm that follows it."""
        layers = self.weights.layers
        norms = [*(layer.attn_norm for layer in layers[1:]), self.weights.final_norm]
        for index, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
            yield index, layer, norm

    def _embed(self, batch: Batch, scratch: Scratch, num_rows: int) -> None:
        weights, (num_norms, stride) = self.weights, scratch.squares.shape
        embed_kernel[(num_rows,)](
            batch.token_ids, weights.embedding, weights.layers[0].attn_norm, scratch.x, scratch.xw, scratch.squares,
            HIDDEN=weights.hidden, HIDDEN_PAD=triton.next_power_of_2(weights.hidden), NORMS=num_norms,
            NORMS_PAD=triton.next_power_of_2(num_norms), STRIDE=stride, PDL=self.pdl, num_warps=8,
            **self.launch_options,
        )  # fmt: skip

    def _norm(
        self, scratch: Scratch, norm: torch.Tensor, out: torch.Tensor, delta: torch.Tensor | None, num_programs: int,
        picked: torch.Tensor | None = None, squares: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        hidden = self.weights.hidden
        add_norm_kernel[(num_programs,)](
            scratch.x, norm if delta is None else delta, norm, out, scratch.squares if squares is None else squares,
            norm if picked is None else picked, *((0, 0) if delta is None else delta.stride()), self.weights.eps,
            HIDDEN=hidden, HIDDEN_PAD=triton.next_power_of_2(hidden), ADD=delta is not None, PICK=picked is not None,
            SPLIT=squares is not None, PDL=self.pdl, num_warps=8, **self.launch_options,
        )  # fmt: skip

    def _qkv(self, index: int, layer: LayerWeights, batch: Batch, scratch: Scratch, squares: torch.Tensor) -> None:
        weights, num_rows = self.weights, batch.layout.num_rows
        tile = self.tiles[num_rows].qkv
        if not self._fuses_rotation(layer, num_rows):
            self._linear(scratch.xw[:num_rows], layer.qkv, scratch.qkv, self.tiles[num_rows].out)
            self._rotate(index, layer, batch, scratch, squares)
            return
        keys, values = self.kv.keys[index], self.kv.values[index]
        qkv_kernel[(weights.qkv_size // tile.rows,)](
            scratch.xw, squares, layer.qkv, layer.qkv_bias if layer.qkv_bias is not None else layer.qkv,
            weights.cos, weights.sin, batch.positions, batch.slots, scratch.q, keys, values, weights.eps,
            keys.stride(0),
            HIDDEN=weights.hidden, HEADS=weights.num_heads, KV_HEADS=weights.num_kv_heads, HEAD_DIM=weights.head_dim,
            HAS_BIAS=layer.qkv_bias is not None, **self._product_options(num_rows, tile),
        )  # fmt: skip

    def _fuses_rotation(self, layer: LayerWeights, num_rows: int) -> bool:
        tile = self.tiles[num_rows].qkv
        return layer.q_norm is None and self.weights.head_dim % tile.rows == 0

    def _rotate(self, index: int, layer: LayerWeights, batch: Batch, scratch: Scratch, squares: torch.Tensor) -> None:
        weights, keys, values = self.weights, self.kv.keys[index], self.kv.values[index]
        absent = weights.final_norm
        num_heads = weights.num_heads + 2 * weights.num_kv_heads
        rotate_kernel[(batch.layout.num_rows, triton.cdiv(num_heads, ROTATED_HEADS))](
            scratch.qkv, squares, absent if layer.qkv_bias is None else layer.qkv_bias,
            absent if layer.q_norm is None else layer.q_norm, absent if layer.k_norm is None else layer.k_norm,
            weights.cos, weights.sin, batch.positions, batch.slots, scratch.q, keys, values, keys.stride(0),
            weights.eps,
            HIDDEN=weights.hidden, HEADS=weights.num_heads, KV_HEADS=weights.num_kv_heads, HEAD_DIM=weights.head_dim,
            SHARE=ROTATED_HEADS, HAS_BIAS=layer.qkv_bias is not None, HEAD_NORM=layer.q_norm is not None, SCALED=True,
            PDL=self.pdl, num_warps=4, **self.launch_options,
        )  # fmt: skip

    def _attention(self, index: int, batch: Batch, scratch: Scratch) -> None:
        weights, layout, keys = self.weights, batch.layout, self.kv.keys[index]
        lines = self._few if layout.rows_per_block * self.group <= self._few else self._lines
        is_crowded = layout.num_rows * weights.num_kv_heads >= CROWD
        attend_kernel[(layout.max_items, weights.num_kv_heads)](
            scratch.q, keys, self.kv.values[index], batch.num_items, batch.items, batch.lists, batch.lengths,
            batch.spans, scratch.partials, scratch.sums, scratch.attended, keys.stride(0),
            weights.attention_scale * LOG2_E, HEADS=weights.num_heads, GROUP=self.group, HEAD_DIM=weights.head_dim,
            LINES=lines, PDL=self.pdl, num_warps=4, num_stages=self._attention_stages,
            maxnreg=CROWDED_REGISTERS if is_crowded and lines == self._few else None, **self.launch_options,
        )  # fmt: skip
        share, loads = (1, 16) if layout.num_rows in NARROW else (self.group, 4)
        combine_kernel[(layout.num_rows, weights.num_heads // share)](
            scratch.partials, scratch.sums, batch.spans, scratch.attended, HEADS=weights.num_heads, SHARE=share,
            SHARE_PAD=triton.next_power_of_2(share), HEAD_DIM=weights.head_dim, BLOCK=loads, PDL=self.pdl, num_warps=2,
            **self.launch_options,
        )  # fmt: skip

    def _add(
        self, source: torch.Tensor, weight: torch.Tensor, next_norm: torch.Tensor, scratch: Scratch,
        squares: torch.Tensor, num_rows: int, tile: Tile,
    ) -> None:  # fmt: skip
        add_kernel[(triton.cdiv(self.weights.hidden, tile.rows),)](
            source, weight, scratch.x, next_norm, scratch.xw, squares, HIDDEN=self.weights.hidden,
            K=weight.shape[1], **self._product_options(num_rows, tile),
        )  # fmt: skip

    def _gate_up(self, layer: LayerWeights, scratch: Scratch, squares: torch.Tensor, num_rows: int) -> None:
        tile, inner = self.tiles[num_rows].gate_up, self.weights.intermediate
        gate_up_kernel[(triton.cdiv(inner, tile.rows // 2),)](
            scratch.xw, squares, layer.gate_up, scratch.inner, self.weights.eps, HIDDEN=self.weights.hidden,
            INNER=inner, **self._product_options(num_rows, tile),
        )  # fmt: skip

    def _silu(self, scratch: Scratch, squares: torch.Tensor, num_rows: int) -> None:
        hidden, inner = self.weights.hidden, self.weights.intermediate
        silu_kernel[(num_rows, triton.cdiv(inner, SILU_BLOCK))](
            scratch.gate_up, squares, scratch.inner, self.weights.eps, HIDDEN=hidden, INNER=inner, BLOCK=SILU_BLOCK,
            SCALED=True, PDL=self.pdl, num_warps=4, **self.launch_options,
        )  # fmt: skip

    def _linear(self, source: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: Tile) -> None:
        linear_kernel[(triton.cdiv(len(weight), tile.rows),)](
            source, weight, out, len(weight), K=weight.shape[1], **self._product_options(len(source), tile)
        )

    def _product_options(self, num_rows: int, tile: Tile) -> dict[str, Any]:
        sizes = {"ROWS": num_rows, "LANES": tile.lanes, "BLOCK_N": tile.rows, "BLOCK_K": tile.depth}
        options = {"CHAINS": tile.chains, "PDL": self.pdl, "num_warps": tile.warps, "num_stages": tile.stages}
        return sizes | options | self.launch_options


def _multiply(rows: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
    """Set out [n, m] = rows [n, K] @ matrix.T, as matrix @ rows.T where `out` lies so."""
    if out.stride(1) == 1:
        torch.mm(rows, matrix.T, out=out)
    else:
        torch.mm(matrix, rows.T, out=out.T)
