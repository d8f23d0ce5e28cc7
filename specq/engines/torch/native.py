"""The fast CPU path: a Llama-like decoder's whole forward pass in one call of the C kernels.

Weights are packed once: query, key and value projections merged, gate and up projections interleaved, rows in panels of
16 (kernels/matmul.h), as bfloat16 where that loses nothing. At few rows a step costs the bytes of the weights; packing
halves them, and one call replaces some 200 torch operations of 5 to 20 us each.

A row's logits do not depend on the batch: the same bits come out alone, in a tree or in a prefill chunk. Under
`deterministic` that makes the text exactly drafter-invariant, without near-ties.

Steps of many rows may be shared among threads (kernels/team.h), with the same bits again.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from specq.engines.native.packing import LINE, PANEL, Arena, BlockWeight, Weight, pack, pack_bias
from specq.engines.native.rows import PackedRows, address, table_addresses
from specq.engines.native.sharing import Sharing
from specq.engines.torch.forward import ForwardOutput, KvStore, RowTap
from specq.engines.torch.rotary import has_tables, rotary_tables
from specq.protocol import ConfigError
from specq.runtime import available_cores

ARCHITECTURES = ("llama", "qwen2", "qwen3")
MOST_JUMPED_ROWS = 32  # beyond them a tile more is a small part of a step
# A step of at least so many rows always calls the helpers; one of fewer where that was measured to pay (`sharing`). Two threads
# against one, bundled target, contexts of 256, on two cores of an EPYC (Zen 3): 16 rows 1.5 to 1.8 times as fast; with one
# niced (5) loop on the helper's core 1.2; with one that is not niced 1.0, with several 0.7.
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


# In the order in which they lie in `PackedRows.block`.
_ROW_ARRAYS = ("token_ids", "positions", "slots", "ctx_lens", "extra_starts", "extras", "row_starts", "logit_rows")


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_rows", "num_sessions", "num_logit_rows", "max_slots")),
        *((name, _Pointer) for name in (*_ROW_ARRAYS, "tables")),
    )


class _Tap(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_layers", "num_rows")),
        *((name, _Pointer) for name in ("layers", "rows", "out")),
    )


@dataclass(frozen=True, slots=True)
class Threads:
    """Who computes: `own` threads where the process may run, the caller's included, and one on each of `helper_cores`."""

    own: int = 1
    helper_cores: tuple[int, ...] = ()

    @classmethod
    def of(cls, threads: int, helper_cores: tuple[int, ...] = ()) -> Threads:
        """`threads` of our own; 0: as torch does, at most one a core."""
        return cls(threads or min(torch.get_num_threads(), len(available_cores())), helper_cores)

    @property
    def num_helpers(self) -> int:
        return self.own - 1 + len(self.helper_cores)

    @property
    def own_only(self) -> Threads:
        """The same without those on helper cores."""
        return replace(self, helper_cores=())


ALONE = Threads()
NO_BLOCKS: Mapping[str, BlockWeight] = MappingProxyType({})


