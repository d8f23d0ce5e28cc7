"""Real processes, killed and frozen at random moments under load: a handful here, hundreds in `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.processes import Deployment, Siege, all_away, attack, faults_of, real_prompts, toy_prompts

PATIENCE_S = 60.0  # on a busy machine; `make chaos`, on one of its own, allows 5 s
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def check(siege: Siege, num_faults: int) -> None:
    """Check that no job was lost, doubled or wrong, and that all jobs continued within seconds of each fault."""
    report = siege.report()
    assert siege.faults.total() == num_faults
    assert siege.tally.counts["jobs"] > num_faults // 2
    assert {name: report[name] for name in ("lost", "doubled", "wrong", "stuck")} == {
        "lost": 0, "doubled": 0, "wrong": 0, "stuck": [],
    }, report  # fmt: skip


def test_each_role_killed_and_frozen(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        check(attack(deployment, toy_prompts(), faults_of(4), recovery_s=PATIENCE_S), 8)


def test_the_same_behind_links_that_break(tmp_path: Path) -> None:
    """Each connection to the broker has a delay in both directions and breaks now and then."""
    with Deployment(tmp_path, proxied=True) as deployment:
        check(attack(deployment, toy_prompts(), faults_of(1, roles=("broker",)), recovery_s=PATIENCE_S), 2)


def test_all_verifiers_away(tmp_path: Path) -> None:
    """For longer than liveness; 30 s in `make chaos`, and the drafters too."""
    with Deployment(tmp_path) as deployment:
        check(all_away(deployment, "target", 1.5, PATIENCE_S), 1)


def test_the_bundled_pair(tmp_path: Path) -> None:
    """With real models the texts are those that come of the same prompts without faults."""
    faults = [("kill", "target"), ("kill", "broker")]
    with Deployment(tmp_path, targets=1, drafters=1, real=True) as deployment:
        check(attack(deployment, real_prompts(deployment), faults, recovery_s=PATIENCE_S, num_jobs=2), 2)
