"""What the forwards share: KV tensors, requested hidden states, and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from specq.engines.native.rows import LinePlaces, PackedRows, RowTap
from specq.protocol import Int32Array, Int64Array, SessionStep, Tap
from specq.verification import StepBatch, ends_of
from specq.verification.transfers import to_device


@dataclass(frozen=True, slots=True)
class KvStore:
    """Keys and values of all layers, each [num_layers, num_kv_heads, num_slots, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def num_slots(self) -> int:
        return self.keys.shape[2]

    def copy(self, slots: Int32Array) -> None:
        """Copy the contents of some slots to others, i32[2, n]. All slots are read before one is written.

        On a GPU the copy runs in order with the steps.
        """
        sources, targets = to_device(slots.astype(np.int64), self.keys.device)
        for held in (self.keys, self.values):
            held.index_copy_(2, targets, held.index_select(2, sources))


def tapped_rows(steps: Sequence[SessionStep], tap: Tap) -> tuple[Int32Array, Int32Array]:
    """Return the packed rows of a tap, i32[n], and where the rows of each step begin, i32[steps + 1]."""
    batch = StepBatch.of(steps)
    counts = batch.is_judged * (1 + batch.num_nodes)
    if tap.chunks:
        is_whole = np.array([session_id in tap.chunks for session_id in batch.session_ids], np.bool_)
        counts = np.where(is_whole, batch.sizes, counts)
    ends = ends_of(counts)
    behind = batch.first_rows + batch.sizes - ends  # for each step: how far its rows are ahead of the requested rows
    rows = np.arange(ends[-1] if len(ends) else 0) + behind.repeat(counts)
    return rows.astype(np.int32), np.concatenate([[0], ends]).astype(np.int32)


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


class ForwardOutput(NamedTuple):
    """Logits [J, vocab_size] of the J `logit_rows`, and hidden [J, hidden_size] after the final norm.

    - tapped: None without a tap. Else [n, layers * hidden_size] for the rows of the tap, the layers side by side.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    tapped: torch.Tensor | None = None


class Forward(Protocol):
    """Runs packed rows: it writes their KV to `kv` and returns the outputs of the rows in `logit_rows`.

    - num_tap_layers, is_helped, jumps: as in `specq.engines.Engine`.
    - ARITHMETIC: name of its kernels. Forwards with other kernels round differently.
    """

    ARITHMETIC: ClassVar[str]
    kv: KvStore
    num_tap_layers: int
    is_helped: bool
    jumps: tuple[int, ...]

    def __call__(self, rows: PackedRows, tap: RowTap | None = None) -> ForwardOutput: ...


@runtime_checkable
class FedForward(Forward, Protocol):
    """A forward that returns early, and can take its input from the device."""

    is_fed: ClassVar[bool]

    def __call__(self, rows: PackedRows, tap: RowTap | None = None, feed: Feed | None = None) -> ForwardOutput: ...
