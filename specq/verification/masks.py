"""Masks of grammars: which tokens a row of target logits may have. All others get the logit -inf before judging.

A mask is i32[words] with a bit for each token, the lowest bit first. The logits are changed in place, before any other
parameter shapes them. So a grammar is a part of the target, and log-probabilities are those of the masked distribution.

A `StepBatch` carries the masks of its sessions as one object. It is asked when the judge begins, so a device computes
the forward pass meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from specq.protocol import Int32Array

if TYPE_CHECKING:
    from specq.verification.step_batch import StepBatch


class Masks(ABC):
    """The masks of a step's sessions. Sessions without a grammar have none."""

    @abstractmethod
    def of(self, judged: StepBatch) -> Mapping[int, Int32Array]:
        """Return the masks i32[1 + nodes, words] of the judged steps with a grammar, by their place in the batch.

        All tokens of the batch must be known. A row that no text of the grammar can reach may have any mask that is not
        empty. Called again, it returns the same.
        """

    def reason(self, session_id: int) -> str:
        """Return why a session's masks allow nothing, or ""."""
        return ""


class ReadyMasks(Masks):
    """Masks that are known already, by session. They can be sent to another process."""

    def __init__(self, words: Mapping[int, Int32Array], reasons: Mapping[int, str]) -> None:
        self._words, self._reasons = dict(words), dict(reasons)

    def of(self, judged: StepBatch) -> Mapping[int, Int32Array]:
        """See `Masks`."""
        return {i: self._words[own] for i, own in enumerate(judged.session_ids) if own in self._words}

    def reason(self, session_id: int) -> str:
        """See `Masks`."""
        return self._reasons.get(session_id, "")


def num_words(vocab_size: int) -> int:
    """Return the number of 32-bit words of a mask."""
    return (vocab_size + 31) // 32
