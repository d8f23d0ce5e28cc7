"""Steps that took far longer than usual, since something else had the machine: of them no more counts than tells that
they were long.

A step that a busy machine keeps waiting for a second weighs as much as a hundred others, and says nothing of the arm
that it fell to. So what a step took is cut at MOST times what steps of its arm usually take. That is a median: it rises
and falls by a constant factor, so that it finds an arm whose steps do take longer, or a machine that has become slower,
within some steps, and single stalls hardly move it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specq.verifier.control.source_yields import Arm

MOST = 3.0
MOVE = 1.15


@dataclass(slots=True)
class UsualSteps:
    """What steps of each arm usually take at one load, in seconds."""

    usual_s: dict[Arm, float] = field(default_factory=dict)
    _last_s: float = 0.0  # of the arm of the step before: what an arm starts with of which nothing is known

    def cut(self, arm: Arm, seconds: float, *, is_decoding: bool = True) -> float:
        """Return what counts of the seconds of a step of this arm. Steps that compute prompts tell nothing of what is
        usual."""
        usual_s = self.usual_s.get(arm, self._last_s) or seconds
        if is_decoding:
            self._last_s = self.usual_s[arm] = usual_s * (MOVE if seconds > usual_s else 1 / MOVE)
        return min(seconds, MOST * usual_s)
