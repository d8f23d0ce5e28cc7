"""The file that probes read: what a broker and a draft worker write in it, and when."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specq.config import BrokerConfig, DraftConfig, environment_of_children, free_address
from specq.drafting.worker import DraftWorker
from specq.processes.broker import BrokerLoop
from specq.processes.draft import DrafterLoop
from specq.protocol import ConfigError
from specq.runtime import HealthFile
from specq.testing.secured import model
from specq.testing.toy_drafters import ToyProposer
from specq.testing.waiting import wait_until


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECQ_HEALTH", str(tmp_path / "health"))
    return tmp_path / "health"


def test_the_same_state_renews_the_time(path: Path):
    """A file that an earlier process left is overwritten first."""
    path.write_text("ready\n")
    health = HealthFile()
    health.begin()
    assert path.read_text() == "loading\n"
    os.utime(path, (1, 1))

    health.note("loading")

    assert path.stat().st_mtime > 1
    health.note("ready")
    assert (path.read_text(), [one.name for one in path.parent.iterdir()]) == ("ready\n", ["health"])


def test_a_file_that_cannot_be_written_is_refused_at_the_start(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPECQ_HEALTH", str(path / "nowhere" / "health"))
    with pytest.raises(ConfigError, match=r"cannot write the health file .*nowhere/health: No such file"):
        HealthFile().begin()
    HealthFile().note("ready")  # later: no error


def test_children_have_none(path: Path, monkeypatch: pytest.MonkeyPatch):
    assert "SPECQ_HEALTH" not in environment_of_children()
    monkeypatch.delenv("SPECQ_HEALTH")
    HealthFile().begin()
    assert not path.exists()


def test_a_worker_waits_for_its_broker_and_a_broker_drains(path: Path, monkeypatch: pytest.MonkeyPatch):
    address = free_address()
    drafter = DrafterLoop(DraftConfig(broker=address), DraftWorker(ToyProposer(model()), incarnation=2), "draft")

    def turned(*loops: BrokerLoop | DrafterLoop) -> str:
        for loop in loops:
            loop.turn()
        return path.read_text()

    wait_until(lambda: turned(drafter) == "waiting\n" if path.exists() else drafter.turn())
    monkeypatch.setenv("SPECQ_HEALTH", str(path.with_name("broker")))
    broker = BrokerLoop(BrokerConfig(bind=address, journal="none", heartbeat_ms=50))
    try:
        wait_until(lambda: turned(broker, drafter) == "ready\n")
        assert path.with_name("broker").read_text() == "ready\n"
        broker.broker.drain(0.0)
        wait_until(lambda: turned(broker) and path.with_name("broker").read_text() == "draining\n")
    finally:
        drafter.close()
        broker.close()
