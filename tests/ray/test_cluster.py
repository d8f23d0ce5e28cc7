"""A deployment on a real Ray cluster under load: kills, an upgrade and its end. Hundreds by hand: `tests.chaos.ray`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specq import Client
from specq.testing import wait_until
from tests.ray.cluster import RayCluster  # sets what Ray reads when it is imported

pytest.importorskip("ray")

pytestmark = [pytest.mark.machines, pytest.mark.timeout(400), pytest.mark.filterwarnings("default")]

FAULTS = ["actor", "node", "actor", "actor"]


PROMPT = "swordfish and other secrets"


def upgrade(deployed, cluster) -> None:
    """Change an option of the verifiers, and one draft worker less: each verifier is replaced, no other process.

    Then look for a prompt in all that Ray has written.
    """
    from specq.config import load
    from specq.ray import deployment
    from tests.ray.deploy import PROGRAM, READY_S

    before = {row.name: row.pid for row in deployment.status().rows}
    deployed.write(max_sessions=32, drafters=1)
    said = list[str]()
    deployment.up(load(deployed.config), said.append, PROGRAM, READY_S)
    after = {row.name: row.pid for row in deployment.status().rows}
    assert after.keys() == before.keys() - {"draft-2"}
    assert {name for name in after if after[name] != before[name]} == {"target-1", "target-2"}
    with Client(deployed.address) as client:
        assert client.generate(PROMPT, max_tokens=8, ignore_eos=True).token_ids
    files = [path for path in cluster.folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if PROMPT.encode() in path.read_bytes()] == []


def test_nothing_is_lost_when_nodes_and_actors_die_and_an_upgrade_runs(tmp_path: Path) -> None:
    from tests.chaos.ray import siege

    found = siege(tmp_path, FAULTS, nodes=3, drafters=2, at_end=upgrade)
    assert found["jobs"] > 4
    assert found["history"]["operations"] > 20
    assert {name: found[name] for name in ("lost", "doubled", "wrong", "stuck")} == {
        "lost": 0, "doubled": 0, "wrong": 0, "stuck": [],
    }, found  # fmt: skip
    assert found["history"]["wrong"] == 0, found
    wait_until(lambda: not _specq_processes(), 20.0)


def _specq_processes() -> list[str]:
    """Return the processes of deployments that are left."""
    found = []
    for one in Path("/proc").iterdir():
        if one.name.isdecimal():
            try:
                line = (one / "cmdline").read_text("utf-8", "replace")
            except OSError:
                continue
            found += [line] if "tests.ray.programs" in line else []
    return found


def test_a_cluster_without_a_token_is_refused(tmp_path: Path) -> None:
    """Nothing starts, and one line says what to do."""
    (tmp_path / "c.toml").write_text("")
    with RayCluster(0, token=False) as cluster:
        command = (sys.executable, "-m", "specq", "ray", "up", str(tmp_path / "c.toml"))
        done = subprocess.run(
            command, env=cluster.environment_now(), capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 2, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("specq: ")]
    assert [("RAY_AUTH_MODE=token" in line) for line in said] == [True], done.stderr
