"""Simulated devices: steps that overlap with the host's work, and draft workers that draft in chains."""

from __future__ import annotations

import pytest

from specq.simulate import Scenario, simulate

STEP_MS, PLAN_US = 5.0, 500.0


def scenario(mode: str, **tables: dict[str, object]) -> Scenario:
    common: dict[str, dict[str, object]] = {
        "engine": {"step_ms": [[1, STEP_MS], [64, STEP_MS]], "session_us": 0},
        "host": {"plan_us": PLAN_US, "verdict_us": 0, "broker_us": 0},
        "network": {"near_rtt_ms": 0.0},
        "traffic": {"sessions": 4, "prompt_tokens": 2, "output_tokens": 400, "warm_s": 0.5, "seconds": 2},
        "speculation": {"mode": mode},
    }
    return Scenario.from_tables({name: table | tables.get(name, {}) for name, table in (tables | common).items()})


@pytest.mark.parametrize(("overlaps", "step_ms"), [(1, STEP_MS), (0, STEP_MS + 4 * PLAN_US / 1000)])
def test_a_device_computes_while_the_host_plans(overlaps: int, step_ms: float) -> None:
    """So plain steps follow each other without a gap. Otherwise the host's time is added to each."""
    found = simulate(scenario("plain", engine={"overlaps": overlaps}, draft={"drafters": 0}))
    assert found.goodput == pytest.approx(4 * 1000 / step_ms, rel=0.02)
    assert found.engine_load == pytest.approx(1.0, abs=0.02)


def test_a_step_with_drafts_waits_for_the_last_one() -> None:
    """The device is idle while the host plans it."""
    found = simulate(scenario("sync", engine={"overlaps": 1}, draft={"pass_ms": [[1, 0.01]]}))
    assert found.mean_accepted_length > 2
    assert 0.5 < found.engine_load < 0.9


def test_a_chain_takes_a_pass_a_level() -> None:
    """One session, whose drafts are always right: six passes a round, in one call or in six."""
    draft = {"acceptance": 1.0, "fan_out": 1, "max_ahead": 6, "pass_ms": [[1, 0.1]]}
    for chain in (1, 6):
        found = simulate(scenario("sync", draft=draft | {"chain": chain}, traffic={"sessions": 1}))
        assert found.mean_accepted_length == pytest.approx(7, abs=0.2)
        assert found.draft_load * found.seconds / 0.0001 == pytest.approx(6 * found.rounds, rel=0.05)
