"""Whether the next step waits for drafts of draft workers, or begins behind the one in flight.

A step with drafted nodes needs the last step's tokens, so the device stands still while the host plans it; a plain step
is launched early (`specq.verifier.step.in_flight`). So nodes must bring more than what that costs. Steps wait where
those that waited lately gave more tokens a second than those that were launched early; else they overlap, as if nobody
drafted, unless so much hangs on the trees that it pays by itself
(`specq.verifier.step.node_choice.are_worth_waiting_for`). Now and then some steps wait for a trial, more rarely each
time that does not pay.

No clock: seconds are given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from specq.verifier.control.step_curve import EXTRA_FADE, MOST_EXTRA, StepCurve
from specq.verifier.control.window import Patience

# times as many tokens a second: what waiting must bring, since it is given to few sessions, and each plain one is
# certain
MARGIN = 1.05
FADE = 0.05  # of what is known of steps, with each one
# A trial: verdicts of it, and steps at least; the first of these say nothing, since drafts are still on their way.
# After so many steps or verdicts it ends if it gave less than so much of what steps give that were launched early.
TRIAL_VERDICTS, LEAST_STEPS, LEFT_OUT, FEW_STEPS, FEW_VERDICTS, HOPELESS = 24, 6, 2, 5, 12, 0.9
FIRST_PATIENCE, MOST_PATIENCE = 256, 8192  # steps between trials


@dataclass(slots=True)
class _Rate:
    """Tokens a second: sums over steps, of which older ones fade."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float, fade: float = FADE) -> None:
        self.tokens, self.seconds = (1 - fade) * self.tokens + tokens, (1 - fade) * self.seconds + seconds

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Load:
    """What is known at one load, of steps that were waited for and those that were launched early; num_steps: of the
    trial under way, None if there is none; patience: steps until the next."""

    waited: _Rate = field(default_factory=_Rate)
    early: _Rate = field(default_factory=_Rate)
    num_steps: int | None = 0
    num_verdicts: int = 0
    patience: Patience = field(default_factory=lambda: Patience(FIRST_PATIENCE, MOST_PATIENCE))

    @property
    def has_paid(self) -> bool:
        """Whether steps gave enough that were waited for."""
        return self.waited.value >= MARGIN * self.early.value

    def learn_waited(self, num_sessions: int, num_tokens: int, seconds: float) -> None:
        """Take in a step that was waited for."""
        if self.num_steps is None:
            self.waited.add(num_tokens, seconds)
            return
        self.num_steps += 1
        if self.num_steps <= LEFT_OUT:
            return
        self.waited.add(num_tokens, seconds, 0.0)
        self.num_verdicts += num_sessions
        says_something = self.num_steps >= FEW_STEPS or self.num_verdicts >= FEW_VERDICTS
        is_hopeless = says_something and self.waited.value < HOPELESS * self.early.value
        if is_hopeless or (self.num_steps >= LEAST_STEPS and self.num_verdicts >= TRIAL_VERDICTS):
            self.num_steps = None
            if self.has_paid:
                self.patience.reset()
            else:
                self.patience.lengthen()

    def pass_by(self) -> None:
        """Take in a step that was launched early while draft workers drafted."""
        self.patience.pass_round()
        if self.patience.is_over and self.num_steps is None:
            self.waited, self.num_steps, self.num_verdicts = _Rate(), 0, 0


class Waiting:
    """What steps bring and take that are waited for, and those that are launched early, at each load."""

    def __init__(self) -> None:
        self._early_s = 0.0  # seconds that a step launched early takes beyond its profile
        self._loads: dict[int, _Load] = {}

    def saved_s(self, curve: StepCurve) -> float:
        """Return the seconds that a plain step saves which is launched early."""
        return max(curve.extra_s - self._early_s, 0.0)

    def pays(self, num_sessions: int) -> bool:
        """Return whether steps of so many sessions wait, whatever hangs on the trees now."""
        load = self._load(num_sessions)
        return load.num_steps is not None or load.has_paid

    def learn_early(
        self, num_rows: int, num_sessions: int, num_tokens: int, seconds: float, curve: StepCurve, *, are_fed: bool
    ) -> None:
        """Take in a step that was launched early; `are_fed`: draft workers drafted for its sessions."""
        profiled, load = curve.profiled(num_rows), self._load(num_sessions)
        self._early_s += EXTRA_FADE * (min(max(seconds - profiled, 0.0), MOST_EXTRA * profiled) - self._early_s)
        load.early.add(num_tokens, seconds)
        if are_fed:
            load.pass_by()

    def learn_waited(self, num_sessions: int, num_tokens: int, seconds: float) -> None:
        """Take in a step that was waited for while draft workers drafted for its sessions."""
        self._load(num_sessions).learn_waited(num_sessions, num_tokens, seconds)

    def _load(self, num_sessions: int) -> _Load:
        return self._loads.setdefault(round(math.log2(max(num_sessions, 1))), _Load())
