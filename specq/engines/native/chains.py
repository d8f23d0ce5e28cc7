"""Chains of draft tokens on a CPU in one C call (kernels/chain.h), without Python between levels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from specq.engines.native.forward import NativeForward
from specq.engines.native.rows import ChainStarts, PackedRows, address, pack_nodes
from specq.protocol import Float32Array, Int32Array, SamplingParams
from specq.verification import strategy
from specq.verification.host_kernels import NearNoise, is_uncut

_Pointer = ctypes.c_void_p


class _Chains(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("depth", "count", "num_columns", "row_bytes")),
        ("first_stride", ctypes.c_int64),
        *((name, _Pointer) for name in ("first", "columns", "token_ids", "scores", "room")),
        *((name, _Pointer) for name in ("near_scores", "is_sampled", "rows", "near")),
    )


class NativeChainDrafter:
    """Drafts like `specq.engines.torch.cuda.chain.CudaChainDrafter`, over a native forward.

    token_ids: as in `LoadedModel`.
    """

    runs_beside_host: ClassVar[bool] = False

    def __init__(self, forward: NativeForward, token_ids: Int32Array | None = None) -> None:
        self._forward, self._token_ids = forward, token_ids

    def can_draft(self, params: SamplingParams) -> bool:
        """Return whether C can draft for these parameters.

        It cannot if drafts are sampled, or if only the likeliest tokens count.
        """
        if params.temperature == 0:
            return True
        return is_uncut(params) and NearNoise.is_known() and not strategy(params.strategy).samples_drafts(params)

    def takes(self, params: Sequence[SamplingParams], lengths: Sequence[int], depth: int, count: int) -> bool:
        """Return whether these chains can be drafted in one call."""
        return all(map(self.can_draft, params))

    def start(
        self, logits: npt.ArrayLike, starts: ChainStarts, depth: int, count: int, limit_vocab: int
    ) -> Callable[[], tuple[Int32Array, Float32Array]]:
        """Draft chains; return a function that returns them.

        Arguments and result as for `CudaChainDrafter.start`; logits f32[chains, columns].
        """
        columns = self._token_ids
        scored = np.asarray(logits)
        num_columns = min(limit_vocab if columns is None else int(columns.searchsorted(limit_vocab)), scored.shape[1])
        scored = scored if scored.strides[1] == scored.itemsize else np.ascontiguousarray(scored)
        token_ids = np.empty((depth, len(starts), count), np.int32)
        scores = np.empty(token_ids.shape, np.float32)
        rows = _last_but_one(starts)
        room = np.empty(4 * rows.num_rows + 1 + len(rows.extras), np.int32)
        noise = NearNoise.of(starts.params, starts.positions.tolist())
        is_sampled = noise.rows["temperature"] > 0
        near = np.empty(num_columns, np.float32)
        chains = _Chains(
            depth=depth,
            count=count,
            num_columns=num_columns,
            row_bytes=noise.rows.itemsize,
            first_stride=scored.strides[0] // scored.itemsize,
            first=address(scored),
            columns=None if columns is None else address(columns),
            token_ids=address(token_ids),
            scores=address(scores),
            room=address(room),
            near_scores=ctypes.cast(noise.function, _Pointer),
            is_sampled=address(is_sampled),
            rows=address(noise.rows),
            near=address(near),
        )
        self._forward.draft_chains(rows, chains, depth)
        return lambda: (token_ids, scores)


def _last_but_one(starts: ChainStarts) -> PackedRows:
    """Return as rows the node of each chain that is computed last."""
    count, width = starts.slots.shape
    slots = starts.slots[:, -1] if width else np.full(count, -1, np.int32)  # with one level no node is computed
    return pack_nodes(starts, np.zeros(count, np.int32), slots, starts.positions + (width - 1), starts.slots)
