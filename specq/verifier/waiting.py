"""Whether the next step waits for drafts of draft workers, or begins behind the one in flight.

A step with drafted nodes needs the last step's tokens, so the device stands still while the host plans it; a plain step is launched early
(`specq.verifier.flights`). So nodes must bring more than what that costs, which is learned: steps that were waited for take longer beyond
their profile than steps that were launched early. What waiting brings is either seen on the trees (nodes that live on if the step in
flight says what they expect), or known from the last steps that were waited for. Where neither pays, steps overlap as if nobody drafted;
now and then some steps wait, more rarely each time that does not pay.

Pure: seconds are given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specq.verifier.step_curve import EXTRA_FADE, MOST_EXTRA, StepCurve

GAIN_FADE = 0.05  # of what waiting brings, with each step that was waited for
# A trial: verdicts of it, and steps at least; the first of these say nothing, since drafts are still on their way; and after so many steps it ends
# if it has brought less than half of what it must.
TRIAL_VERDICTS, LEAST_STEPS, LEFT_OUT, FEW_STEPS = 24, 8, 3, 8
FIRST_PATIENCE, MOST_PATIENCE = 256, 8192  # steps between trials


@dataclass(slots=True)
class _Load:
    """What is known at one load. gain: tokens that a session gets beyond its own in a step that was waited for; num_steps: of the trial under
    way, None if there is none; sums of what its steps brought; until_trial: steps until the next."""

    gain: float = 0.0
    num_steps: int | None = 0
    brought: float = 0.0
    num_verdicts: int = 0
    until_trial: int = FIRST_PATIENCE
    patience: int = FIRST_PATIENCE

    def begin_trial(self) -> None:
        self.num_steps, self.brought, self.num_verdicts = 0, 0.0, 0

    def learn(self, num_sessions: int, num_more: int, least: float) -> None:
        """Take in a step that was waited for, which brought so many tokens more; `least`: what a session must gain for that to pay."""
        if self.num_steps is None:
            self.gain += GAIN_FADE * (num_more / num_sessions - self.gain)
            return
        self.num_steps += 1
        if self.num_steps <= LEFT_OUT:
            return
        self.brought, self.num_verdicts = self.brought + num_more, self.num_verdicts + num_sessions
        self.gain = self.brought / self.num_verdicts
        is_hopeless = self.num_steps >= FEW_STEPS and self.gain < least / 2
        if is_hopeless or (self.num_steps >= LEAST_STEPS and self.num_verdicts >= TRIAL_VERDICTS):
            self.num_steps = None
            self.patience = FIRST_PATIENCE if self.gain > least else min(2 * self.patience, MOST_PATIENCE)
            self.until_trial = self.patience

    def pass_by(self) -> None:
        """Take in a step that was launched early."""
        self.until_trial -= 1
        if self.until_trial <= 0 and self.num_steps is None:
            self.begin_trial()


class Waiting:
    """What steps take that are launched early, and what waiting brings at each load."""

    def __init__(self) -> None:
        self._early_s = 0.0  # seconds that a step launched early takes beyond its profile
        self._loads: dict[int, _Load] = {}

    def saved_s(self, curve: StepCurve) -> float:
        """Return the seconds that a plain step saves which is launched early."""
        return max(curve.extra_s - self._early_s, 0.0)

    def pays(self, num_sessions: int, curve: StepCurve, promised: float = 0.0, *, are_fed: bool = True) -> bool:
        """Return whether to wait with the next step of so many sessions, whose trees promise so many tokens for it. `are_fed`: draft workers draft
        for them now."""
        expected = promised
        if are_fed:
            load = self._load(num_sessions)
            if load.num_steps is not None:
                return True
            expected = max(promised, num_sessions * load.gain)
        return expected > num_sessions * self._least(num_sessions, expected, curve)

    def learn_early(self, num_rows: int, num_sessions: int, seconds: float, curve: StepCurve, *, are_fed: bool) -> None:
        """Take in a plain step that was launched early."""
        profiled = curve.profiled(num_rows)
        self._early_s += EXTRA_FADE * (min(max(seconds - profiled, 0.0), MOST_EXTRA * profiled) - self._early_s)
        if are_fed:
            self._load(num_sessions).pass_by()

    def learn_waited(self, num_sessions: int, num_tokens: int, curve: StepCurve) -> None:
        """Take in a step that was waited for while draft workers drafted for its sessions, which committed so many tokens."""
        num_more = max(num_tokens - num_sessions, 0)
        self._load(num_sessions).learn(num_sessions, num_more, self._least(num_sessions, num_more, curve))

    def _least(self, num_sessions: int, num_nodes: float, curve: StepCurve) -> float:
        """Return the tokens that a session must gain for a step with about so many nodes to pay."""
        early_s = curve(num_sessions) - self.saved_s(curve)
        return (self.saved_s(curve) + num_nodes * curve.slope(num_sessions)) / early_s

    def _load(self, num_sessions: int) -> _Load:
        return self._loads.setdefault(round(math.log2(max(num_sessions, 1))), _Load())
