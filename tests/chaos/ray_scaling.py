"""Draft workers of a deployment on Ray that are scaled by their gain, under a load that rises and falls.

    scripts/cluster.sh python -m tests.chaos.ray_scaling --row-ms 3 --out scaling.json

The toys' passes take `--row-ms` for each node that they expand, and use no core meanwhile. So two cores have room for
several draft workers. Their drafts are all right, and a step of the verifier takes 40 ms. It prints when the number of
draft workers changed, the last gain of each number, and the tokens a second in the last minute of each load.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from tests.chaos.cluster import conclude
from tests.chaos.ray import RayDeployment
from tests.ray.cluster import RayCluster

LOOK_S = 1.0


def watch(seconds: float, begun: float, changes: list[dict[str, Any]]) -> None:
    """Note each change of the number of draft workers."""
    from specq.ray import deployment

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = deployment.status()
        number = found.numbers.draft
        if not changes or number != changes[-1]["drafters"]:
            gains = {str(key): round(value, 3) for key, value in found.gains.items()}
            changes.append({"at_s": round(time.monotonic() - begun, 1), "drafters": number, "gains": gains})
        time.sleep(LOOK_S)


def measure(directory: Path, loads: tuple[tuple[int, float], ...]) -> dict[str, Any]:
    """Run the loads, each (jobs, minutes), one after another."""
    from specq.config import load as read
    from specq.ray import deployment
    from tests.ray.deploy import PROGRAM, READY_S

    deployed = RayDeployment(directory, brokers=1, targets=1, drafters=1, max_drafters=4)
    changes, rates = list[dict[str, Any]](), list[dict[str, float]]()
    with RayCluster(3), deployment.connected():
        deployment.up(read(deployed.config), lambda _: None, PROGRAM, READY_S)
        begun = time.monotonic()
        for jobs, minutes in loads:
            with deployed.load(jobs, writes=False) as load:
                watch(60 * minutes, begun, changes)
                now = time.monotonic()
                rates.append({"jobs": jobs, "minutes": minutes, "rate": round(load.tally.rate(now - 60, now), 1)})
        deployment.down()
    return {"changes": changes, "rates": rates}


@click.command()
@click.option("--row-ms", default=3.0, show_default=True, help="Time of a draft worker for each node.")
@click.option("--load", "loads", type=(int, float), multiple=True, default=((4, 6.0), (1, 7.0)), show_default=True,
              help="Jobs, and for how many minutes.")  # fmt: skip
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures, as JSON.")
def main(*, row_ms: float, loads: tuple[tuple[int, float], ...], out: Path | None) -> None:
    """Run it; print the figures."""
    os.environ |= {"TOY_ROW_MS": str(row_ms), "TOY_WRONG_EVERY": "0"}  # the cluster's processes inherit it
    directory = Path(tempfile.mkdtemp())
    conclude({"row_ms": row_ms, **measure(directory, loads)}, directory, out, good=True)


if __name__ == "__main__":
    main()