class NativeForward:
    """Runs packed rows of one model through the C library; see `supports` for which models it takes."""

    ARITHMETIC: ClassVar[str] = "native"

    def __init__(
        self,
        model: Any,
        kv: KvStore,
        library: ctypes.CDLL,
        threads: Threads = ALONE,
        blocks: Mapping[str, BlockWeight] = NO_BLOCKS,
    ) -> None:
        """`blocks` has the weights of linear layers in a file's own blocks, by the layer's name in the model; the model's own
        weights must be what these dequantise to."""
        self.kv = kv
        self._blocks = {model.get_submodule(name): block for name, block in blocks.items()}
        self._arena = Arena(_most_bytes(model))
        self._keep: list[torch.Tensor] = []  # owners of the memory that C points into
        self._library = library
        library.specq_workspace_floats.restype = library.specq_tile_rows.restype = ctypes.c_int64
        library.specq_team_new.restype = _Pointer
        self._threads = threads
        self.is_helped = bool(threads.helper_cores)
        tile_rows = library.specq_tile_rows()
        self.jumps = tuple(range(tile_rows, MOST_JUMPED_ROWS + 1, tile_rows))
        self._teams: dict[Threads, _Pointer | None] = {}
        self._sharing = Sharing()
        self._layers = (_Layer * model.config.num_hidden_layers)(*(self._layer(layer) for layer in model.model.layers))
        self._model = self._describe(model)
        self._blocks.clear()  # they are packed, and the model's own weights need not stay
        self.num_tap_layers = self._model.num_layers
        self._num_logits = int(model.lm_head.weight.shape[0])
        self._workspace = torch.empty(0)

    def __call__(self, rows: PackedRows, tap: RowTap | None = None) -> ForwardOutput:
        """Write the rows' KV and return logits and final hidden states of `rows.logit_rows`, and what `tap` asks for."""
        tapped = None if tap is None else torch.empty(len(tap.rows), len(tap.layers) * self._model.hidden)
        described, _layers = _describe_tap(tap, tapped)
        logits, hidden = self._run(self._library.specq_forward, rows, described, 0)
        return ForwardOutput(logits[:, : self._num_logits], hidden, tapped)

    def draft_chains(self, rows: PackedRows, chains: ctypes.Structure, depth: int) -> None:
        """Draft chains of some depth as kernels/chain.h has it; `rows`: its last level, `chains`: its Chains."""
        self._run(self._library.specq_draft_chains, rows, ctypes.byref(chains), depth)

    def _run(self, function: Any, rows: PackedRows, more: Any, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Let a function of the library compute rows, with the helpers where that pays; return what it wrote: logits of whole
        panels, and hidden states. `more` is its last argument, `depth` how often it computes the rows, 0 for once."""
        batch, _tables = _describe_batch(rows)
        num_logits = len(rows.logit_rows)
        logits = torch.empty(num_logits, self._model.head.num_panels * PANEL)
        hidden = torch.empty(num_logits, self._model.hidden)
        model = ctypes.byref(self._model)
        kind = (rows.num_rows, num_logits, depth, self.is_helped)
        is_measured = rows.num_rows < MIN_SHARED_ROWS and self._threads_now.num_helpers > 0
        team = self._helpers() if not is_measured or self._sharing.should_share(kind) else None
        needed = self._library.specq_workspace_floats(model, ctypes.byref(batch), team)
        if needed > len(self._workspace):
            self._workspace = torch.empty(needed)
        pointers = (_Pointer(tensor.data_ptr()) for tensor in (self._workspace, logits, hidden))
        began = time.perf_counter()
        function(model, ctypes.byref(batch), team, *pointers, more)
        if is_measured:
            self._sharing.note(kind, time.perf_counter() - began)
        return logits, hidden

    @property
    def _threads_now(self) -> Threads:
        return self._threads if self.is_helped else self._threads.own_only

    def _helpers(self) -> _Pointer | None:
        """Return the threads that share this model's steps now, started when first asked for; they end with this object."""
        threads = self._threads_now
        if threads not in self._teams and threads.num_helpers:
            team = self._teams[threads] = _start_team(self._library, threads)
            weakref.finalize(self, self._library.specq_team_free, team).atexit = False  # asleep, they hold up no exit
        return self._teams.get(threads)

    def _describe(self, model: Any) -> _Model:
        config, decoder = model.config, model.model
        attention = decoder.layers[0].self_attn
        described = _Model(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            intermediate=config.intermediate_size,
            eps=config.rms_norm_eps,
            scale=attention.scaling,
            embedding=self._vector(decoder.embed_tokens.weight),
            final_norm=self._vector(decoder.norm.weight),
            layers=self._layers,
            head=self._matrix([model.lm_head]),
            num_slots=self.kv.num_slots,
            keys=self.kv.keys.data_ptr(),
            values=self.kv.values.data_ptr(),
        )
        described.cos, described.sin = (self._vector(table) for table in rotary_tables(decoder, self.kv.num_slots))
        return described

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        q_norm, k_norm = (None if norm is None else self._vector(norm.weight) for norm in norms)
        return _Layer(
            attn_norm=self._vector(layer.input_layernorm.weight),
            mlp_norm=self._vector(layer.post_attention_layernorm.weight),
            q_norm=q_norm,
            k_norm=k_norm,
            qkv=self._matrix([attention.q_proj, attention.k_proj, attention.v_proj]),
            out=self._matrix([attention.o_proj]),
            gate_up=self._matrix([mlp.gate_proj, mlp.up_proj], interleave=True),
            down=self._matrix([mlp.down_proj]),
        )

    def _vector(self, tensor: torch.Tensor) -> int:
        """Keep a float32 tensor alive; return its address."""
        self._keep.append(tensor.detach().to(torch.float32).contiguous())
        return self._keep[-1].data_ptr()

    def _matrix(self, linears: list[Any], interleave: bool = False) -> _Matrix:
        """Pack the linear layers' rows one below the other, or, with interleave, in turns of 8."""
        weights: list[Weight] = [self._blocks.get(linear) or linear.weight.detach().float() for linear in linears]
        if len({getattr(weight, "type", "") for weight in weights}) > 1:
            weights = [linear.weight.detach().float() for linear in linears]
        packed = pack(self._library, self._arena, weights, interleave)
        self._keep.append(packed.data)
        biases = [linear.bias.detach().float() for linear in linears if linear.bias is not None]
        return _Matrix(
            weights=packed.data.data_ptr(),
            bias=self._vector(pack_bias(biases, interleave)) if biases else None,
            num_panels=packed.num_panels,
            k=packed.k,
            format=packed.format,
        )


def _most_bytes(model: Any) -> int:
    """Return what the packed linear layers take at most: as floats, each matrix padded to whole panels."""
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return sum(4 * (linear.out_features + PANEL) * linear.in_features + LINE for linear in linears)


def _start_team(library: ctypes.CDLL, threads: Threads) -> _Pointer:
    cores = threads.helper_cores
    team = library.specq_team_new(threads.own - 1, len(cores), (ctypes.c_int32 * len(cores))(*cores))
    if not team:
        raise ConfigError(f"cannot start {threads.num_helpers} helper threads; cores asked for: {list(cores)}")
    return _Pointer(team)


def supports(model: Any) -> bool:
    """Whether the kernels can run this transformers model: Llama's layer plan on a CPU in float32, sizes in eights."""
    config = model.config
    if config.model_type not in ARCHITECTURES or model.dtype != torch.float32 or model.device.type != "cpu":
        return False
    head_dim = model.model.layers[0].self_attn.head_dim
    whole_lines = config.hidden_size % 8 == 0 and config.intermediate_size % 8 == 0 and head_dim % 16 == 0
    return whole_lines and config.hidden_act == "silu" and has_tables(model.model)


def _describe_batch(rows: PackedRows) -> tuple[_Batch, Any]:
    """Fill the C structure; it points into `rows` and into the second value, which must outlive it."""
    tables = table_addresses(rows.tables)
    spans = rows.ctx_lens + rows.extra_starts[1:] - rows.extra_starts[:-1]
    sizes = rows.num_rows, rows.num_sessions, len(rows.logit_rows), int(spans.max())
    lengths = (len(getattr(rows, name)) * rows.block.itemsize for name in _ROW_ARRAYS[:-1])
    addresses = accumulate(lengths, initial=address(rows.block))
    return _Batch(*sizes, *addresses, address(tables)), tables


def _describe_tap(tap: RowTap | None, out: torch.Tensor | None) -> tuple[Any, Any]:
    """Return what C takes to fill `out`; it points into `tap`, `out` and the second value, which must outlive it."""
    if tap is None or out is None:
        return None, None
    layers = (ctypes.c_int32 * len(tap.layers))(*tap.layers)
    pointers = ctypes.addressof(layers), address(tap.rows), out.data_ptr()
    return ctypes.byref(_Tap(len(tap.layers), len(tap.rows), *pointers)), layers
