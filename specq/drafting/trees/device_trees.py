"""Trees on a head's device, which the host reads later or never.

Nodes are i32[PLANES + levels, trees, n]: tokens, parents, bits of the scores, and bits of the cumulative scores, as in
`Grown`. After these come the lines, as in `DeviceNodes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import structlog
import torch

from specq.drafting.interface import Pending
from specq.drafting.trees.interface import DeviceNodes, Grown
from specq.engines.torch import Replays, runs_triton
from specq.protocol import Int32Array, IntpArray
from specq.runtime import traced

log = structlog.get_logger(__name__)

PLANES = 4  # values of each node before its line

Wait = Callable[[], np.ndarray]


class RecordedPart(NamedTuple):
    """Trees of some texts that a device grows.

    which   the indices of the texts.
    wait    waits for their nodes, i32[PLANES, trees, n].
    nodes   the nodes on the device, valid until trees of the same kind are begun again. None: the host grows them.
    """

    which: IntpArray
    wait: Wait
    nodes: torch.Tensor | None = None


def growing(parts: Sequence[RecordedPart], depths: IntpArray) -> Pending[Grown]:
    """Return trees that are being grown, in parts. `depths`: the level of each node. There may be fewer nodes."""

    def collect() -> Grown:
        token_ids, parents, scores, reach = _joined(parts)
        own = depths[: token_ids.shape[1]]
        return Grown(token_ids, scores.view(np.float32), reach.view(np.float32), parents, own)

    def on_device() -> DeviceNodes | None:
        nodes = parts[0].nodes if len(parts) == 1 else None
        return None if nodes is None or not len(nodes[PLANES:]) else DeviceNodes(nodes[0], nodes[PLANES:])

    return Pending(collect, on_device)


def _joined(parts: Sequence[RecordedPart]) -> Int32Array:
    """Return i32[PLANES, trees, n] from parts, each with some of the trees."""
    if len(parts) == 1:
        found: Int32Array = parts[0].wait()
        return found
    arrays = [part.wait() for part in parts]
    joined = np.empty((PLANES, sum(len(part.which) for part in parts), arrays[0].shape[2]), np.int32)
    for part, array in zip(parts, arrays, strict=True):
        joined[:, part.which] = array
    return joined


def warm_up(passes: Any, replays: Replays, record: Callable[[], None]) -> None:
    """Record passes of a head by `record`. If its own kernels do not run, those of torch are used from then on."""
    has_failed = False
    try:
        record()
    except Exception as error:
        if not passes.has_kernels:
            raise
        log.warning("head_kernels_failed", **traced(error))
        passes.use_torch()
        has_failed = True
    if has_failed:  # without the error, its pass holds no device memory
        replays.forget()
        record()
    replays.is_in_service = True


def possible_sizes(level_sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Return how many nodes each level can have, at most `level_sizes`, where a node has `count` children."""
    sizes, num_above = list[int](), 1
    for size in level_sizes:
        num_above = min(size, num_above * count)
        sizes.append(num_above)
    return tuple(sizes)


def likeliest_on_device(
    token_ids: torch.Tensor, scores: torch.Tensor, sizes: Sequence[int], there: torch.Tensor
) -> torch.Tensor:
    """Return the nodes of `specq.drafting.trees.ranked.likeliest_nodes`, on the device.

    token_ids, scores  i32 and f32[contexts, places, count], as in `Ranked`. Nodes of NaN scores come last.
    sizes              as from `possible_sizes`.
    there              i32[levels]: the same on the device.
    """
    if runs_triton(token_ids.device):
        from specq.drafting.trees.gpu_kernels import grow_ranked

        return grow_ranked(token_ids, scores, sizes, there)
    return _by_level(token_ids, scores, sizes)


def _by_level(token_ids: torch.Tensor, scores: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    num_trees, _, count = scores.shape
    nodes = token_ids.new_zeros(PLANES + len(sizes), num_trees, sum(sizes))
    reach, lines = scores.new_zeros(num_trees, 1), token_ids.new_zeros(len(sizes), num_trees, 1)
    first_above, first = -1, 0
    for depth, size in enumerate(sizes):
        of_all = (reach[:, :, None] + scores[:, None, depth]).flatten(1)
        ordered = torch.where(of_all.isnan(), -torch.inf, of_all)
        chosen = ordered.sort(dim=1, descending=True, stable=True).indices[:, :size]
        behind, rank = chosen // count, chosen % count
        reach, own = of_all.gather(1, chosen), slice(first, first + size)
        number = torch.arange(first, first + size, device=nodes.device, dtype=nodes.dtype)
        lines = lines.gather(2, behind.expand(len(sizes), -1, -1))
        lines[depth:] = number
        nodes[0, :, own] = token_ids[:, depth].gather(1, rank)
        nodes[1, :, own] = first_above + behind
        nodes[2, :, own] = scores[:, depth].gather(1, rank).view(nodes.dtype)
        nodes[3, :, own] = reach.view(nodes.dtype)
        nodes[PLANES:, :, own] = lines
        first_above, first = first, first + size
    return nodes
