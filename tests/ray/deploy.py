"""`specq ray` with toy workers: python -m tests.ray.deploy up CONFIG | status | down

`status` prints JSON. A process of its own: Ray ends the processes that are connected to a head that dies.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from specq.config import load
from specq.ray import deployment

PROGRAM = ("-m", "tests.ray.programs")
READY_S = 180.0


def main(action: str, config: str = "") -> None:
    """Do it."""
    with deployment.connected():
        if action == "up":
            deployment.up(load(Path(config)), sys.stderr.write, PROGRAM, READY_S)
        elif action == "down":
            deployment.down()
        else:
            sys.stdout.write(json.dumps(asdict(deployment.status())) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
