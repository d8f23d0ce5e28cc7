"""A step between launch and collection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from specq.engines.native.rows import PackedRows
from specq.protocol import BoolArray, Int32Array, IntpArray, SessionStep, StepOutput, Tap
from specq.verification import Judgements, Logits, StepBatch, ends_of, is_handle, known_tokens
from specq.verification.begun import Judging, begin, says_own
from specq.verification.logprobs import ScoredLogprobs


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a step's rows go.

    - places: places of the sessions in the pool.
    - slots: i32, slots of all rows: each session's tokens, its nodes, its scratch rows.
    - staged: slots of the tokens, as returned by `KvPool.stage_all`.
    - is_token: bool[rows], which rows are tokens.
    """

    batch: StepBatch
    places: IntpArray
    slots: Int32Array
    staged: IntpArray
    is_token: BoolArray | slice
    rows: PackedRows


class Unread(NamedTuple):
    """Packed rows i64[n] with tokens unread by the host, and their handles, i32[n]."""

    rows: IntpArray
    handles: Int32Array

    @staticmethod
    def of(plan: Plan) -> Unread | None:
        """Return the rows whose tokens only the device knows, and put token 0 in their place.

        Returns None if there are no such rows. A step with unread drafts may have no such row, if they were left out or
        belong to other sessions.
        """
        if plan.batch.drafted is None:
            return None
        token_ids = plan.rows.token_ids
        rows = is_handle(token_ids).nonzero()[0]
        if not len(rows):
            return None
        found = Unread(rows, token_ids[rows])
        token_ids[rows] = 0
        return found


@dataclass(slots=True, eq=False)
class Flight:
    """A launched step; fulfils `specq.engines.Launched`.

    - judging: the judging in progress, or on a CPU its result. None until `judge`, if masks need the step before.
    - output: the return value of the step, except the judgements.
    - after: the step that feeds this one.
    - logits: the logits to log or to judge later, if any.
    - unread: the rows with draft tokens unread by the host at launch, and their handles.
    - scored: log-probabilities of scored rows, on their way to the host.
    - closed: its sessions that have been closed since launch.
    - is_held: whether another step was planned after it while it was in flight.
    """

    plan: Plan
    judging: Judging | Judgements | None
    output: StepOutput
    after: Flight | None
    land: Callable[[Flight], StepOutput]
    drop: Callable[[Flight], None]
    logits: Logits | None = None
    unread: Unread | None = None
    scored: ScoredLogprobs | None = None
    closed: set[int] = field(default_factory=set)
    is_held: bool = False
    tokens: Int32Array | None = None  # of the judged sessions, once the host knows them; 0 for a session with a fault

    @property
    def feeds(self) -> bool:
        """See `specq.engines.Launched`."""
        if isinstance(self.judging, Judging):
            return self.judging.tokens is not None or not len(self.judging.judged)
        return says_own(self.plan.batch)

    def judge(self) -> None:
        """See `specq.engines.OverlappingEngine`."""
        if self.judging is None:
            assert self.logits is not None
            self.judging = begin(self.plan.batch, self.logits)

    def collect(self) -> StepOutput:
        """See `specq.engines.Launched`."""
        return self.land(self)

    def discard(self) -> None:
        """See `specq.engines.Launched`."""
        self.drop(self)

    def is_open(self) -> BoolArray:
        """Return bool[n]: which of the sessions have not been closed since launch."""
        return np.array([session_id not in self.closed for session_id in self.plan.batch.session_ids], np.bool_)

    def know(self, judgements: Judgements) -> None:
        """Keep the tokens that feed the next step."""
        self.tokens = np.zeros(len(judgements), np.int32)
        self.tokens[judgements.num_tokens > 0] = judgements.token_ids

    def learn_fed(self) -> None:
        """Write the tokens that this step received from the device to the pool's input."""
        batch, after, token_ids = self.plan.batch, self.after, self.plan.rows.token_ids
        self.after = None
        if self.unread is not None and batch.drafted is not None:
            token_ids[self.unread.rows] = known_tokens(self.unread.handles, batch.drafted)
        if batch.fed_by is not None and after is not None and after.tokens is not None:
            is_fed = batch.fed_by >= 0
            token_ids[batch.first_rows[is_fed]] = after.tokens[batch.fed_by[is_fed]]


def tapped_rows(steps: Sequence[SessionStep], tap: Tap) -> tuple[Int32Array, Int32Array]:
    """Return the packed rows of a tap, i32[n], and where the rows of each step begin, i32[steps + 1]."""
    batch = StepBatch.of(steps)
    counts = batch.is_judged * (1 + batch.num_nodes)
    if tap.chunks:
        is_whole = np.array([session_id in tap.chunks for session_id in batch.session_ids], np.bool_)
        counts = np.where(is_whole, batch.sizes, counts)
    ends = ends_of(counts)
    behind = batch.first_rows + batch.sizes - ends  # for each step: how far its rows are ahead of the requested rows
    rows = np.arange(ends[-1] if len(ends) else 0) + behind.repeat(counts)
    return rows.astype(np.int32), np.concatenate([[0], ends]).astype(np.int32)
