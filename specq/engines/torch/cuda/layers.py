"""The fused decoder: launches the kernels of all layers for one padded batch.

A batch with few rows (NARROW) uses our own kernels, six per layer:

- norm + qkv + rotation + KV write.
- attention.
- its combination.
- output + residual.
- norm + gate/up + activation.
- down + residual.

 A batch with many rows
uses the vendor's matrix product, with small kernels in between. Both work on buffers at fixed addresses, so that CUDA
graphs can hold either. See `gpu_kernels.linear` for the split norm.
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
    """Buffers for intermediate results of at most `num_rows` rows; see `gpu_kernels.linear` for x and xw."""

    def __init__(self, weights: DecoderWeights, layout: BlockLayout, parts: int) -> None:
        like, num_rows = weights.embedding, layout.num_rows
        heads, dim = weights.num_heads, weights.head_dim

        def make(*shape: int, dtype: torch.dtype = like.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=like.device)

        self.x = make(num_rows, weights.hidden, dtype=torch.float32)
        self.xw = make(num_rows, weights.hidden)
        self.squares = make(parts * num_rows, dtype=torch.float32)
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
    """Runs batches of one model on the device of its weights."""

    def __init__(self, weights: DecoderWeights, kv: KvStore, *, pdl: bool = False) -> None:
        self.weights, self.kv = weights, kv
        self.group = weights.num_heads // weights.num_kv_heads
        self.pdl = pdl
        self.tiles = {rows: choose_tiles(weights, rows, shared_bytes_of(weights.embedding)) for rows in NARROW}
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
        return Scratch(self.weights, layout, max(self._parts(rows) for rows in NARROW))

    def run(self, batch: Batch, scratch: Scratch, taps: Taps | None = None) -> None:
        """Compute all layers. `taps` keeps the hidden states that it requests.

        Afterwards `scratch.x` holds the residual stream. If the batch is not narrow, `scratch.delta` is still to be
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
            scratch.x[:num_rows] += scratch.delta[:num_rows]
            scratch.delta[:num_rows] = 0
        self._norm(scratch, self.weights.final_norm, out, False, num_rows)
        taps.keep(FINAL, out)

    def hidden(self, batch: Batch, scratch: Scratch, num_picked: int, out: torch.Tensor) -> None:
        """Write the final norm of the batch's first `logit_rows` to out [num_picked, hidden]."""
        is_wide = batch.layout.num_rows not in NARROW
        self._norm(scratch, self.weights.final_norm, out, is_wide, num_picked, batch.logit_rows)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] of hidden: of all rows, or of a narrow batch."""
        head, num_rows = self.weights.head, len(hidden)
        if num_rows not in NARROW:
            return torch.mm(hidden, head.T)
        logits = hidden.new_empty(num_rows, len(head))
        self._linear(hidden, None, head, logits, num_rows, self.tiles[num_rows].head)
        return logits

    def _run_narrow(self, batch: Batch, scratch: Scratch, taps: Taps | None) -> None:
        num_rows = batch.layout.num_rows
        tiles = self.tiles[num_rows]
        self._embed(batch, scratch, num_rows)
        parts = self._parts_of(tiles.down)
        for index, layer, next_norm in self._layers():
            self._qkv(index, layer, batch, scratch, parts)
            self._attention(index, batch, scratch)
            self._add(scratch.attended, layer.out, layer.mlp_norm, scratch, num_rows, tiles.out)
            self._gate_up(layer, scratch, num_rows, self._parts_of(tiles.out))
            self._add(scratch.inner, layer.down, next_norm, scratch, num_rows, tiles.down)
            if taps is not None:
                taps.keep(index, scratch.x[:num_rows])

    def _run_wide(self, batch: Batch, scratch: Scratch, taps: Taps | None) -> None:
        num_rows = batch.layout.num_rows
        normed, qkv, attended, delta = (
            getattr(scratch, name)[:num_rows] for name in ("xw", "qkv", "attended", "delta")
        )
        gate_up, inner = scratch.gate_up[:num_rows], scratch.inner[:num_rows]
        self._embed(batch, scratch, num_rows)
        for index, layer, _ in self._layers():
            self._norm(scratch, layer.attn_norm, normed, index > 0, num_rows)
            torch.mm(normed, layer.qkv.T, out=qkv)
            self._rotate(index, layer, batch, scratch)
            self._attention(index, batch, scratch)
            torch.mm(attended, layer.out.T, out=delta)
            self._norm(scratch, layer.mlp_norm, normed, True, num_rows)
            torch.mm(normed, layer.gate_up.T, out=gate_up)
            self._silu(scratch, num_rows)
            torch.mm(inner, layer.down.T, out=delta)
            if taps is not None:
                taps.keep(index, scratch.x[:num_rows], delta)

    def _layers(self) -> Iterator[tuple[int, LayerWeights, torch.Tensor]]:
        """Yield each layer with its index and the norm that follows it."""
        layers = self.weights.layers
        norms = [*(layer.attn_norm for layer in layers[1:]), self.weights.final_norm]
        for index, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
            yield index, layer, norm

    def _parts_of(self, tile: Tile) -> int:
        return int(triton.cdiv(self.weights.hidden, tile.rows))

    def _parts(self, num_rows: int) -> int:
        tiles = self.tiles[num_rows]
        return max(self._parts_of(tiles.out), self._parts_of(tiles.down))

    def _embed(self, batch: Batch, scratch: Scratch, num_rows: int) -> None:
        weights = self.weights
        parts = self._parts_of(self.tiles[num_rows].down) if num_rows in NARROW else 1
        embed_kernel[(num_rows,)](
            batch.token_ids, weights.embedding, weights.layers[0].attn_norm, scratch.x, scratch.xw, scratch.squares,
            HIDDEN=weights.hidden, HIDDEN_PAD=triton.next_power_of_2(weights.hidden), PARTS=parts,
            PARTS_PAD=triton.next_power_of_2(parts), PDL=self.pdl, num_warps=8, **self.launch_options,
        )  # fmt: skip

    def _norm(
        self, scratch: Scratch, norm: torch.Tensor, out: torch.Tensor, add: bool, num_programs: int,
        picked: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        hidden = self.weights.hidden
        add_norm_kernel[(num_programs,)](
            scratch.x, scratch.delta, norm, out, norm if picked is None else picked, self.weights.eps,
            HIDDEN=hidden, HIDDEN_PAD=triton.next_power_of_2(hidden), ADD=add, PICK=picked is not None,
            PDL=self.pdl, num_warps=8, **self.launch_options,
        )  # fmt: skip

    def _qkv(self, index: int, layer: LayerWeights, batch: Batch, scratch: Scratch, parts: int) -> None:
        weights, num_rows = self.weights, batch.layout.num_rows
        tile = self.tiles[num_rows].qkv
        if not self._fuses_rotation(layer, num_rows):
            self._linear(
                scratch.xw, (scratch.squares, parts), layer.qkv, scratch.qkv, num_rows, self.tiles[num_rows].out
            )
            self._rotate(index, layer, batch, scratch)
            return
        keys, values = self.kv.keys[index], self.kv.values[index]
        qkv_kernel[(weights.qkv_size // tile.rows,)](
            scratch.xw, scratch.squares, layer.qkv, layer.qkv_bias if layer.qkv_bias is not None else layer.qkv,
            weights.cos, weights.sin, batch.positions, batch.slots, scratch.q, keys, values, weights.eps,
            keys.stride(0),
            HIDDEN=weights.hidden, HEADS=weights.num_heads, KV_HEADS=weights.num_kv_heads, HEAD_DIM=weights.head_dim,
            HAS_BIAS=layer.qkv_bias is not None, PARTS=parts, PARTS_PAD=triton.next_power_of_2(parts),
            **self._product_options(num_rows, tile),
        )  # fmt: skip

    def _fuses_rotation(self, layer: LayerWeights, num_rows: int) -> bool:
        tile = self.tiles[num_rows].qkv
        return layer.q_norm is None and self.weights.head_dim % tile.rows == 0 and tile.rows > 1

    def _rotate(self, index: int, layer: LayerWeights, batch: Batch, scratch: Scratch) -> None:
        weights, keys, values = self.weights, self.kv.keys[index], self.kv.values[index]
        absent = weights.final_norm
        num_heads = weights.num_heads + 2 * weights.num_kv_heads
        rotate_kernel[(batch.layout.num_rows, triton.cdiv(num_heads, ROTATED_HEADS))](
            scratch.qkv, absent if layer.qkv_bias is None else layer.qkv_bias,
            absent if layer.q_norm is None else layer.q_norm, absent if layer.k_norm is None else layer.k_norm,
            weights.cos, weights.sin, batch.positions, batch.slots, scratch.q, keys, values, keys.stride(0),
            weights.eps,
            HEADS=weights.num_heads, KV_HEADS=weights.num_kv_heads, HEAD_DIM=weights.head_dim, SHARE=ROTATED_HEADS,
            HAS_BIAS=layer.qkv_bias is not None, HEAD_NORM=layer.q_norm is not None, PDL=self.pdl, num_warps=4,
            **self.launch_options,
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
        self, source: torch.Tensor, weight: torch.Tensor, next_norm: torch.Tensor, scratch: Scratch, num_rows: int,
        tile: Tile,
    ) -> None:  # fmt: skip
        add_kernel[(self._parts_of(tile),)](
            source, weight, scratch.x, next_norm, scratch.xw, scratch.squares, HIDDEN=self.weights.hidden,
            K=weight.shape[1], **self._product_options(num_rows, tile),
        )  # fmt: skip

    def _gate_up(self, layer: LayerWeights, scratch: Scratch, num_rows: int, parts: int) -> None:
        tile, inner = self.tiles[num_rows].gate_up, self.weights.intermediate
        gate_up_kernel[(triton.cdiv(inner, tile.rows // 2),)](
            scratch.xw, scratch.squares, layer.gate_up, scratch.inner, self.weights.eps, HIDDEN=self.weights.hidden,
            INNER=inner, PARTS=parts, PARTS_PAD=triton.next_power_of_2(parts), **self._product_options(num_rows, tile),
        )  # fmt: skip

    def _silu(self, scratch: Scratch, num_rows: int) -> None:
        inner = self.weights.intermediate
        silu_kernel[(num_rows, triton.cdiv(inner, SILU_BLOCK))](
            scratch.gate_up, scratch.inner, INNER=inner, BLOCK=SILU_BLOCK, PDL=self.pdl, num_warps=4,
            **self.launch_options,
        )  # fmt: skip

    def _linear(
        self, source: torch.Tensor, squares: tuple[torch.Tensor, int] | None, weight: torch.Tensor, out: torch.Tensor,
        num_rows: int, tile: Tile,
    ) -> None:  # fmt: skip
        parts = squares[1] if squares else 1
        linear_kernel[(triton.cdiv(len(weight), tile.rows),)](
            source, squares[0] if squares else source, weight, out, self.weights.eps, len(weight), K=weight.shape[1],
            SCALED=squares is not None, PARTS=parts, PARTS_PAD=triton.next_power_of_2(parts),
            **self._product_options(num_rows, tile),
        )  # fmt: skip

    def _product_options(self, num_rows: int, tile: Tile) -> dict[str, Any]:
        sizes = {"ROWS": num_rows, "BLOCK_N": tile.rows, "BLOCK_K": tile.depth, "CHAINS": tile.chains, "PDL": self.pdl}
        return sizes | {"num_warps": tile.warps, "num_stages": tile.stages} | self.launch_options
