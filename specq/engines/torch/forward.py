"""What the two forwards share: the KV tensors and the shape of a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch

from specq.engines.torch.rows import PackedRows


@dataclass(frozen=True, slots=True)
class KvStore:
    """Keys and values of all layers, each [num_layers, num_kv_heads, num_slots, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def num_slots(self) -> int:
        return self.keys.shape[2]


class ForwardOutput(NamedTuple):
    """Of the J judged rows: logits [J, vocab_size], and hidden [J, hidden_size] after the final norm."""

    logits: torch.Tensor
    hidden: torch.Tensor


class Forward(Protocol):
    """Runs packed rows: writes their KV into `kv` and returns what the judged rows say.

    ARITHMETIC   names its kernels: forwards of other kernels round otherwise
    """

    ARITHMETIC: ClassVar[str]
    kv: KvStore

    def __call__(self, rows: PackedRows) -> ForwardOutput: ...
