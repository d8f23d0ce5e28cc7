"""How fast each product of a layer is with which tile: by itself against the vendor's own, then in whole passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gpu_bench_lib.passes import pass_batch
from gpu_bench_lib.timing import graph_ms
from specq.engines.torch.fused_layers import Batch, FusedDecoder
from specq.engines.torch.fused_tiles import Tile, Tiles

CANDIDATES = {
    1: [
        Tile(4, 512, 4), Tile(8, 512, 4), Tile(4, 1024, 4), Tile(2, 1024, 4), Tile(8, 1024, 8), Tile(2, 2048, 4),
        Tile(4, 2048, 8), Tile(4, 1024, 2), Tile(2, 1024, 2), Tile(4, 1024, 8), Tile(2, 4096, 4), Tile(4, 2048, 4),
        Tile(8, 1024, 4),
    ],
    16: [
        Tile(16, 256, 2, 4), Tile(16, 256, 2, 6), Tile(16, 128, 2, 6, 2), Tile(16, 256, 2, 3, 2), Tile(32, 256, 2, 4),
        Tile(32, 256, 4, 4), Tile(32, 128, 4, 4, 2), Tile(32, 128, 2, 4, 2), Tile(64, 128, 4, 6), Tile(64, 128, 4, 3, 2),
        Tile(64, 256, 4, 4), Tile(128, 64, 4, 6), Tile(16, 512, 2, 4),
    ],
    32: [
        Tile(16, 256, 2, 4), Tile(32, 128, 4, 6), Tile(32, 256, 4, 4), Tile(32, 128, 4, 3, 2), Tile(64, 128, 4, 5),
        Tile(64, 256, 4, 3), Tile(64, 128, 4, 3, 2), Tile(128, 64, 4, 6), Tile(128, 128, 8, 4),
    ],
    64: [
        Tile(32, 128, 4, 6), Tile(32, 256, 4, 3), Tile(64, 128, 4, 5), Tile(64, 64, 4, 4, 2), Tile(128, 64, 4, 5),
        Tile(128, 128, 8, 3), Tile(64, 128, 8, 4), Tile(128, 128, 4, 3),
    ],
}  # fmt: skip
PRODUCTS = ("qkv", "out", "gate_up", "down", "head")
BEST = 4  # candidates of each product that are tried in whole passes
ALL = 4  # launches of the head that are timed together


def tasks(shapes: tuple[str, ...]) -> list[tuple[str, int, dict[str, Tile]]]:
    """Return what is to be compiled for `measure`: a task for each candidate, in all products at once."""
    return [
        (shape, rows, {name: _fit(tile, name) for name in PRODUCTS})
        for shape in shapes
        for rows, candidates in CANDIDATES.items()
        if rows in measured_rows(shape)
        for tile in candidates
    ]


def measured_rows(shape: str) -> tuple[int, ...]:
    """Return the sizes whose tiles are of interest: a small drafter's many rows are not."""
    return tuple(CANDIDATES) if "0.5b" not in shape else (1, 16)


def _fit(tile: Tile, product: str) -> Tile:
    """A tile of qkv must divide a head."""
    return replace(tile, rows=min(tile.rows, 64)) if product == "qkv" else tile


