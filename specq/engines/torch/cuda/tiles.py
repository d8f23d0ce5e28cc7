"""How the fused path cuts its products. Chosen by measurement (docs/log/)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from specq.engines.torch.cuda.weights import DecoderWeights

NARROW = (1, 16, 32)  # padded numbers of rows for our own products; the vendor's are used above
HOPPER_SHARED_BYTES = 227 << 10
LEAST_LANES = 8  # rows that a tensor-core product computes at least
MIN_TENSOR_TILE = 16  # smallest side of a tensor-core product


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut. Each program takes `rows` of the weights, `depth` columns at a time.

    chains: independent sums of a tensor-core product (see `gpu_kernels.linear.product`).
    lanes: columns of the result that it computes at least; 1 is multiply and add.
    """

    rows: int
    depth: int
    warps: int
    stages: int = 1
    chains: int = 1
    lanes: int = LEAST_LANES


@dataclass(frozen=True, slots=True)
class Tiles:
    """A tile for each product of a layer, and for the head.

    The tiles of qkv and gate_up hold two halves of equal size.
    """

    qkv: Tile
    out: Tile
    gate_up: Tile
    down: Tile
    head: Tile


def shared_bytes_of(like: torch.Tensor) -> int:
    """Return a program's limit of shared memory on a tensor's device, in bytes."""
    if like.device.type != "cuda":
        return HOPPER_SHARED_BYTES
    return int(torch.cuda.get_device_properties(like.device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def choose_tiles(weights: DecoderWeights, num_rows: int, shared_bytes: int, *, is_invariant: bool) -> Tiles:
    """Return the tiles of a narrow batch, for programs with `shared_bytes` of shared memory.

    is_invariant: products add along K in one order, for any number of rows.
    """
    is_small = weights.hidden <= 1024  # one tile holds a whole row of most weights
    if weights.embedding.dtype == torch.float32 and (is_invariant or num_rows > 1):  # for exactness, not for speed
        tiles = EXACT
    elif num_rows == 1 and is_invariant:
        tiles = ONE_ROW_IN_ORDER
    elif num_rows == 1:
        tiles = SMALL_ONE_ROW if is_small else ONE_ROW
    elif num_rows == 16:
        tiles = SMALL_SIXTEEN_ROWS if is_small and not is_invariant else SIXTEEN_ROWS
    else:
        tiles = THIRTY_TWO_ROWS
    layer, itemsize = weights.layers[0], weights.embedding.itemsize
    sizes = {"qkv": layer.qkv, "out": layer.out, "gate_up": layer.gate_up, "down": layer.down, "head": weights.head}
    depths = {name: matrix.shape[1] for name, matrix in sizes.items()}
    fitted = {n: _fit(getattr(tiles, n), depths[n], num_rows, itemsize, shared_bytes) for n in depths}
    return Tiles(**fitted)


def _fit(tile: Tile, depth: int, num_rows: int, itemsize: int, shared_bytes: int) -> Tile:
    """Limit a tile's depth to the matrix, and its stages to the shared memory."""
    depth = min(tile.depth, max(1 << (depth - 1).bit_length(), MIN_TENSOR_TILE))
    lanes = max(tile.lanes, num_rows)
    if lanes == 1:
        return replace(tile, depth=depth)
    stage_bytes = (tile.rows + lanes) * depth * itemsize * tile.chains
    return replace(tile, depth=depth, lanes=lanes, stages=max(1, min(tile.stages, shared_bytes // stage_bytes)))


EXACT = Tiles(*[Tile(16, 32, 4, 2)] * 5)
ONE_ROW = Tiles(
    qkv=Tile(4, 2048, 8, lanes=1),
    out=Tile(8, 1024, 4, lanes=1),
    gate_up=Tile(2, 4096, 4, lanes=1),
    down=Tile(4, 1024, 2, lanes=1),
    head=Tile(4, 2048, 8, lanes=1),
)
ONE_ROW_IN_ORDER = Tiles(
    qkv=Tile(16, 256, 1, 5),
    out=Tile(16, 256, 1, 4),
    gate_up=Tile(16, 256, 1, 5),
    down=Tile(16, 256, 1, 5),
    head=Tile(16, 512, 2, 3),
)
SMALL_ONE_ROW = Tiles(
    qkv=Tile(4, 1024, 4, lanes=1),
    out=Tile(4, 1024, 4, lanes=1),
    gate_up=Tile(8, 1024, 4, lanes=1),
    down=Tile(4, 2048, 8, lanes=1),
    head=Tile(4, 512, 4, lanes=1),
)
SIXTEEN_ROWS = Tiles(
    qkv=Tile(16, 512, 2, 3),
    out=Tile(16, 256, 2, 6),
    gate_up=Tile(32, 256, 2, 4),
    down=Tile(16, 256, 2, 6),
    head=Tile(64, 256, 4, 4),
)
SMALL_SIXTEEN_ROWS = Tiles(
    qkv=Tile(16, 256, 2, 6),
    out=Tile(16, 256, 2, 3, 2),
    gate_up=Tile(64, 128, 4, 6),
    down=Tile(16, 256, 2, 3, 2),
    head=Tile(32, 128, 2, 4, 2),
)
THIRTY_TWO_ROWS = Tiles(
    qkv=Tile(64, 256, 4, 4),
    out=Tile(32, 256, 4, 6),
    gate_up=Tile(64, 128, 4, 5),
    down=Tile(32, 256, 4, 6),
    head=Tile(128, 128, 8, 4),
)
