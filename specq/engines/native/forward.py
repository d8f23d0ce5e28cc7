"""The fast CPU path: a Llama-like decoder's forward pass in one C call.

Weights are packed once. Query, key and value projections are merged, gate and up projections are interleaved. Rows are
in panels of 16 (kernels/matmul.h), as bfloat16 if that is exact. With few rows the time of a step is the time to read
the weights. Packing halves their bytes, and one call replaces about 200 torch operations of 5 to 20 us each.

A row's logits do not depend on the batch. The same bits result alone, in a tree or in a prefill chunk. Under
`deterministic` the text is therefore exactly drafter-invariant, without near-ties.

Threads may share steps of many rows (kernels/team.h), with the same bits again.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
import weakref
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specq.engines.native.panels import PANEL, PanelMatrix, interleaved, panel_bias
from specq.engines.native.pass_times import PassWork
from specq.engines.native.rows import COLUMNS, PackedRows, RowTap, address, table_addresses
from specq.engines.native.sharing import Sharing
from specq.engines.native.weights import (
    LINE,
    Arena,
    DecoderLayer,
    Linear,
    NativeWeights,
    Unpacked,
    pack,
    pack_bias,
)
from specq.protocol import ConfigError, Float32Array
from specq.runtime import available_cores

MOST_JUMPED_ROWS = 32  # beyond this, one more tile is a small part of a step
# A step of at least this many rows always uses the helpers. A smaller step uses them if that was measured to be faster
# (`sharing`). Two threads against one, bundled target, contexts of 256, on two cores of an EPYC (Zen 3): 16 rows run
# 1.5 to 1.8 times as fast. With one niced (5) loop on the helper's core it is 1.2, with one loop that is not niced 1.0,
# with several 0.7.
MIN_SHARED_ROWS = 12

_Pointer = ctypes.c_void_p


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in ("weights", "bias")),
        *((name, ctypes.c_int32) for name in ("num_panels", "k", "format", "pad")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, _Matrix) for name in ("qkv", "out", "gate_up", "down")),
    )


_SIZES = ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate")


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        *((name, _Pointer) for name in ("embedding", "final_norm", "cos", "sin")),
        ("layers", ctypes.POINTER(_Layer)),
        ("head", _Matrix),
        *((name, _Pointer) for name in ("keys", "values")),
        ("num_slots", ctypes.c_int64),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_rows", "num_sessions", "num_logit_rows", "max_slots")),
        *((name, _Pointer) for name in (*COLUMNS, "tables")),
    )


class _Tap(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_layers", "num_rows")),
        *((name, _Pointer) for name in ("layers", "rows", "out")),
    )


@dataclass(frozen=True, slots=True)
class Threads:
    """The threads that compute.

    `own` threads run on the cores of the process, including the caller. One more thread runs on each of `helper_cores`.
    """

    own: int = 1
    helper_cores: tuple[int, ...] = ()

    @property
    def num_helpers(self) -> int:
        return self.count - 1

    @property
    def count(self) -> int:
        return self.own + len(self.helper_cores)

    @property
    def own_only(self) -> Threads:
        """The same without the threads on helper cores."""
        return replace(self, helper_cores=())

    def spread(self) -> None:
        """Let the calling thread run on all these cores, if the system can (Linux)."""
        if self.helper_cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {*available_cores(), *self.helper_cores})


ALONE = Threads()


class NativeOutput(NamedTuple):
    """Like `specq.engines.torch.forward.ForwardOutput`, with float32 arrays."""

    logits: Float32Array
    hidden: Float32Array
    tapped: Float32Array | None = None


class NativeForward:
    """Runs packed rows of one model through the C library.

    - is_helped: whether threads on helper cores take part; may be set.
    - jumps: numbers of rows after which a pass takes longer at once.
    - num_tap_layers: number of layers whose hidden states it can return.
    - work: what a pass does.
    """

    def __init__(
        self,
        weights: NativeWeights,
        keys: Float32Array,
        values: Float32Array,
        library: ctypes.CDLL,
        threads: Threads = ALONE,
    ) -> None:
        """Pack the weights. Packed ones are copied, those in panels are not.

        `library`: that of the weights' arithmetic.

        The passes write to `keys` and `values`, [num_layers, num_kv_heads, num_slots, head_dim].
        """
        self._arena = Arena(sum(linear.most_bytes for linear in weights.linears()))
        self._keep: list[npt.NDArray[Any]] = [keys, values]  # owners of the memory that C points into
        self._library = library
        library.specq_workspace_floats.restype = library.specq_tile_rows.restype = ctypes.c_int64
        library.specq_team_new.restype = _Pointer
        self._threads = threads
        self._is_helped = bool(threads.helper_cores)
        tile_rows = library.specq_tile_rows()
        self.jumps = tuple(range(tile_rows, MOST_JUMPED_ROWS + 1, tile_rows))
        self._teams: dict[Threads, _Pointer | None] = {}
        self._sharing = Sharing()
        self.num_tap_layers = len(weights.layers)
        self._layers = (_Layer * self.num_tap_layers)(*map(self._layer, weights.layers))
        self._model = self._describe(weights, keys, values)
        self.work = _work(weights, self._arena.num_bytes)
        self._num_logits = sum(weight.shape[0] for weight in weights.head.weights)
        self._workspace = _floats(0)

    def __call__(self, rows: PackedRows, tap: RowTap | None = None) -> NativeOutput:
        """Write the rows' KV. Return logits and final hidden states of `rows.logit_rows`, and states for `tap`."""
        tapped = None if tap is None else _floats(len(tap.rows), len(tap.layers) * self._model.hidden)
        described, _layers = _describe_tap(tap, tapped)
        logits, hidden = self._run(self._library.specq_forward, rows, described, 0)
        return NativeOutput(logits[:, : self._num_logits], hidden, tapped)

    def draft_chains(self, rows: PackedRows, chains: ctypes.Structure, depth: int) -> None:
        """Draft chains of this depth with kernels/chain.h. `rows`: the last level, `chains`: its Chains structure."""
        self._run(self._library.specq_draft_chains, rows, ctypes.byref(chains), depth)

    def _run(self, function: Any, rows: PackedRows, more: Any, depth: int) -> tuple[Float32Array, Float32Array]:
        """Compute rows with a function of the library, with the helpers if that is faster.

        Returns the logits of whole panels and the hidden states. `more` is the function's last argument. `depth` is how
        often it computes the rows, 0 for once.
        """
        batch, _tables = _describe_batch(rows)
        num_logits = len(rows.logit_rows)
        logits = _floats(num_logits, self._model.head.num_panels * PANEL)
        hidden = _floats(num_logits, self._model.hidden)
        model = ctypes.byref(self._model)
        kind = (rows.num_rows, num_logits, depth, self.is_helped)
        is_measured = rows.num_rows < MIN_SHARED_ROWS and self._threads_now.num_helpers > 0
        team = self._helpers() if not is_measured or self._sharing.should_share(kind) else None
        needed = self._library.specq_workspace_floats(model, ctypes.byref(batch), team)
        if needed > len(self._workspace):
            self._workspace = _floats(needed)
        pointers = (_Pointer(address(array)) for array in (self._workspace, logits, hidden))
        began = time.perf_counter()
        function(model, ctypes.byref(batch), team, *pointers, more)
        if is_measured:
            self._sharing.note(kind, time.perf_counter() - began)
        return logits, hidden

    @property
    def is_helped(self) -> bool:
        return self._is_helped

    @is_helped.setter
    def is_helped(self, is_helped: bool) -> None:
        if is_helped and not self._is_helped:
            self._sharing = Sharing()  # whoever used these cores before is silent now
        self._is_helped = is_helped

    @property
    def _threads_now(self) -> Threads:
        return self._threads if self.is_helped else self._threads.own_only

    def _helpers(self) -> _Pointer | None:
        """Return the threads that share this model's steps now.

        They start at the first call and end with this object.
        """
        threads = self._threads_now
        if threads not in self._teams and threads.num_helpers:
            team = self._teams[threads] = _start_team(self._library, threads)
            weakref.finalize(self, self._library.specq_team_free, team).atexit = False  # sleeping: they delay no exit
        return self._teams.get(threads)

    def _describe(self, weights: NativeWeights, keys: Float32Array, values: Float32Array) -> _Model:
        return _Model(
            num_layers=len(weights.layers),
            hidden=weights.embedding.shape[1],
            num_heads=weights.num_heads,
            num_kv_heads=weights.num_kv_heads,
            head_dim=weights.head_dim,
            intermediate=weights.intermediate,
            eps=weights.eps,
            scale=weights.scale,
            embedding=self._embedding(weights.embedding),
            final_norm=self._vector(weights.final_norm),
            cos=self._vector(weights.cos),
            sin=self._vector(weights.sin),
            layers=self._layers,
            head=self._matrix(weights.head),
            num_slots=keys.shape[2],
            keys=address(keys),
            values=address(values),
        )

    def _layer(self, layer: DecoderLayer) -> _Layer:
        norms = {name: getattr(layer, name) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm")}
        return _Layer(
            **{name: None if norm is None else self._vector(norm) for name, norm in norms.items()},
            **{name: self._matrix(getattr(layer, name)) for name in ("qkv", "out", "gate_up", "down")},
        )

    def _vector(self, array: Float32Array) -> int:
        """Keep a contiguous array alive; return its address."""
        self._keep.append(np.ascontiguousarray(array, np.float32))
        return address(self._keep[-1])

    def _embedding(self, embedding: Float32Array | PanelMatrix) -> int:
        if not isinstance(embedding, PanelMatrix):
            return self._vector(embedding)
        self._table = self._matrix(Linear([embedding]))
        return ctypes.addressof(self._table)

    def _matrix(self, linear: Linear) -> _Matrix:
        mapped = [weight for weight in linear.weights if isinstance(weight, PanelMatrix)]
        unpacked = [weight for weight in linear.weights if not isinstance(weight, PanelMatrix)]
        assert not (mapped and unpacked), "weights of two kinds in one product"
        return self._mapped(linear, mapped) if mapped else self._packed(linear, unpacked)

    def _mapped(self, linear: Linear, weights: list[PanelMatrix]) -> _Matrix:
        """Return matrices whose panels are in memory already; `weights` in C lists them."""
        tables = [weight.panels for weight in weights]
        panels = interleaved(tables) if linear.interleaves else np.concatenate(tables)
        self._keep.extend([panels, *(weight.data for weight in weights)])
        bias = self._vector(panel_bias(linear.biases, linear.interleaves)) if linear.biases else None
        kinds = reduce(or_, (weight.kinds for weight in weights))
        return _Matrix(weights=address(panels), bias=bias, num_panels=len(panels), k=weights[0].k, format=kinds)

    def _packed(self, linear: Linear, weights: list[Unpacked]) -> _Matrix:
        packed = pack(self._library, self._arena, weights, linear.interleaves)
        self._keep.append(packed.data)
        return _Matrix(
            weights=address(packed.data),
            bias=self._vector(pack_bias(linear.biases, linear.interleaves)) if linear.biases else None,
            num_panels=packed.num_panels,
            k=packed.k,
            format=packed.format,
        )


def _work(weights: NativeWeights, num_packed_bytes: int) -> PassWork:
    matrices = [weight for linear in weights.linears() for weight in linear.weights]
    mapped = [weight.data.nbytes for weight in matrices if isinstance(weight, PanelMatrix)]
    return PassWork(num_packed_bytes + sum(mapped), sum(math.prod(weight.shape) for weight in matrices), bool(mapped))


def _floats(*shape: int) -> Float32Array:
    """Return an uninitialised array that is aligned to a cache line, unlike NumPy's own arrays."""
    count = math.prod(shape)
    room = np.empty(4 * count + LINE, np.uint8)
    start = -address(room) % LINE
    return room[start : start + 4 * count].view(np.float32).reshape(shape)


def _start_team(library: ctypes.CDLL, threads: Threads) -> _Pointer:
    cores = threads.helper_cores
    team = library.specq_team_new(threads.own - 1, len(cores), (ctypes.c_int32 * len(cores))(*cores))
    if not team:
        raise ConfigError(f"cannot start {threads.num_helpers} helper threads; cores asked for: {list(cores)}")
    return _Pointer(team)


def _describe_batch(rows: PackedRows) -> tuple[_Batch, Any]:
    """Fill the C structure. It points into `rows` and into the second value, which must outlive it."""
    tables = table_addresses(rows.tables)
    spans = rows.ctx_lens + rows.extra_starts[1:] - rows.extra_starts[:-1]
    sizes = rows.num_rows, rows.num_sessions, len(rows.logit_rows), int(spans.max())
    lengths = (len(getattr(rows, name)) * rows.block.itemsize for name in COLUMNS[:-1])
    addresses = accumulate(lengths, initial=address(rows.block))
    return _Batch(*sizes, *addresses, address(tables)), tables


def _describe_tap(tap: RowTap | None, out: Float32Array | None) -> tuple[Any, Any]:
    """Return the argument with which C fills `out`. It points into `tap`, `out` and the second value.

    The second value must outlive it.
    """
    if tap is None or out is None:
        return None, None
    layers = (ctypes.c_int32 * len(tap.layers))(*tap.layers)
    pointers = ctypes.addressof(layers), address(tap.rows), address(out)
    return ctypes.byref(_Tap(len(tap.layers), len(tap.rows), *pointers)), layers