def measure(decoder: FusedDecoder, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Time every product with every candidate, each launch on another layer's weights as in a real step."""
    found = []
    for rows in sizes:
        candidates = CANDIDATES[rows]
        batch, scratch = pass_batch(decoder, rows)
        scratch.squares = torch.ones(1 << 20, device=scratch.x.device)
        for product in PRODUCTS:
            for tile in dict.fromkeys(_fit(tile, product) for tile in candidates):
                launch = _launcher(decoder, product, batch, scratch)
                found.append(_measure_one(decoder, product, rows, tile, launch))
            found.append(_measure_vendor(decoder, product, rows))
    return found


def refine(decoder: FusedDecoder, sizes: tuple[int, ...], found: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Try the best candidates of each product in whole passes, one product after the other; keep what is fastest."""
    results = {}
    for rows in sizes:
        batch, scratch = pass_batch(decoder, rows)
        scratch.squares = torch.ones(1 << 20, device=scratch.x.device)
        logits = scratch.hidden[:rows]

        def run(batch: Batch = batch, scratch: Any = scratch, logits: torch.Tensor = logits) -> None:
            decoder.run(batch, scratch)
            decoder.head(logits)

        best_ms = before = graph_ms(run, 10)
        for product in PRODUCTS:
            own = [e for e in found if e["product"] == product and e["rows"] == rows and "us" in e]
            for entry in sorted((e for e in own if e["tile"] != "vendor"), key=lambda e: e["us"])[:BEST]:
                kept: Tiles = decoder.tiles[rows]
                decoder.tiles[rows] = replace(kept, **{product: Tile(*entry["tile"])})
                ms = graph_ms(run, 10)
                if ms < best_ms:
                    best_ms = ms
                else:
                    decoder.tiles[rows] = kept
        tiles = decoder.tiles[rows]
        chosen = {product: _numbers(getattr(tiles, product)) for product in PRODUCTS}
        results[rows] = {"before_ms": round(before, 3), "after_ms": round(best_ms, 3), "tiles": chosen}
    return results


def _numbers(tile: Tile) -> list[int]:
    return [tile.rows, tile.depth, tile.warps, tile.stages, tile.chains]


def _measure_one(
    decoder: FusedDecoder, product: str, rows: int, tile: Tile, launch: Callable[[], int]
) -> dict[str, Any]:
    before: Tiles = decoder.tiles[rows]
    decoder.tiles[rows] = replace(before, **{product: tile})
    entry: dict[str, Any] = {"product": product, "rows": rows, "tile": _numbers(tile)}
    try:
        entry |= _figures(decoder, product, launch)
    except Exception as error:
        entry["error"] = str(error)[:80]
    finally:
        decoder.tiles[rows] = before
    return entry


def _measure_vendor(decoder: FusedDecoder, product: str, rows: int) -> dict[str, Any]:
    weights = _weights(decoder, product)
    source = torch.randn(rows, weights[0].shape[1], device="cuda").to(weights[0].dtype)
    outs = torch.empty(rows, len(weights[0]), device="cuda", dtype=source.dtype)

    def launch() -> int:
        for weight in weights:
            torch.mm(source, weight.T, out=outs)
        return len(weights)

    return {"product": product, "rows": rows, "tile": "vendor"} | _figures(decoder, product, launch)


def _figures(decoder: FusedDecoder, product: str, launch: Callable[[], int]) -> dict[str, float]:
    count = launch()
    us = graph_ms(launch, 8) / count * 1e3
    size = _weights(decoder, product)[0].nbytes
    return {"us": round(us, 2), "tb_s": round(size / us / 1e6, 3)}


def _weights(decoder: FusedDecoder, product: str) -> list[torch.Tensor]:
    if product == "head":
        return [decoder.weights.head] * ALL
    return [getattr(layer, product) for layer in decoder.weights.layers]


def _launcher(decoder: FusedDecoder, product: str, batch: Batch, scratch: Any) -> Callable[[], int]:
    """Return what launches a product of all layers, and says how many launches that were."""
    rows = batch.layout.num_rows

    def launch() -> int:
        tiles = decoder.tiles[rows]
        if product == "head":
            for _ in range(ALL):
                decoder.head(scratch.hidden[:rows])
            return ALL
        for index, layer, norm in decoder._layers():
            if product == "qkv":
                decoder._qkv(index, layer, batch, scratch, decoder._parts_of(tiles.down))
            elif product == "out":
                decoder._add(scratch.attended, layer.out, norm, scratch, batch, tiles.out)
            elif product == "gate_up":
                decoder._gate_up(layer, scratch, rows, decoder._parts_of(tiles.out))
            else:
                decoder._add(scratch.inner, layer.down, norm, scratch, batch, tiles.down)
        return len(decoder.weights.layers)

    return launch
