"""The portable forward: transformers' own modelling code, with specq's attention registered in its AttentionInterface.

It works on every device. It supports decoders that call the interface and need only scaled softmax attention. The
attention writes keys and values to their slots and gathers each session's slots. It masks what a row may not see.
Sessions with a similar number of rows share one call of SDPA. `_Group` holds the index tensors of such a call. They are
made once per step for all layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from specq.engines.native.loaded import ForwardOutput
from specq.engines.native.rows import PackedRows, RowTap
from specq.engines.torch.forward import KvStore, work_of
from specq.protocol import FINAL, BoolArray, ConfigError, Int64Array

ATTENTION = "specq"
# Attention features of some architectures that this attention does not have.
UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


@dataclass(frozen=True, slots=True)
class _Group:
    """Sessions attended in one call. G sessions, up to M rows and L slots each, padded.

    - rows: i64[G, M], packed row of each query; padding repeats a row.
    - slots: i64[G, L].
    - mask: bool[G, 1, M, L].
    - picked: i64[P], flat indices into [G, M] of the P real rows.
    - packed: i64[P], packed rows to which the picked rows go.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor
    picked: torch.Tensor
    packed: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    kv: KvStore
    slots: torch.Tensor  # i64[R]
    groups: list[_Group]


class GenericForward:
    """Runs packed rows through a transformers model on its own device."""

    arithmetic: str = "torch"
    is_helped = False
    jumps: tuple[int, ...] = ()

    def __init__(self, model: Any, kv: KvStore) -> None:
        AttentionInterface.register(ATTENTION, paged_attention)
        model.set_attn_implementation(ATTENTION)
        self.kv = kv
        self._model = model
        self._layers = _decoder_layers(model)
        self.work = work_of(model)
        self.num_tap_layers = len(self._layers)

    @torch.no_grad()
    def __call__(self, rows: PackedRows, tap: RowTap | None = None) -> ForwardOutput:
        """Write the rows' KV. Return logits and final hidden states of `rows.logit_rows`, and states for `tap`."""
        device = self.kv.keys.device
        plan = _Plan(self.kv, _index(rows.slots, device), _make_groups(rows, device))
        with self._kept(() if tap is None else tap.layers) as kept:
            hidden = self._model.base_model(
                input_ids=_index(rows.token_ids, device)[None],
                position_ids=_index(rows.positions, device)[None],
                use_cache=False,
                specq_plan=plan,
            )[0][0]
        kept[FINAL] = hidden
        judged = hidden[_index(rows.logit_rows, device)]
        logits = self._model.get_output_embeddings()(judged).float()
        if tap is None:
            return ForwardOutput(logits, judged)
        index = _index(tap.rows, device)
        return ForwardOutput(logits, judged, torch.cat([kept[layer][index] for layer in tap.layers], 1))

    @contextmanager
    def _kept(self, layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Keep the outputs of these layers, [R, hidden], during a pass."""
        kept: dict[int, torch.Tensor] = {}

        def keep(layer: int, output: Any) -> None:
            kept[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        with ExitStack() as hooks:
            for layer in {*layers} - {FINAL}:
                hook = self._layers[layer].register_forward_hook(lambda _module, _in, out, i=layer: keep(i, out))
                hooks.callback(hook.remove)
            yield kept


def _decoder_layers(model: Any) -> list[Any]:
    """Return the model's layers, first to last: the outermost list of `num_hidden_layers` modules; else empty."""
    count = model.config.num_hidden_layers
    lists = [m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    return list(lists[0]) if lists else []


def paged_attention(
    module: Any,
    query: torch.Tensor,  # [1, num_heads, R, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, R, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - the interface's signature; None, since `specq` has no mask
    scaling: float | None = None,
    specq_plan: _Plan | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention over paged KV for transformers' AttentionInterface; returns [1, R, num_heads, head_dim]."""
    if specq_plan is None or any(extras.get(name) is not None for name in UNSUPPORTED):
        raise ConfigError(f"{type(module).__name__} needs attention that specq's torch engine does not have")
    keys, values = specq_plan.kv.keys[module.layer_idx], specq_plan.kv.values[module.layer_idx]
    keys[:, specq_plan.slots] = key[0]
    values[:, specq_plan.slots] = value[0]
    queries = query[0].transpose(0, 1)  # [R, num_heads, head_dim]
    out = torch.empty_like(queries)
    for group in specq_plan.groups:
        attended = scaled_dot_product_attention(
            queries[group.rows].transpose(1, 2),
            keys[:, group.slots].transpose(0, 1),  # [G, num_kv_heads, L, head_dim]
            values[:, group.slots].transpose(0, 1),
            attn_mask=group.mask,
            scale=scaling,
            enable_gqa=queries.shape[1] != keys.shape[0],
        )  # [G, num_heads, M, head_dim]
        out[group.packed] = attended.transpose(1, 2).flatten(0, 1)[group.picked]
    return out[None], None


def _make_groups(rows: PackedRows, device: torch.device) -> list[_Group]:
    """Group sessions by row count, rounded up to a power of two to bound padding."""
    members = defaultdict(list)
    for session, count in enumerate(np.diff(rows.row_starts).tolist()):
        members[(count - 1).bit_length()].append(session)
    return [_make_group(rows, sessions, device) for sessions in members.values()]


def _make_group(rows: PackedRows, sessions: list[int], device: torch.device) -> _Group:
    seen = [_seen_slots(rows, session) for session in sessions]
    starts, ends = rows.row_starts[sessions], rows.row_starts[np.array(sessions) + 1]
    most = int((ends - starts).max())
    index = np.minimum(starts[:, None] + np.arange(most), ends[:, None] - 1)  # [G, M]
    real = starts[:, None] + np.arange(most) < ends[:, None]
    longest = max(len(slots) for slots, _ in seen)
    slots = np.empty((len(sessions), longest), np.int64)
    mask = np.zeros((len(sessions), 1, most, longest), np.bool_)
    for i, (own_slots, own_mask) in enumerate(seen):
        slots[i, : len(own_slots)] = own_slots
        slots[i, len(own_slots) :] = own_slots[0]  # masked, but unwritten memory may hold NaN
        mask[i, 0, :, : len(own_slots)] = own_mask[index[i] - starts[i]]
    arrays = (index, slots, np.flatnonzero(real), index[real])
    index_t, slots_t, picked_t, packed_t = (_index(array, device) for array in arrays)
    return _Group(index_t, slots_t, torch.from_numpy(mask).to(device), picked_t, packed_t)


def _seen_slots(rows: PackedRows, session: int) -> tuple[Int64Array, BoolArray]:
    """Return the slots that the session sees, i64[L], and which row sees which slot, bool[M, L]."""
    first, end = rows.row_starts[session], rows.row_starts[session + 1]
    ctx_lens = rows.ctx_lens[first:end]
    context = int(ctx_lens.max())
    extra_starts = rows.extra_starts[first : end + 1]
    extras = rows.extras[extra_starts[0] : extra_starts[-1]]
    nodes, column = np.unique(extras, return_inverse=True)
    mask = np.zeros((end - first, context + len(nodes)), np.bool_)
    mask[:, :context] = np.arange(context) < ctx_lens[:, None]
    owner = np.repeat(np.arange(end - first), np.diff(extra_starts))
    mask[owner, context + column] = True
    return np.concatenate([rows.tables[session][:context], nodes]).astype(np.int64), mask


def _index(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device)
