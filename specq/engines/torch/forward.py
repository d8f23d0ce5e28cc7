"""What the forwards of torch share: KV tensors, and tokens that only the device knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from specq.engines.native.flights import Flight, Unread
from specq.engines.native.loaded import Forward, ForwardOutput
from specq.engines.native.pass_times import PassWork
from specq.engines.native.rows import LinePlaces, PackedRows, RowTap
from specq.protocol import Int32Array, Int64Array
from specq.verification import StepBatch, places_of
from specq.verification.begun import Judging
from specq.verification.transfers import to_device


def work_of(model: Any) -> PassWork:
    """Return what a pass of a torch module does."""
    sizes = [(one.numel(), one.element_size()) for one in model.parameters()]
    return PassWork(sum(count * size for count, size in sizes), sum(count for count, _ in sizes))


@dataclass(frozen=True, slots=True)
class KvStore:
    """Keys and values of all layers, each [num_layers, num_kv_heads, num_slots, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def num_slots(self) -> int:
        return self.keys.shape[2]

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def copy(self, slots: Int32Array) -> None:
        """Copy the contents of some slots to others, i32[2, n]. All slots are read before one is written.

        On a GPU the copy runs in order with the steps.
        """
        sources, targets = to_device(slots.astype(np.int64), self.keys.device)
        for held in (self.keys, self.values):
            held.index_copy_(2, targets, held.index_select(2, sources))


class FedLines(NamedTuple):
    """Tree nodes whose ancestors only the device knows; packed rows i64[n].

    - lines: i32[levels, any], as in `specq.verification.DeviceLines`.
    - places: i64[n], the columns of `lines` for the nodes of the rows.
    - firsts: i64[n], the row of the first node of each node's tree.
    """

    lines: torch.Tensor
    places: Int64Array
    rows: Int64Array
    firsts: Int64Array

    def put(self, block: torch.Tensor, slots: torch.Tensor, where: LinePlaces) -> None:
        """Write the slots of lines to a block, i32[any], on the device, without waiting.

        `slots`, i32[rows], are the slots of all rows. Lines of other rows, whose nodes the host has read, do not
        change.
        """
        which = np.full(int(max(self.rows.max(), where.rows.max(initial=0))) + 1, -1, np.int64)
        which[self.rows] = np.arange(len(self.rows))
        is_own = which[where.rows] >= 0
        own, starts, levels = which[where.rows[is_own]], where.starts[is_own], where.levels[is_own]
        numbers = np.stack([starts, levels * self.lines.shape[1] + self.places[own], self.firsts[own]])
        starts_there, flat, firsts = to_device(numbers, block.device)
        rows = self.lines.reshape(-1).index_select(0, flat).long() + firsts
        block.index_copy_(0, starts_there, slots.index_select(0, rows))


class Feed(NamedTuple):
    """Tokens that only the device knows.

    Packed rows i64[n] take tokens[places], places i64[n], instead of the tokens from the host. For nodes of trees,
    `lines` describes lines that the host does not know either.
    """

    tokens: torch.Tensor
    places: Int64Array
    rows: Int64Array
    lines: FedLines | None = None

    def put(self, token_ids: torch.Tensor) -> None:
        """Write the tokens to a pass's input i32[rows] on the device, without waiting."""
        count = len(self.rows)
        first, place = int(self.rows[0]), int(self.places[0])
        straight = np.arange(count)
        if np.array_equal(self.rows - first, straight) and np.array_equal(self.places - place, straight):
            token_ids[first : first + count].copy_(self.tokens[place : place + count])
            return
        rows, places = to_device(np.stack([self.rows, self.places]), token_ids.device)
        token_ids.index_copy_(0, rows, self.tokens.index_select(0, places))


@runtime_checkable
class FedForward(Forward, Protocol):
    """A forward that returns early, and can take its input from the device."""

    is_fed: ClassVar[bool]

    def __call__(self, rows: PackedRows, tap: RowTap | None = None, feed: Feed | None = None) -> ForwardOutput: ...


def feed_of(batch: StepBatch, unread: Unread | None, after: Flight | None) -> dict[str, Any]:
    """Return the `feed` argument of a forward pass: tokens of the step before or of a draft model.

    Empty if the pass takes no such tokens.
    """
    if unread is not None and batch.drafted is not None:
        assert batch.fed_by is None, "a step behind another one has no drafts"
        places, lines = places_of(unread.handles), None
        if batch.drafted.tree is not None:
            first_nodes = batch.first_rows + batch.num_tokens
            firsts = first_nodes[first_nodes.searchsorted(unread.rows, "right") - 1]
            lines = FedLines(batch.drafted.tree.lines, places, unread.rows, firsts)
        return {"feed": Feed(batch.drafted.tokens, places, unread.rows, lines)}
    if batch.fed_by is None:
        return {}
    tokens = after.judging.tokens if after is not None and isinstance(after.judging, Judging) else None
    assert tokens is not None, "only the step in flight can feed the next one"
    is_fed = batch.fed_by >= 0
    return {"feed": Feed(tokens, batch.fed_by[is_fed].astype(np.int64), batch.first_rows[is_fed])}
