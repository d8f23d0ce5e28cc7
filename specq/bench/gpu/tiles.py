"""How fast each product of a layer is with which tile: by itself beside the vendor's own, then in whole passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import torch

from specq.bench.gpu.candidates import CANDIDATES, PRODUCTS, SIZES, fit
from specq.bench.gpu.parts import Found, Task
from specq.bench.gpu.passes import pass_batch
from specq.bench.gpu.timing import graph_ms
from specq.bench.report import Figure, figure, tell
from specq.engines.torch.fused_layers import Batch, FusedDecoder, Scratch
from specq.engines.torch.fused_tiles import Tile
from specq.engines.torch.fused_weights import LayerWeights

BEST = 4  # candidates of each product that are tried in whole passes
HEADS = 4  # launches of the head that are timed together
SHOWN = 3
Entry = dict[str, Any]  # a product with a tile: {"tile", and "us" and "tb_s" or "error"}


def measure(task: Task) -> Found:
    """Time the tiles of both models; return the passes with the best of them, and every product by itself."""
    figures: dict[str, Figure] = {}
    alone: dict[str, dict[str, list[Entry]]] = {}
    best: dict[str, dict[str, list[int]]] = {}
    for role, model in task.pair.models.items():
        for rows in SIZES[role]:
            name = f"{role} {rows} rows"
            alone[name] = products_alone(model.decoder, rows)
            before, after, best[name] = refine(model.decoder, rows, alone[name])
            figures |= {f"{name}, before": figure("ms", before), f"{name}, after": figure("ms", after)}
            _tell(name, alone[name])
    return Found(figures, {"alone": alone, "best": best})


def _tell(name: str, alone: dict[str, list[Entry]]) -> None:
    for product, entries in alone.items():
        shown = "  ".join(f"{e['tile']} {e['us']} us {e['tb_s']} TB/s" for e in _timed(entries)[:SHOWN])
        tell(f"{name} {product:8} {shown}")


def _timed(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries that ran, the fastest first."""
    return sorted((entry for entry in entries if "us" in entry), key=lambda entry: entry["us"])


def products_alone(decoder: FusedDecoder, rows: int) -> dict[str, list[Entry]]:
    """Time every product with every candidate, each launch on another layer's weights as in a real step; the vendor's last."""
    batch, scratch = _batch(decoder, rows)
    found = {}
    for product in PRODUCTS:
        launch = _launcher(decoder, product, batch, scratch)
        tiles = dict.fromkeys(fit(tile, product) for tile in CANDIDATES[rows])
        own = [_time_tile(decoder, product, rows, tile, launch) for tile in tiles]
        found[product] = [*own, {"tile": "vendor"} | _figures(decoder, product, _vendor(decoder, product, rows))]
    return found


def refine(
    decoder: FusedDecoder, rows: int, alone: dict[str, list[Entry]]
) -> tuple[list[float], list[float], dict[str, list[int]]]:
    """Try the best candidates of each product in whole passes, one product after the other, and keep what is fastest.

    Return the milliseconds before and after, and the tiles.
    """
    batch, scratch = _batch(decoder, rows)

    def run() -> None:
        decoder.run(batch, scratch)
        decoder.head(scratch.hidden[:rows])

    best = before = graph_ms(run, 10)
    for product in PRODUCTS:
        own = [entry for entry in _timed(alone[product]) if entry["tile"] != "vendor"]
        for entry in own[:BEST]:
            kept = decoder.tiles[rows]
            decoder.tiles[rows] = replace(kept, **{product: Tile(*entry["tile"])})
            times = graph_ms(run, 10)
            if median(times) < median(best):
                best = times
            else:
                decoder.tiles[rows] = kept
    return before, best, {product: _numbers(getattr(decoder.tiles[rows], product)) for product in PRODUCTS}


def _batch(decoder: FusedDecoder, rows: int) -> tuple[Batch, Scratch]:
    """Return a batch of so many rows, with room for the sums of squares of any tile."""
    batch, scratch = pass_batch(decoder, rows)
    scratch.squares = torch.ones(1 << 20, device=scratch.x.device)
    return batch, scratch


def _numbers(tile: Tile) -> list[int]:
    return list(asdict(tile).values())


def _time_tile(decoder: FusedDecoder, product: str, rows: int, tile: Tile, launch: Callable[[], int]) -> Entry:
    before = decoder.tiles[rows]
    decoder.tiles[rows] = replace(before, **{product: tile})
    entry: Entry = {"tile": _numbers(tile)}
    try:
        return entry | _figures(decoder, product, launch)
    except Exception as error:  # noqa: BLE001 - a tile that does not fit the device must not hide the others
        return entry | {"error": str(error)[:80]}
    finally:
        decoder.tiles[rows] = before


def _figures(decoder: FusedDecoder, product: str, launch: Callable[[], int]) -> dict[str, float]:
    """Return microseconds of one launch, and the rate at which it reads its weights; `launch` returns how many it makes."""
    us = median(graph_ms(launch, 8)) / launch() * 1e3
    return {"us": round(us, 2), "tb_s": round(_weights(decoder, product)[0].nbytes / us / 1e6, 3)}


def _weights(decoder: FusedDecoder, product: str) -> list[torch.Tensor]:
    if product == "head":
        return [decoder.weights.head] * HEADS
    return [getattr(layer, product) for layer in decoder.weights.layers]


def _vendor(decoder: FusedDecoder, product: str, rows: int) -> Callable[[], int]:
    """Return what launches the vendor's product with the weights of all layers."""
    weights = _weights(decoder, product)
    source = torch.randn(rows, weights[0].shape[1], device=weights[0].device).to(weights[0].dtype)
    out = source.new_empty(rows, len(weights[0]))

    def launch() -> int:
        for weight in weights:
            torch.mm(source, weight.T, out=out)
        return len(weights)

    return launch


def _launcher(decoder: FusedDecoder, product: str, batch: Batch, scratch: Scratch) -> Callable[[], int]:
    """Return what launches a product of all layers, with the tiles that the decoder has by then."""
    rows = batch.layout.num_rows

    def layer_product(index: int, layer: LayerWeights, norm: torch.Tensor) -> None:
        tiles = decoder.tiles[rows]
        if product == "qkv":
            decoder._qkv(index, layer, batch, scratch, decoder._parts_of(tiles.down))
        elif product == "out":
            decoder._add(scratch.attended, layer.out, norm, scratch, rows, tiles.out)
        elif product == "gate_up":
            decoder._gate_up(layer, scratch, rows, decoder._parts_of(tiles.out))
        else:
            decoder._add(scratch.inner, layer.down, norm, scratch, rows, tiles.down)

    def launch() -> int:
        if product == "head":
            for _ in range(HEADS):
                decoder.head(scratch.hidden[:rows])
            return HEADS
        for layer in decoder._layers():
            layer_product(*layer)
        return len(decoder.weights.layers)

    return launch
