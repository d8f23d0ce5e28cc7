"""A toy engine with steps in flight, as on a GPU.

It tests code that launches a step before the last one is collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specq.engines import Launched, check_asked
from specq.protocol import NO_TAP, EngineError, Int32Array, Judgement, ModelInfo, SessionStep, StepOutput, Tap
from specq.testing.toy import ToyEngine
from specq.verification import StepBatch, is_handle

POISON = 7  # emitted for a closed session and for one that fails, and placed where a token is unknown


@dataclass(eq=False)
class LateStep:
    """A step in flight. Implements `specq.engines.Launched`."""

    engine: LateEngine
    batch: StepBatch
    tap: Tap
    after: LateStep | None
    closed: set[int] = field(default_factory=set)
    tokens: Int32Array | None = None  # of the judged sessions, once it is collected
    error: Exception | None = None  # raised by collection

    @property
    def feeds(self) -> bool:
        """See `Launched`."""
        return not len(self.batch.parents)

    def judge(self) -> None:
        """See `specq.engines.OverlappingEngine`. It is judged when it is collected."""

    def collect(self) -> StepOutput:
        """See `Launched`."""
        return self.engine.collect(self)

    def discard(self) -> None:
        """See `Launched`."""
        assert self is self.engine.flights[-1], "not the newest step"
        self.engine.flights.remove(self)
        self.engine.num_discarded += 1


class LateEngine(ToyEngine):
    """Computes when a step is collected, with the tokens of the step before.

    It checks the order of calls, and the KV lengths of the sessions.

    - `failing`: errors that collection raises, by the number of the launch.
    - `most`: the maximum number of steps in flight at once.
    - `num_discarded`: number of discarded steps.
    - `is_apart`: as for an engine whose steps other processes launch.
    """

    overlaps = takes_unread = True
    is_apart = False

    def __init__(self, info: ModelInfo | None = None, *, max_chain: int = 0) -> None:
        super().__init__(info, max_chain=max_chain)
        self.flights: list[LateStep] = []
        self.failing: dict[int, Exception] = {}
        self.num_launched = self.num_discarded = self.most = 0

    @property
    def free_slots(self) -> int:
        """See `Engine`. Steps in flight have slots."""
        return super().free_slots - sum(int(late.batch.num_rows.sum()) for late in self.flights)

    def close(self, session_id: int) -> None:
        """See `Engine.close`."""
        for late in self.flights:
            late.closed.add(session_id)
        super().close(session_id)

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        """See `Engine.step`."""
        return self.launch(steps, tap).collect()

    def launch(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP, after: Launched | None = None) -> LateStep:
        """See `OverlappingEngine.launch`."""
        check_asked(self, steps, tap)
        batch = StepBatch.of(steps)
        assert len(self.flights) < (3 if self.is_apart else 2), "so many steps are in flight already"
        assert after is (self.flights[-1] if self.flights else None), "the step that is in flight is not named"
        if int(batch.num_rows.sum()) > self.free_slots:
            raise EngineError("no slots")
        for session_id, start in zip(batch.session_ids, batch.starts.tolist(), strict=True):
            assert start == self._length(session_id), "start is not the KV length"
        assert after is None or isinstance(after, LateStep)
        assert batch.fed_by is None or (after is not None and after.feeds), "fed by a step that cannot"
        fed = () if batch.fed_by is None else (batch.fed_by >= 0).nonzero()[0].tolist()
        assert not any(batch.params[i].needs_history for i in fed), "what is said depends on a token that is not known"
        late = LateStep(self, batch, tap, after)
        self.flights.append(late)
        self.num_launched += 1
        self.most = max(self.most, len(self.flights))
        late.error = self.failing.pop(self.num_launched, None)
        return late

    def _length(self, session_id: int) -> int:
        """Return a session's KV length when all steps in flight have ended."""
        in_flight = [late.batch for late in self.flights if session_id not in late.closed]
        counts = [
            int(of.num_tokens[of.session_ids.index(session_id)]) for of in in_flight if session_id in of.session_ids
        ]
        return len(self.contexts[session_id]) + sum(counts)

    def collect(self, late: LateStep) -> StepOutput:
        """See `Launched.collect`."""
        assert late is self.flights[0], "not the oldest step"
        self.flights.remove(late)
        if late.error is not None:
            raise late.error
        batch, late.after = _read(self._fed(late)), None
        is_open = np.array([session_id not in late.closed for session_id in batch.session_ids])
        output = self.compute(batch.take(is_open.nonzero()[0]), late.tap)
        found = {one.session_id: one for one in output.judgements}
        judged = batch.judged().session_ids
        nothing = np.array([POISON], np.int32)
        judgements = [found.get(i) or Judgement(i, (), nothing) for i in judged]
        late.tokens = np.array([one.token_ids[0] if len(one.token_ids) else POISON for one in judgements], np.int32)
        scored = {int(is_open.nonzero()[0][i]): values for i, values in output.scored.items()}
        return StepOutput(judgements, output.hidden if is_open.all() else None, scored=scored)

    def compute(self, batch: StepBatch, tap: Tap) -> StepOutput:
        """Compute a step whose tokens are all known. Tests with another model override this."""
        return super().step(batch, tap)

    def _fed(self, late: LateStep) -> StepBatch:
        batch, after = late.batch, late.after
        if batch.fed_by is None:
            return batch
        assert after is not None
        assert after.tokens is not None, "the step before was not collected"
        return batch.fed(after.tokens[batch.fed_by])


def _read(batch: StepBatch) -> StepBatch:
    """Return a batch with its drafted tokens. The read tokens must be those on the device."""
    drafted, batch = batch.drafted, batch.known()
    if drafted is not None and drafted.values is not None:
        was_read = drafted.values >= 0
        assert np.array_equal(drafted.values[was_read], np.asarray(drafted.tokens)[was_read]), "read as other tokens"
        if drafted.tree is not None and drafted.tree.parents is not None:
            assert _parents_of(np.asarray(drafted.tree.lines)).tolist() == drafted.tree.parents.tolist(), (
                "read as other trees"
            )
    assert not is_handle(batch.token_ids).any(), "handles of nothing"
    return batch


def _parents_of(lines: Int32Array) -> Int32Array:
    """Return the parents of nodes, i32[n], given their lines. Places in the lines increase from level to level."""
    own = lines.max(0)
    levels = (lines == own).argmax(0)
    return np.where(levels > 0, lines[levels - 1, np.arange(lines.shape[1])], np.int32(-1))
