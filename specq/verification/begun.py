"""Judging in two halves: on a GPU, the target's own tokens are chosen without the host, which looks at them later.

Where a step drafted nothing, its strategy says the target's own token, and nothing of the host's is needed, `Judging.tokens` is on the
device as soon as that has come so far: the next step may begin with it. Where drafts are judged by the target's own tokens alone, these are
chosen meanwhile, too, and the host prepares what it needs to follow them. Everything else is judged when it is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specq.protocol import EngineError, Float32Array, Int32Array, SessionStep
from specq.verification import strategy
from specq.verification.devices import target_rows
from specq.verification.faults import judge_each
from specq.verification.judgements import Judgements
from specq.verification.packing import Packed, Placed, pack, place
from specq.verification.row_params import Rows
from specq.verification.step_batch import StepBatch
from specq.verification.target_rows import check_numbers
from specq.verification.transfers import Fetched


def says_own(judged: StepBatch) -> bool:
    """Return whether all that such steps say are the target's own tokens, and nothing else is asked for."""
    if len(judged.parents) or np.count_nonzero(judged.traits):
        return False
    return all(strategy(params.strategy).says_own(params) for params in judged.params)


def follows_own(judged: StepBatch) -> bool:
    """Return whether such steps are judged by the target's own tokens alone, and nothing else is asked for."""
    if np.count_nonzero(judged.traits):
        return False
    if not len(judged.parents):
        return says_own(judged)
    names = {params.strategy for params in judged.params}
    return len(names) == 1 and all(map(strategy(names.pop()).follows_own, judged.params))


class OwnTokens:
    """Each row's own token, on its way to the host.

    tokens  i32[rows] on the device: of a row without a token (its logits are not numbers) any other
    """

    def __init__(self, best: torch.Tensor) -> None:
        """`best` i32[3, rows]: of each row the bits of the largest score, its token, and a token that is one even where there is none."""
        self.tokens, self._found = best[2], Fetched(best[:2])

    def wait(self) -> Int32Array:
        """Return i32[rows] on the host; raises EngineError where a row has no token."""
        bits, tokens = self._found.wait()
        highest: Float32Array = bits.view(np.float32)
        check_numbers(bool(np.isfinite(highest).all()))
        own: Int32Array = tokens.copy()
        return own


def own_tokens(logits: torch.Tensor, rows: Rows) -> OwnTokens | None:
    """Let the device choose each row's own token, if it can do so by itself; see `TargetRows.own_tokens`."""
    begin = getattr(target_rows(logits), "begin_own_tokens", None)
    return None if begin is None else OwnTokens(begin(rows))


@dataclass(frozen=True, slots=True)
class Begun:
    """Steps whose own tokens the device chooses, their rows, and these tokens."""

    placed: Placed
    packed: Packed
    own: OwnTokens

    def finish(self) -> Judgements:
        """Wait for the judgements; raises EngineError where a row has no token."""
        tokens = self.own.wait()
        batch = self.placed.batch.known()
        if not len(batch.parents):
            return Judgements.of_tokens(batch.session_ids, tokens)
        placed = Placed(batch, self.placed.first_rows)
        return strategy(batch.params[0].strategy).judge_by_own(placed, self.packed, tokens)


@dataclass(frozen=True, slots=True)
class Judging:
    """What is being judged: the steps that are, and their logits, which stay as they are until it is finished."""

    judged: StepBatch
    logits: torch.Tensor
    begun: Begun | None

    @property
    def tokens(self) -> torch.Tensor | None:
        """The token that each of the steps says, i32[judged] on the device, if that is known there already."""
        return None if self.begun is None or len(self.judged.parents) else self.begun.own.tokens

    def finish(self) -> Judgements:
        """Wait for the judgements; see `judge_each`."""
        if self.begun is None:
            return judge_each(self.judged.known(), self.logits)
        try:
            return self.begun.finish()
        except EngineError:  # which of them it is
            return judge_each(self.judged.known(), self.logits)


def begin(steps: Sequence[SessionStep], logits: torch.Tensor) -> Judging:
    """Begin to judge; arguments as of `judge_each`."""
    judged = StepBatch.of(steps).judged()
    if not len(judged) or not follows_own(judged):
        return Judging(judged, logits, None)
    placed = place(judged)
    packed = pack(placed)
    own = own_tokens(logits, packed.rows)
    return Judging(judged, logits, None if own is None else Begun(placed, packed, own))
