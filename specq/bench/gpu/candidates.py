"""The tiles that `tiles` tries for each product of a layer, by padded rows, and what is to be compiled for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from specq.engines.torch.fused_tiles import Tile
from specq.models import Shape

Kernels = tuple[
    Shape, int, dict[str, Tile]
]  # what one shape launches for so many rows, with tiles that are not the default

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
}  # fmt: skip
PRODUCTS = ("qkv", "out", "gate_up", "down", "head")
SIZES = {"target": tuple(CANDIDATES), "draft": (1, 16)}  # padded rows whose tiles are of interest
MOST_QKV_ROWS = 64  # a tile of qkv must divide a head


def candidates(shapes: Mapping[str, Shape]) -> list[Kernels]:
    """Return what is to be compiled for shapes, by role: an entry for each tile, in all products at once."""
    return [
        (shape, rows, {product: fit(tile, product) for product in PRODUCTS})
        for role, shape in shapes.items()
        for rows in SIZES[role]
        for tile in CANDIDATES[rows]
    ]


def fit(tile: Tile, product: str) -> Tile:
    """Return the tile as a product can take it."""
    return replace(tile, rows=min(tile.rows, MOST_QKV_ROWS)) if product == "qkv" else tile
