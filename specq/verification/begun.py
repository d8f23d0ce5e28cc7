"""Judging in two halves: a GPU chooses the target's own tokens at once, and the host reads them later.

A step may have no drafts and a strategy that emits the target's own token. `Judging.tokens` is then on the device as
soon as it is computed. The next step may begin with it. The device also shapes the logits and computes
log-probabilities. If drafts are judged by the target's own tokens alone, the device chooses these tokens. Meanwhile the
host prepares to follow them. All other steps are judged in `finish`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from specq.protocol import EngineError, Float32Array, Int32Array, Logprobs, SessionStep
from specq.verification import strategy
from specq.verification.devices import target_rows
from specq.verification.host_kernels import Rows
from specq.verification.host_logits import Logits
from specq.verification.judge import judge_each
from specq.verification.judgements import Judgements
from specq.verification.logprobs import BegunLogprobs
from specq.verification.masking import mask
from specq.verification.packing import Packed, Placed, pack, place
from specq.verification.processors import shaped
from specq.verification.step_batch import SHAPED, WITH_LOGPROBS, StepBatch
from specq.verification.target_rows import check_numbers
from specq.verification.transfers import Fetched, to_device

if TYPE_CHECKING:
    import torch


def says_own(batch: StepBatch) -> bool:
    """Return whether all judged steps emit the target's own tokens and have no drafts.

    Parameters may shape the logits. The tokens are then on the device once judging has begun (`Judging.tokens`).
    """
    judged = compress(batch.params, batch.is_judged.tolist())
    return not len(batch.parents) and all(strategy(params.strategy).says_own(params) for params in judged)


def follows_own(judged: StepBatch) -> bool:
    """Return whether such steps are judged by the target's own tokens alone.

    With drafts, no step may ask for shaped logits or log-probabilities.
    """
    if not len(judged.parents):
        return says_own(judged)
    if np.count_nonzero(judged.traits & (SHAPED | WITH_LOGPROBS)):
        return False
    names = {params.strategy for params in judged.params}
    return len(names) == 1 and all(map(strategy(names.pop()).follows_own, judged.params))


class OwnTokens:
    """Each row's own token, on its way to the host.

    `tokens`: i32[rows] on the device. A row without a token (its logits are not numbers) has an arbitrary one.
    """

    def __init__(self, best: torch.Tensor) -> None:
        """Start the copy to the host.

        `best` i32[3, rows] has for each row the bits of the largest score and its token. The third row has a token that
        is valid in any case.
        """
        self.tokens, self._found = best[2], Fetched(best[:2])

    def wait(self) -> Int32Array:
        """Return i32[rows] on the host.

        Raises EngineError if a row has no token.
        """
        bits, tokens = self._found.wait()
        highest: Float32Array = bits.view(np.float32)
        check_numbers(bool(np.isfinite(highest).all()))
        own: Int32Array = tokens.copy()
        return own


def own_tokens(logits: Logits, rows: Rows) -> OwnTokens | None:
    """Let the device choose each row's own token, if it can: see `TargetRows.own_tokens`."""
    begin = getattr(target_rows(logits), "begin_own_tokens", None)
    return None if begin is None else OwnTokens(begin(rows))


class AskedLogprobs:
    """The log-probabilities that some steps ask for, each for its one emitted token, on their way to the host."""

    def __init__(self, judged: StepBatch, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Start to compute them.

        `logits` [judged, vocab] are the plain ones. `tokens` i32[judged] are on the device.
        """
        asking: dict[int, list[int]] = {}
        for at in (judged.traits & WITH_LOGPROBS).nonzero()[0].tolist():
            asking.setdefault(judged.params[at].logprobs, []).append(at)
        self._parts = []
        for num_top, places in asking.items():
            index = to_device(np.array(places, np.int64), logits.device)
            self._parts.append((places, BegunLogprobs(logits[index], tokens[index].long(), num_top)))

    def wait(self) -> dict[int, Logprobs]:
        """Return them by the places of the steps."""
        found = {}
        for places, begun in self._parts:
            values, top_ids = begun.wait()
            for i, at in enumerate(places):
                found[at] = Logprobs(values[i, :1].copy(), top_ids[i : i + 1].copy(), values[i : i + 1, 1:].copy())
        return found


@dataclass(frozen=True, slots=True)
class Begun:
    """Steps whose own tokens the device chooses, with their rows and these tokens.

    `logprobs`: the requested ones. None with drafts.
    """

    placed: Placed
    packed: Packed
    own: OwnTokens
    logprobs: AskedLogprobs | None

    def finish(self) -> Judgements:
        """Wait for the judgements.

        Raises EngineError if a row has no token.
        """
        tokens = self.own.wait()
        batch = self.placed.batch.known()
        if not len(batch.parents):
            found = Judgements.of_tokens(batch.session_ids, tokens)
            return found if self.logprobs is None else found.with_logprobs(self.logprobs.wait())
        placed = Placed(batch, self.placed.first_rows)
        packed = self.packed if batch.parents is self.placed.batch.parents else pack(placed)
        return strategy(batch.params[0].strategy).judge_by_own(placed, packed, tokens)


@dataclass(frozen=True, slots=True)
class Judging:
    """The judged steps and their logits, which must not change until judging is finished."""

    judged: StepBatch
    logits: Logits
    begun: Begun | None

    @property
    def tokens(self) -> torch.Tensor | None:
        """Return the emitted token of each step, i32[judged] on the device, if it is known there. Else return None."""
        return None if self.begun is None or len(self.judged.parents) else self.begun.own.tokens

    def finish(self) -> Judgements:
        """Wait for the judgements: see `judge_each`."""
        if self.begun is None:
            return judge_each(self.judged.known(), self.logits)
        try:
            return self.begun.finish()
        except EngineError:  # find the row at fault
            return judge_each(self.judged.known(), self.logits)


def begin(steps: Sequence[SessionStep], logits: Logits) -> Judging:
    """Begin to judge. Arguments as for `judge_each`."""
    judged = StepBatch.of(steps).judged()
    if not len(judged):
        return Judging(judged, logits, None)
    if judged.masks is not None:
        if judged.drafted is not None:  # masks follow from tokens that the host has not read
            return Judging(judged, logits, None)
        mask(place(judged), logits)  # while the device computes
    if not follows_own(judged):
        return Judging(judged, logits, None)
    try:
        return Judging(judged, logits, _begun(judged, logits))
    except EngineError:  # `finish` finds the row at fault
        return Judging(judged, logits, None)


def _begun(judged: StepBatch, logits: Logits) -> Begun | None:
    """Let the device choose the own tokens of steps, if it can.

    Raises EngineError for a step whose logits cannot be shaped.
    """
    placed = place(judged)
    packed = pack(placed)
    with shaped(placed, logits) as rows:
        own = own_tokens(rows, packed.rows)
    if own is None or isinstance(logits, np.ndarray):
        return None
    has_logprobs = np.count_nonzero(judged.traits & WITH_LOGPROBS)
    return Begun(placed, packed, own, AskedLogprobs(judged, logits, own.tokens) if has_logprobs else None)
