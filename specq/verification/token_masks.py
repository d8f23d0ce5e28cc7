"""The masks of a step's sessions with a grammar: which tokens each row of target logits may have."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from specq.protocol import Int32Array, IntpArray, SessionStep
from specq.verification.judgements import ends_of


def host_memory(size: int) -> Int32Array:
    """Return i32[size], not initialised. If this process uses a GPU, the GPU can read it without a copy."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found: Int32Array = torch.empty(size, dtype=torch.int32, pin_memory=True).numpy()
        return found
    return np.empty(size, np.int32)


class JudgedSteps(Protocol):
    """What masks depend on, of the steps of a batch that are judged: see `StepBatch`."""

    session_ids: list[int]
    num_nodes: IntpArray

    def __getitem__(self, index: int, /) -> SessionStep: ...

    def __iter__(self) -> Iterator[SessionStep]: ...


class MaskedSteps(NamedTuple):
    """The masks of some steps, one step's rows after the other.

    - `places`: i64[n] of the steps in their batch, ascending.
    - `counts`: i64[n], the rows of each step: 1 + its nodes.
    - `words`: i32[rows, words], a bit for each token, the lowest bit first.
    """

    places: IntpArray
    counts: IntpArray
    words: Int32Array

    @staticmethod
    def of(found: Mapping[int, Int32Array]) -> MaskedSteps:
        """Return the masks i32[rows, words] of steps by their places, in ascending order."""
        places, parts = np.array([*found], np.intp), [*found.values()]
        words = np.concatenate(parts) if parts else np.zeros((0, 0), np.int32)
        return MaskedSteps(places, np.array([len(part) for part in parts], np.intp), words)

    def each(self) -> Iterator[tuple[int, Int32Array]]:
        """Yield the place and the masks of each step."""
        ends = ends_of(self.counts).tolist()
        for place, first, end in zip(self.places.tolist(), [0, *ends], ends, strict=False):
            yield place, self.words[first:end]


class TokenMasks(ABC):
    """The masks of a step's sessions: which tokens a row of target logits may have. All others become -inf.

    Sessions without a grammar have none. The judge asks for the masks when it begins, so a device computes the forward
    pass meanwhile.
    """

    @abstractmethod
    def of(self, judged: JudgedSteps) -> MaskedSteps:
        """Return the masks of the judged steps with a grammar.

        All tokens of the batch must be known. A row that no text of the grammar can reach may have any mask that is not
        empty. Called again, also for a part of the steps, it returns the same. They may not be used longer than this
        object.
        """

    def reason(self, session_id: int) -> str:
        """Return why a session's masks allow nothing, or ""."""
        return ""

    def ready(self, judged: JudgedSteps) -> ReadyTokenMasks:
        """Return the masks of the judged steps, which can be sent to another process."""
        found = {judged.session_ids[place]: own.copy() for place, own in self.of(judged).each()}
        return ReadyTokenMasks(found, {own: self.reason(own) for own in found})


class ReadyTokenMasks(TokenMasks):
    """Masks that are known already, by session. They can be sent to another process."""

    def __init__(self, words: Mapping[int, Int32Array], reasons: Mapping[int, str]) -> None:
        self._words, self._reasons = dict(words), dict(reasons)

    def of(self, judged: JudgedSteps) -> MaskedSteps:
        """See `TokenMasks`."""
        return MaskedSteps.of({i: self._words[own] for i, own in enumerate(judged.session_ids) if own in self._words})

    def reason(self, session_id: int) -> str:
        """See `TokenMasks`."""
        return self._reasons.get(session_id, "")
