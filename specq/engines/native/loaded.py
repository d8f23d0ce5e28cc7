"""A loaded model: its description, and a forward that runs packed rows on some device.

Forwards on the host return arrays, those on a GPU return tensors. The engine and drafters use any forward in the same
way.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from specq.engines.native.forward import ALONE, NativeForward, Threads
from specq.engines.native.pass_times import PassWork
from specq.engines.native.rows import PackedRows, RowTap
from specq.engines.native.weights import NativeWeights
from specq.protocol import Float32Array, Int32Array, ModelInfo
from specq.verification import Logits


class Kv(Protocol):
    """Keys and values of all layers, each [num_layers, num_kv_heads, num_slots, head_dim].

    - device: the torch device that has them. None: arrays of the host.
    """

    @property
    def num_slots(self) -> int: ...
    @property
    def device(self) -> Any: ...

    def copy(self, slots: Int32Array) -> None:
        """Copy the contents of some slots to others, i32[2, n]. All slots are read before one is written.

        On a GPU the copy runs in order with the steps.
        """
        ...


class ForwardOutput(NamedTuple):
    """Logits [J, vocab_size] of the J `logit_rows`, and hidden [J, hidden_size] after the final norm.

    - tapped: None without a tap. Else [n, layers * hidden_size] for the rows of the tap, the layers side by side.
    """

    logits: Logits
    hidden: Logits
    tapped: Logits | None = None


class Forward(Protocol):
    """Runs packed rows: it writes their KV to `kv` and returns the outputs of the rows in `logit_rows`.

    - num_tap_layers, is_helped, jumps: as in `specq.engines.Engine`.
    - arithmetic: name of its kernels. Forwards with other kernels round differently.
    - work: what a pass does, from which its time is estimated on a CPU.
    """

    arithmetic: str
    num_tap_layers: int
    is_helped: bool
    jumps: tuple[int, ...]
    work: PassWork

    @property
    def kv(self) -> Kv: ...

    def __call__(self, rows: PackedRows, tap: RowTap | None = None) -> ForwardOutput: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a model's files were loaded as; the forward's KV has `info.kv_slots` slots.

    - token_ids: i32[columns], the token of each logits column, ascending. None: column i is token i.
    - num_masks: for a parallel draft model, how many ids from `info.vocab_size` on are masks
      (`specq.checkpoints.draft_form`).
    """

    info: ModelInfo
    forward: Forward
    token_ids: Int32Array | None = None
    num_masks: int = 0


@dataclass(frozen=True, slots=True)
class HostKv:
    """Keys and values in the host's memory, f32[num_layers, num_kv_heads, num_slots, head_dim] each."""

    keys: Float32Array
    values: Float32Array

    @property
    def num_slots(self) -> int:
        return int(self.keys.shape[2])

    @property
    def device(self) -> None:
        return None

    @staticmethod
    def of(*shape: int) -> HostKv:
        """Return KV of this shape. Slots that no token has used take no memory.

        NumPy's own arrays would be in large pages: one token would take two of 2 MB for each layer and head.
        """
        keys, values = (mmap.mmap(-1, 4 * math.prod(shape), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2))
        return HostKv(*(np.frombuffer(memory, np.float32).reshape(shape) for memory in (keys, values)))

    def copy(self, slots: Int32Array) -> None:
        """See `Kv`."""
        sources, targets = slots
        for held in (self.keys, self.values):
            held[:, :, targets] = held[:, :, sources]


class HostForward:
    """Fulfils `Forward` with the compiled kernels."""

    arithmetic: str = "native"

    def __init__(self, weights: NativeWeights, num_slots: int, library: ctypes.CDLL, threads: Threads = ALONE) -> None:
        """Make the forward, and KV with this number of slots. The weights are copied, but for those in panels.

        `library` has the kernels of the weights' arithmetic.
        """
        self.kv = HostKv.of(len(weights.layers), weights.num_kv_heads, num_slots, weights.head_dim)
        self.native = NativeForward(weights, self.kv.keys, self.kv.values, library, threads)
        self.num_tap_layers, self.jumps = self.native.num_tap_layers, self.native.jumps
        self.work = self.native.work

    @property
    def is_helped(self) -> bool:
        return self.native.is_helped

    @is_helped.setter
    def is_helped(self, is_helped: bool) -> None:
        self.native.is_helped = is_helped

    def __call__(self, rows: PackedRows, tap: RowTap | None = None) -> ForwardOutput:
        """Run packed rows; see `NativeForward`."""
        return ForwardOutput(*self.native(rows, tap))


class IntegerForward(HostForward):
    """The same with the kernels of integer arithmetic. `check` raises EngineLostError if the weights are lost."""

    arithmetic: str = "integer"

    def __init__(
        self,
        weights: NativeWeights,
        num_slots: int,
        library: ctypes.CDLL,
        threads: Threads = ALONE,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(weights, num_slots, library, threads)
        self._check = check

    def __call__(self, rows: PackedRows, tap: RowTap | None = None) -> ForwardOutput:
        """Run packed rows; see `NativeForward`."""
        self._check()
        return super().__call__(rows, tap)
