"""Random schedules of faults under a virtual clock: a few here, thousands in `make chaos`."""

from __future__ import annotations

import pytest

from tests.chaos.schedule import RECOVERY_S, Schedule, play


@pytest.mark.parametrize("seed", range(20))
def test_whatever_dies_no_job_is_lost_doubled_or_wrong(seed: int) -> None:
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
