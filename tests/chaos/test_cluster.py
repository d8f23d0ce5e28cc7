"""Three brokers on one PostgreSQL journal under load: some faults of each kind here, hundreds by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cluster import KINDS, siege
from tests.chaos.test_processes import PATIENCE_S

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

FAULTS = [
    *((kind, role) for role in KINDS for kind in ("kill", "stop")),
    ("cut", "broker/primary"),
    ("cut", "client/broker"),
    ("restart", "database"),
    ("failover", "database"),
    ("kill", "broker"),
    ("failover", "broker"),
]


def test_nothing_is_lost_doubled_or_falsified(tmp_path: Path) -> None:
    """Neither a job, nor what any client saw of it."""
    found = siege(tmp_path, FAULTS, recovery_s=PATIENCE_S)
    assert sum(found["faults"].values()) == len(FAULTS)
    assert found["jobs"] > len(FAULTS) // 2
    assert found["operations"]["read"] > 100
    assert {name: found[name] for name in ("lost", "doubled", "wrong", "stuck", "history")} == {
        "lost": 0, "doubled": 0, "wrong": 0, "stuck": [], "history": {"wrong": 0, "first": []},
    }, found  # fmt: skip
