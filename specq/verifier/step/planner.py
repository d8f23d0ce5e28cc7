"""Plans the steps of a verifier: opens the sessions whose turn it is, and chooses what of each the next step
computes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from specq.engines import Engine, even_chains
from specq.runtime import Faults, in_halves
from specq.verifier.control.controller import Controller
from specq.verifier.sessions.kv_admission import admit
from specq.verifier.sessions.open_sessions import OpenSessions
from specq.verifier.sessions.session import Session
from specq.verifier.sources import SourceSet
from specq.verifier.step.in_flight import InFlightStep
from specq.verifier.step.plan import plan
from specq.verifier.step.shares import NO_SHARES, Shares

MAX_MIN_ACCEPT_PROB = 9999


class StepPlanner:
    """Plans steps of at most `max_sessions` sessions and `max_step_rows` rows; of one that computes prompts,
    `max_prefill_rows` if these are more.

    num_rows         rows of the step that was planned last
    min_accept_prob  with which verifying a node that is here already just paid in it
    priced           the same in thousandths, with what it takes to receive a node
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

    @property
    def max_prefill_rows(self) -> int:
        """The most rows of a step that computes prompts."""
        return max(self._max_prefill_rows, self.max_step_rows)

    @property
    def asked(self) -> int:
        """The minimum acceptance probability that drafters are told, as in `Verdict`: so much that they fall silent
        where they bring nothing."""
        return self.priced if self._control.allows_remote else MAX_MIN_ACCEPT_PROB

    def admit(self, running: Sequence[Session], before: InFlightStep | None, faults: Faults) -> Sequence[Session]:
        """Open those sessions whose turn it is and for which there is room; return those that are open."""
        prefilling = None if before is None else before.prefilling()
        return admit(running, self.max_sessions, self._sessions.values(), self._engine, faults, prefilling)

    def plan(self, before: InFlightStep | None, faults: Faults) -> Shares:
        """Return the shares of those sessions that can be planned together, behind the newest step in flight if there
        is one."""
        self._sessions.drafted()
        opened = self.admit(self._sessions.running(), before, faults)
        planned = in_halves(opened, partial(self._plan, before), faults, "planned")
        return planned[0][1] if planned else NO_SHARES

    def _plan(self, before: InFlightStep | None, sessions: Sequence[Session]) -> Shares:
        """Plan a step of these sessions. What waiting for drafts has taken counts among the round's time, so that nodes
        seem the cheaper."""
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
            saved_s=self._control.early.saved_s(curve, sessions) if before is None else 0.0,
        )
        self.num_rows = planned.num_rows
        self.min_accept_prob = planned.goodput * curve.slope(planned.num_rows)
        of_remote = self.min_accept_prob + planned.goodput * self._sources.node_s
        self.priced = min(int(of_remote * 1000), MAX_MIN_ACCEPT_PROB)
        return planned.shares
