"""What a caller requests from a step besides judgements, and what a step returns.

Hidden states and logits stay on the engine's device. This module never copies them or waits for a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specq.protocol.arrays import Int32Array
from specq.protocol.types import Judgement, Logprobs, SessionStep

FINAL = -1  # as a layer: the output of the last layer after the final norm, the input of the head
NO_DRAFTS = -1  # of the engine's own drafter


@dataclass(frozen=True, slots=True)
class Tap:
    """Hidden states that a step returns.

    - `layers`: i means the residual stream after layer i, counted from 0, or FINAL. Empty: no hidden states.
    - `chunks`: ids of sessions whose token rows are all requested. For other sessions it is only the judged row, the
      last.
    - `drafts`: how many tokens the engine's own drafter drafts for each session behind the step. 0: it only follows the
      texts. NO_DRAFTS: it does not.
    """

    layers: tuple[int, ...] = ()
    chunks: frozenset[int] = frozenset()
    drafts: int = NO_DRAFTS

    def num_rows(self, step: SessionStep) -> int:
        """Return how many rows of a step are requested: the last rows of its tokens and nodes, in order."""
        if step.session_id in self.chunks:
            return len(step.token_ids) + step.tree.num_nodes
        return step.num_judged_rows


NO_TAP = Tap()


@dataclass(frozen=True, slots=True, eq=False)
class SessionRows:
    """Some rows of each step of a call.

    - `values`: [n, width], on the engine's device, in the model's dtype or float32. Step i has values[starts[i] :
      starts[i + 1]]. They belong to the caller: no later step writes to them.
    - `starts`: i32[steps + 1].
    - `layers`: the layers of the hidden states. Their numbers are side by side as columns of equal width. (): unknown.
    """

    values: Any
    starts: Int32Array
    layers: tuple[int, ...] = ()

    def of(self, index: int) -> Any:
        """Return the rows of one step."""
        return self.values[int(self.starts[index]) : int(self.starts[index + 1])]

    def columns(self, values: Any, layers: tuple[int, ...]) -> Any:
        """Return the columns of the given layers from some of the rows, [n, width of the layers]."""
        if layers == self.layers or not self.layers:
            return values
        places = [self.layers.index(layer) for layer in layers]
        return values.reshape(len(values), len(self.layers), -1)[:, places].reshape(len(values), -1)


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What a step returns.

    - `judgements`: of the steps with `judged`, in order.
    - `hidden`: the tap's rows of each step, with the layers side by side as columns. None without a tap.
    - `scratch_logits`: [scratch rows, vocab] of each step. None without scratch rows.
    - `judge_s`: seconds of the call that judging took. 0 if that cannot be measured, as on a GPU.
    - `scored`: the log-probabilities of scored rows, by the place of their step.
    - `drafts`: i32[steps, n]: what the engine's own drafter drafts behind each step. None: nothing.
    """

    judgements: Sequence[Judgement]
    hidden: SessionRows | None = None
    scratch_logits: SessionRows | None = None
    judge_s: float = 0.0
    scored: Mapping[int, Logprobs] = field(default_factory=dict)
    drafts: Int32Array | None = None
