"""Which sources are used on a machine that others have, too: steps of any length, and now and then one that is kept
waiting for a second."""

from __future__ import annotations

import math
from random import Random

import pytest

from specq.drafting.draft_model.source import ColocatedSource
from specq.protocol import COLOCATED, NO_TAP, SUFFIX, SUFFIX_LANE, Tap
from specq.verifier.control.step_curve import StepCurve
from specq.verifier.control.window import MOST, UsualSteps
from tests.verifier.timed_service import Machine, TimedChains, TimedService, TimedSource, TimedStep, TimedTarget

PLAIN, DRAFTED = frozenset[str](), frozenset({COLOCATED})


class Busy(TimedTarget):
    """A small model on two cores that are not its own; `random` says how long it is kept waiting."""

    random: Random

    def launch(self, steps: object, tap: Tap = NO_TAP, after: object = None) -> TimedStep:
        """See `OverlappingEngine`."""
        late = super().launch(steps, tap, after)  # type: ignore[arg-type]
        waits_s = 0.01 * max(math.exp(self.random.gauss(0.0, 0.4)) - 1, 0.0)
        if self.random.random() < 0.03:
            waits_s += self.random.uniform(0.2, 1.5)
        late.done_at = self.machine.launch(waits_s)
        return late


def on_busy_cores(chance: float, seed: int) -> TimedService:
    """Return a service with a draft model, which foresees tokens with this chance, and suffix decoding."""
    machine = Machine()
    steps = [(1, 8.7), (4, 11.0), (8, 16.0), (16, 25.0), (80, 110.0)]
    target = Busy(machine, steps, overlaps=False, launch_s=0.0003, collect_s=0.0003)
    target.random = Random(seed)
    chains = TimedChains(
        machine, [(1, 0.28), (8, 1.5)], chance, context_ms=0.1, catch_up_ms=0.1, start_s=0.0001, finish_s=0.0001
    )
    drafter = ColocatedSource(chains, StepCurve([1, 8], [0.00028, 0.0015]), fan_out=1, chain=6)
    texts = TimedSource(machine, SUFFIX, SUFFIX_LANE, 0.0001, 0.25, 3)
    return TimedService(target, [drafter, texts], loop_s=0.0004, prompt_len=40, num_tokens=64)


@pytest.mark.parametrize("seed", [0, 1])
def test_drafts_that_pay_are_used_on_a_busy_machine(seed: int) -> None:
    """On a quiet one they bring a third; a second that a trial was kept waiting says nothing of them, nor of what it
    was compared with."""
    service = on_busy_cores(0.5, seed)
    service.serve(5.0, 1)
    assert service.serve(30.0, 1).share(COLOCATED) > 0.8


@pytest.mark.parametrize("seed", [0, 1])
def test_drafts_that_lose_are_not_used_on_a_busy_machine(seed: int) -> None:
    """On a quiet one they cost a fifth."""
    service = on_busy_cores(0.25, seed)
    service.serve(5.0, 4)
    assert service.serve(30.0, 4).share(COLOCATED) < 0.4


def test_a_stall_counts_as_a_long_step() -> None:
    steps = UsualSteps()
    for _ in range(20):
        steps.cut(PLAIN, 0.01)
    assert steps.cut(PLAIN, 1.0) < 1.2 * MOST * 0.01
    assert steps.cut(PLAIN, 0.012) == 0.012


@pytest.mark.parametrize("arm", [PLAIN, DRAFTED])
def test_steps_that_all_are_longer_count_in_full(arm: frozenset[str]) -> None:
    """Of another arm, or of a machine that has become slower: within twenty steps."""
    steps = UsualSteps()
    for _ in range(20):
        steps.cut(PLAIN, 0.01)
    counted = [steps.cut(arm, 0.08) for _ in range(20)]
    assert counted[0] < 0.04
    assert counted[-8:] == [0.08] * 8


def test_steps_with_prompts_tell_nothing_of_what_is_usual() -> None:
    steps = UsualSteps()
    for _ in range(20):
        steps.cut(PLAIN, 0.01)
    for _ in range(20):
        steps.cut(PLAIN, 0.001, is_decoding=False)
    assert steps.cut(PLAIN, 0.02) == 0.02
