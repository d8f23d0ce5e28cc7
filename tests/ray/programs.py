"""`specq`, whose workers are the toys of the chaos suite: python -m tests.ray.programs broker|worker|serve OPTIONS...

Verifiers and draft workers take the options of `specq worker`, and start at once.
"""

from __future__ import annotations

from specq.broker import Broker
from specq.cli import main as specq
from specq.cli import services
from specq.config import DraftConfig, TargetConfig
from tests.chaos import programs

STEP_MS = "40"


def judge(config: TargetConfig) -> int:
    """Run a verifier."""
    own = (config.broker, STEP_MS, config.bind, config.advertise, str(config.max_sessions), config.keys, config.name)
    programs.judge(*own)
    return 0


def draft(config: DraftConfig) -> int:
    """Run a draft worker."""
    programs.draft(config.broker, config.name, config.keys)
    return 0


if __name__ == "__main__":
    Broker.validates = True
    services.PROCESSES |= {"target": "tests.ray.programs:judge", "draft": "tests.ray.programs:draft"}
    specq()
