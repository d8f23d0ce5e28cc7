"""Several real brokers on one journal, with light workers, at a small scale: nothing lost, fair shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specq.protocol import EngineError
from specq.simulate.fleet_figures import FleetRun, jain
from specq.simulate.fleet_workers import token_at
from specq.simulate.settings import (
    DrafterSettings,
    EngineSettings,
    FleetSettings,
    HostSettings,
    NetworkSettings,
    Scenario,
    TrafficSettings,
)

SMALL = Scenario(
    engine=EngineSettings(verifiers=4, step_ms=((1, 200.0),), session_us=0, max_sessions=64, max_step_rows=4096),
    draft=DrafterSettings(drafters=6, max_ahead=4),
    network=NetworkSettings(rtt_ms=20),
    host=HostSettings(broker_us=10),
    traffic=TrafficSettings(sessions=48, prompt_tokens=32, output_tokens=40, warm_s=2, seconds=4),
    fleet=FleetSettings(brokers=3, clients=3),
)


def run(**changed: Any) -> FleetRun:
    found = FleetRun(replace(SMALL, **changed))
    found.run()
    return found


def fleet(**settings: Any) -> FleetRun:
    return run(fleet=replace(SMALL.fleet, **settings), traffic=replace(SMALL.traffic, seconds=12))


@pytest.fixture(scope="module")
def calm() -> FleetRun:
    return run()


def test_all_brokers_clients_and_drafters_get_their_share(calm: FleetRun) -> None:
    figures = calm.figures
    assert figures.jobs > 24  # each checked token by token
    assert min(figures.clients_fairness, figures.brokers_fairness, figures.drafters_fairness) > 0.95
    assert figures.verifier_sessions[0] >= 8  # 12 of each on average
    assert (figures.taken, figures.asked_again, figures.storm) == ([0, 0, 0], 0, {})


def test_equal_scenarios_give_equal_figures(calm: FleetRun) -> None:
    """All but processor times."""
    timed = {"cores": (), "core_us": {}, "longest_ms": {}, "simulator_s": 0.0}
    assert replace(calm.figures, **timed) == replace(run().figures, **timed)


def test_the_jobs_of_a_lost_broker_go_on_elsewhere() -> None:
    found = fleet(lost_brokers=1)
    figures = found.figures
    assert figures.taken[0] == 0
    assert sum(figures.taken) >= 12
    assert figures.taken_s <= 4.5
    assert figures.gap_s[-1] <= 6.0
    assert figures.asked_again >= 12
    assert {job.broker for job in found.users.jobs.values()} <= {one.address for one in found.fleet.live}
    assert max(one.heard for one in found.users.jobs.values()) > found.fleet.queue.now - 1


def test_lost_workers_stop_no_job() -> None:
    figures = fleet(lost_verifiers=1, lost_drafters=4).figures
    assert figures.taken == [0, 0, 0]
    assert figures.gap_s[-1] <= 6.0


def test_a_journal_that_stands_still_moves_no_job() -> None:
    """No lease can be renewed meanwhile. The first broker that can must not take the others' jobs."""
    figures = fleet(journal_stands_s=5.0).figures
    assert figures.taken == [0, 0, 0]
    assert 5.0 <= figures.gap_s[-1] <= 6.0


def test_few_sessions_of_many_brokers_are_not_all_at_the_same_workers() -> None:
    """Each broker alone would begin with the same verifier and drafter."""
    found = run(traffic=replace(SMALL.traffic, sessions=12, output_tokens=2000), fleet=FleetSettings(brokers=6))
    assert min(len(one.sessions) for one in found.fleet.verifiers) >= 1
    assert max(len(one.sessions) for one in found.fleet.drafters) <= 4


def test_brokers_share_the_room_of_a_verifier() -> None:
    """What does not fit waits at its broker, and clients with many jobs wait for the others."""
    engine = replace(SMALL.engine, verifiers=1, max_sessions=24)
    found = run(engine=engine, traffic=replace(SMALL.traffic, output_tokens=10))
    (verifier,) = found.fleet.verifiers
    assert len(verifier.sessions) <= 28
    assert min(verifier.tokens.values()) > 0.7 * max(verifier.tokens.values())
    many, few = found.figures.first_ms
    assert few < many


def test_a_token_that_is_not_the_next_one_ends_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specq.simulate.fleet_users.token_at", lambda job, at: token_at(job, at) + (job == 5))
    with pytest.raises(EngineError, match="job 5 got tokens that are not its next ones"):
        run()


def test_jain() -> None:
    assert (jain([2, 2, 2]), jain([3, 0, 0]), jain([])) == (1.0, pytest.approx(1 / 3), 1.0)


def test_a_broker_that_cannot_keep_up() -> None:
    """Its messages wait for its core, and leave it in order."""
    found = run(
        host=HostSettings(broker_us=4000),
        fleet=replace(SMALL.fleet, lost_brokers=1),
        traffic=replace(SMALL.traffic, seconds=12),
    )
    assert found.figures.jobs > 100
