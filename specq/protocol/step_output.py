"""What a caller asks of a step besides judgements, and what a step returns.

Hidden states and logits stay where the engine computes: nothing here copies them or waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specq.protocol.arrays import Int32Array
from specq.protocol.types import Judgement, SessionStep

FINAL = -1  # as a layer: the last one's output after the final norm, of which the head makes logits


@dataclass(frozen=True, slots=True)
class Tap:
    """Hidden states that a step returns.

    layers  i: the residual stream after layer i, counted from 0; or FINAL. Empty: no hidden states
    chunks  sessions all of whose token rows are wanted; of other sessions it is only the row that is judged, the last
            one
    """

    layers: tuple[int, ...] = ()
    chunks: frozenset[int] = frozenset()

    def num_rows(self, step: SessionStep) -> int:
        """Return how many rows of a step are wanted: the last ones of its tokens and nodes, in their order."""
        if step.session_id in self.chunks:
            return len(step.token_ids) + step.tree.num_nodes
        return step.num_judged_rows


NO_TAP = Tap()


@dataclass(frozen=True, slots=True, eq=False)
class SessionRows:
    """Some rows of each of a call's steps.

    values  [n, width], on the engine's device, in the model's dtype or float32: step i has values[starts[i] : starts[i
            + 1]]. It is the caller's: no later step writes to it
    starts  i32[steps + 1]
    layers  of hidden states: whose numbers lie beside each other as columns, as many of each; () where that is not said
    """

    values: Any
    starts: Int32Array
    layers: tuple[int, ...] = ()

    def of(self, index: int) -> Any:
        """Return the rows of one step."""
        return self.values[int(self.starts[index]) : int(self.starts[index + 1])]

    def columns(self, values: Any, layers: tuple[int, ...]) -> Any:
        """Return the columns of these layers of some of the rows, [n, width of these]."""
        if layers == self.layers or not self.layers:
            return values
        places = [self.layers.index(layer) for layer in layers]
        return values.reshape(len(values), len(self.layers), -1)[:, places].reshape(len(values), -1)


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What a step returns.

    judgements      of the steps with `judged`, in order
    hidden          None without a tap; else its rows of each step, the layers beside each other as columns
    scratch_logits  None without scratch rows; else [scratch rows, vocab] of each step
    judge_s         of the call's seconds, those that judging took; 0 where that cannot be told apart, as on a GPU
    """

    judgements: Sequence[Judgement]
    hidden: SessionRows | None = None
    scratch_logits: SessionRows | None = None
    judge_s: float = 0.0
