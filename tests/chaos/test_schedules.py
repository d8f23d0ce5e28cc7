"""Random schedules of faults under a virtual clock: a few here, thousands in `make chaos`. Each planted bug is caught
by one: the seeds below do; if the code moves on and they no longer do, others must."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specq.protocol.errors import EngineError
from tests.chaos.mutants import MUTANTS
from tests.chaos.schedule import RECOVERY_S, Schedule, play


@pytest.mark.parametrize("seed", range(20))
def test_no_death_loses_doubles_or_corrupts_a_job(seed: int) -> None:
    """See `tests.chaos.schedule` for what is checked."""
    assert play(seed).num_jobs >= 2


@pytest.mark.parametrize("seed", range(3))
def test_all_verifiers_away_for_half_a_minute(seed: int) -> None:
    """No job is lost; when one is back, all go on."""
    schedule = Schedule(seed)
    schedule.begin()
    world = schedule.world
    world.queue.run(0.5)
    for identity in world.role("target"):
        world.kill(identity)
    world.queue.run(30.0)
    world.add_verifier()
    outcome = schedule.end()
    assert len(outcome.recoveries) == outcome.num_jobs
    assert max(outcome.recoveries) < RECOVERY_S


def test_without_drafters_the_jobs_go_on() -> None:
    """All drafters away: sessions step alone."""
    schedule = Schedule(1)
    schedule.begin()
    world = schedule.world
    world.add_drafter()
    world.queue.run(0.5)
    for identity in world.role("draft"):
        world.kill(identity)
    assert schedule.end().num_jobs == len(schedule.prompts)


CATCHING = {
    "no_fencing_by_epoch": (50, 62),
    "late_verdict_of_an_expired_verifier": (11, 5),
    "no_resend": (2, 5),
    "no_reopening": (66, 80),
    "no_replay_of_a_lost_verdict": (23, 45),
    "dead_verifiers_keep_their_sessions": (2, 5),
    "open_keeps_the_old_session": (158, 293),
}
MOST_SEEDS = 100


@pytest.mark.parametrize("plant", MUTANTS, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bug the same schedules go well: see test_schedules.py and `make chaos`."""
    seeds = dict.fromkeys([*CATCHING.get(plant.__name__, ()), *range(MOST_SEEDS)])
    plant(monkeypatch)
    for seed in seeds:
        try:
            play(seed)
        except (AssertionError, EngineError):
            return
    pytest.fail(f"{plant.__name__} is not caught by {len(seeds)} schedules")
