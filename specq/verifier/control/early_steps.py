"""Whether the next step is launched before the one in flight has ended, as sources of drafts and sessions want it, and
what that saves.

A session whose logits are shaped by what it has said (penalties, bad words, min_tokens) joins a step when the host
knows its last token, so where steps are launched early every second one. If few sessions are of this kind, that gives
more tokens a second than to let all of them wait.

No clock: seconds are given. What steps bring that wait for draft workers, and that do not:
`specq.verifier.control.waiting`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.engines import Engine
from specq.protocol import REMOTE
from specq.verifier.control.arms import Arms
from specq.verifier.control.step_curve import StepCurve
from specq.verifier.control.waiting import Waiting
from specq.verifier.sessions.session import Session
from specq.verifier.sources import SourceSet
from specq.verifier.step.in_flight import InFlightStep
from specq.verifier.step.node_choice import Shares, are_worth_waiting_for


class EarlySteps:
    """Decides for one verifier, and learns from its steps."""

    def __init__(self, engine: Engine, sources: SourceSet, arms: Arms) -> None:
        self._engine, self._sources, self._arms = engine, sources, arms
        self._waiting = Waiting()

    def awaits(self, curve: StepCurve, shares: Shares) -> bool:
        """Return whether the next step of these sessions, none of which is synchronous, waits until this one has
        ended."""
        return self._awaits_histories(curve, shares) or self.awaits_drafts(curve, shares)

    def _awaits_histories(self, curve: StepCurve, shares: Shares) -> bool:
        """Return whether it waits for what some have said: half of a token a step is lost of each of these where it
        does not."""
        num_shaped = int(np.count_nonzero(shares.sessions[0].trees.needs_history[shares.places]))
        if not num_shaped:
            return False
        return num_shaped / 2 * curve(len(shares)) >= len(shares) * self._waiting.saved_s(curve)

    def awaits_drafts(self, curve: StepCurve, shares: Shares) -> bool:
        """Return whether it waits for drafts. Whether drawn nodes are verified must not
        depend on what hangs from them (decision 0008), so they are waited for in any case."""
        if self._sources.are_own_awaited(shares.sessions, self._arms.allowed):
            return True
        are_fed = self._are_fed(shares)
        drafted = (shares.sessions[0].trees.num_live[shares.places] > 0).nonzero()[0].tolist()
        if not drafted and not are_fed:
            return False
        sessions = [shares.sessions[i] for i in drafted]
        if any(session.takes_distributions for session in sessions):
            return True
        if are_fed and self._waiting.pays(len(shares)):
            return True
        saved_s = self._waiting.saved_s(curve)
        return bool(sessions) and are_worth_waiting_for(sessions, len(shares), curve, saved_s)

    def saved_s(self, curve: StepCurve, sessions: Sequence[Session]) -> float:
        """Return the seconds that a step of these sessions saves without nodes, since the next one is launched before
        it has ended."""
        if not self._engine.overlaps or self._sources.are_own_awaited(sessions, self._arms.allowed):
            return 0.0
        if any(session.waits for session in sessions):
            return 0.0
        if self._arms.uses(REMOTE) and self._waiting.pays(len(sessions)):
            return 0.0
        return self._waiting.saved_s(curve)

    def learn(self, flight: InFlightStep, num_tokens: int, seconds: float, curve: StepCurve) -> None:
        """Take in a step that gave so many tokens: one that was waited for, or one that was launched early."""
        shares, are_fed = flight.shares, self._are_fed(flight.shares)
        if flight.is_behind:
            self._waiting.learn_early(flight.num_rows, len(shares), num_tokens, seconds, curve, are_fed=are_fed)
        if are_fed and self._engine.overlaps and not flight.is_late:
            self._waiting.learn_waited(len(shares), num_tokens, seconds)

    def _are_fed(self, shares: Shares) -> bool:
        """Return whether draft workers draft for some of these sessions."""
        return self._arms.uses(REMOTE) and bool(shares.modes - {"plain"})
