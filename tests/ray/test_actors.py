"""The actor of a process, without a cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

pytestmark = [pytest.mark.machines, pytest.mark.filterwarnings("default")]

ACTOR = """
import sys, time
from specq.ray.actors import ProcessActor
from specq.ray.plan import ProcessSpec

print(":actor_name:target-1", file=sys.stderr, flush=True)
actor = ProcessActor(ProcessSpec("target-1", "target", "node", (), 1, 0), ("-c", sys.argv[1]))
until = time.monotonic() + 60
while actor.health().status is None and time.monotonic() < until:
    time.sleep(0.02)
print(actor.health().status, actor.health().last_line)
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; print('loading', file=sys.stderr); sys.exit('specq: no model at /no/such')",
         "1 specq: no model at /no/such"),
        ("raise SystemExit(2)", "2"),
    ],
)  # fmt: skip
def test_an_actor_reports_why_its_process_ended(tmp_path: Path, program: str, said: str):
    """As Ray does it, standard error is a file."""
    command = (sys.executable, "-c", ACTOR, program)
    with (tmp_path / "worker.err").open("wb") as log:
        found = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, timeout=90, check=True)
    assert said in [line.strip() for line in found.stdout.splitlines()], found.stdout
