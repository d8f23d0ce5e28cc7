"""What a verifier needs from heads that draft from the target's own hidden states: the likeliest tokens, in arrays.

`specq.drafting.medusa.drafter` implements this interface. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from specq.drafting.interface import Pending
from specq.drafting.trees.ranked import Ranked
from specq.protocol import SamplingParams


class HiddenRow(NamedTuple):
    """One row of hidden states [n, hidden], on any device."""

    values: Any
    row: int


class HeadSource(Protocol):
    """Heads, called by one thread. They keep no data of a context."""

    num_heads: int

    def start(
        self, states: Sequence[HiddenRow], params: Sequence[SamplingParams], lengths: Sequence[int], count: int
    ) -> Pending[Ranked]:
        """Begin to rank the tokens after some contexts, at most `count` tokens a position.

        states    of the row from which the target made each context's last token.
        lengths   of the contexts.
        """
        ...
