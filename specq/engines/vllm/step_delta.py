"""The message from the host to the workers: the difference from the step before. Pure.

Most steps of generating sessions continue where the step before ended. Then the message only lists the sessions that
hold new blocks of KV memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specq.protocol import NO_DRAFTS, SamplingParams
from specq.verification import StepBatch, TokenMasks

Blocks = tuple[list[int], ...]  # ids, of each KV group


@dataclass(slots=True)
class StepDelta:
    """The changes in a step of n requests. Integers are the places of requests among the n.

    - request_ids: ids of its requests; None: those of the step before.
    - batch: the steps of their sessions, without parameters and masks. None: each session continues by one token
      (`StepBatch.further`).
    - params: parameters of new sessions, and of sessions whose parameters changed.
    - new: vLLM's `NewRequestData` of requests that the workers do not know.
    - blocks: new blocks of the other requests.
    - ended: ids of requests that have ended.
    - zeroed: new blocks that the workers must zero.
    - even_length: rows of each request, if padded; 0: not padded.
    - feeds: whether the next step may begin with the tokens of this one.
    - masks: those of the step; None: it has none, or it is judged late.
    - is_judged_late: whether its masks come with a later message; see `specq.engines.OverlappingEngine`.
    - late: the number under which draft tokens arrive that the host has not read (`late_tokens`). 0: there are none.
    - drafts: how many tokens vLLM's drafter drafts behind the step (`Tap.drafts`).
    """

    request_ids: list[str] | None
    batch: StepBatch | None
    params: dict[int, SamplingParams]
    even_length: int
    feeds: bool
    new: dict[int, Any] = field(default_factory=dict)
    blocks: dict[int, Blocks] = field(default_factory=dict)
    ended: Sequence[str] = ()
    zeroed: list[int] | None = None
    masks: TokenMasks | None = None
    is_judged_late: bool = False
    late: int = 0
    drafts: int = NO_DRAFTS


class LatestStep:
    """The newest step that a worker has received.

    - request_ids: ids of its requests.
    """

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        self._batch: StepBatch | None = None
        self._params: dict[str, SamplingParams] = {}  # of each request that has not ended

    def apply(self, delta: StepDelta) -> StepBatch:
        """Apply the changes; return the whole step, with parameters."""
        if delta.request_ids is not None:
            self.request_ids = delta.request_ids
        if delta.batch is None:
            assert self._batch is not None
            batch = self._batch.further()
        else:
            batch = delta.batch
            self._params |= {self.request_ids[place]: params for place, params in delta.params.items()}
            batch.params = [self._params[name] for name in self.request_ids]
        for name in delta.ended:
            self._params.pop(name, None)
        batch.masks, self._batch = delta.masks, batch
        return batch
