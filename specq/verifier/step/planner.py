"""Plans the steps of a verifier: opens the sessions whose turn it is, and plans the next step of each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from specq.engines import Engine, even_chains
from specq.runtime import Faults, in_halves
from specq.verifier.control.background import ExpectedStep
from specq.verifier.control.controller import Controller
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions.admission import admit
from specq.verifier.sessions.open_sessions import OpenSessions
from specq.verifier.sessions.session import Session
from specq.verifier.sources import SourceSet
from specq.verifier.step.in_flight import InFlightStep
from specq.verifier.step.node_choice import NO_SHARES, Shares
from specq.verifier.step.plan import StepPlan, plan
from specq.verifier.step.scored_rows import SCORED_LOGITS

MAX_MIN_ACCEPT_PROB = 9999


class StepPlanner:
    """Plans steps of at most `max_sessions` sessions and `max_step_rows` rows.

    A step that computes prompts has at most `max_prefill_rows` rows, if that is more.

    num_rows         rows of the last planned step.
    min_accept_prob  the acceptance probability from which verifying an arrived node just paid in that step.
    priced           the same in thousandths, including the cost of receiving a node.
    background       what that step is expected to take, if it is shared with sessions in the background.
    """

    def __init__(
        self,
        engine: Engine,
        sessions: OpenSessions,
        sources: SourceSet,
        control: Controller,
        *,
        max_sessions: int,
        max_step_rows: int,
        max_prefill_rows: int,
    ) -> None:
        self._engine, self._sessions, self._sources, self._control = engine, sessions, sources, control
        self.max_sessions, self.max_step_rows, self._max_prefill_rows = max_sessions, max_step_rows, max_prefill_rows
        self._even_chains = even_chains(engine)
        self.num_rows = self.priced = 0
        self.min_accept_prob = 0.0
        self.background: ExpectedStep | None = None

    @property
    def max_prefill_rows(self) -> int:
        """The most rows of a step that computes prompts."""
        return max(self._max_prefill_rows, self.max_step_rows)

    @property
    def asked(self) -> int:
        """The minimum acceptance probability that `Verdict` sends to drafters.

        Without gain from remote drafts it is the maximum, so that drafters send no drafts.
        """
        return self.priced if self._control.allows_remote else MAX_MIN_ACCEPT_PROB

    def admit(
        self,
        running: Sequence[Session],
        before: InFlightStep | None,
        faults: Faults,
        busy: Collection[int] | None = None,
    ) -> Sequence[Session]:
        """Open the sessions whose turn it is and for which there is room.

        Returns the open sessions. `busy`: as of `specq.verifier.sessions.admission.admit`.
        """
        prefilling = None if before is None else before.prefilling()
        return admit(running, self.max_sessions, self._sessions.values(), self._engine, faults, prefilling, busy)

    def plan(self, before: InFlightStep | None, faults: Faults) -> Shares:
        """Return the shares of the sessions that can be planned together, behind `before`."""
        self._sessions.drafted()
        background_s = self._control.share_background(self._sessions)
        busy = None if before is None else before.shares.batch.session_ids
        opened = self.admit(self._sessions.running(), before, faults, busy)
        planned = in_halves(opened, partial(self._plan, before, background_s), faults, "planned")
        return planned[0][1] if planned else NO_SHARES

    def _plan(self, before: InFlightStep | None, background_s: float | None, sessions: Sequence[Session]) -> Shares:
        """Plan a step of the given sessions.

        Waiting for drafts counts as a part of the round's time. So nodes seem cheaper.
        """
        curve = self._control.curve
        planned = plan(
            sessions,
            curve.after(self._sources.waited_s),
            max_rows=self.max_prefill_rows if self._sessions.has_prompts else self.max_step_rows,
            free_slots=self._engine.free_slots,
            max_chain=self._engine.max_chain,
            even_chains=self._even_chains,
            before=None if before is None else before.parts[0][0],
            drafted=self._sources.drafted,
            prefill=self._control.prefill,
            max_scored=max(SCORED_LOGITS // self._engine.info.vocab_size, 1),
            saved_s=self._control.saved_s(sessions) if before is None else 0.0,
            background_s=background_s,
        )
        self._control.background.spend(planned.background_s)
        self.background = self._expected(planned, curve)
        self.num_rows = planned.num_rows
        self.min_accept_prob = planned.goodput * curve.slope(planned.num_rows)
        of_remote = self.min_accept_prob + planned.goodput * self._sources.node_s
        self.priced = min(int(of_remote * 1000), MAX_MIN_ACCEPT_PROB)
        return planned.shares

    def _expected(self, planned: StepPlan, curve: StepCurve) -> ExpectedStep | None:
        """Return what a planned step is expected to take, if it is shared and has no prompts of the others."""
        shares, prompt_s = planned.shares, planned.background_s
        if not self._control.background.is_used or not len(shares) or (shares.prompts[0] and not prompt_s):
            return None
        num_others, num_nodes = sum(not session.is_background for session in shares.sessions), len(shares.nodes)
        base_s = curve.profiled(num_others + num_nodes)
        added_s = curve.profiled(shares.num_decoding + num_nodes) - base_s + prompt_s
        return ExpectedStep(base_s, added_s, self._control.background.is_base)
