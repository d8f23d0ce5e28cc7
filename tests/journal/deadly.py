"""`specq` for tests of what kills verifiers: `worker` is a toy verifier that dies at once of a magic token, without a
word.

python -m tests.journal.deadly broker ...                                    the real broker
python -m tests.journal.deadly worker --broker ADDRESS [--name NAME] ...     the toy verifier
python -m tests.journal.deadly up MOST_RESTARTS ADDRESS JOURNAL              `specq up` with these for its processes
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from specq.cli import main as specq
from specq.config.sections import BrokerConfig, Config, TargetConfig, UpConfig
from specq.processes import up
from specq.processes.target import VerifierLoop
from specq.protocol import NO_TAP, EngineLostError, SessionStep, StepOutput, Tap
from specq.runtime import log
from specq.testing.tokenizer import tokenizer_files
from specq.transport import Stop, new_incarnation
from specq.verifier import StepCurve, Verifier
from tests.journal.toy_target import SlowEngine, info_with_tokenizer

MAGIC, LOST, RAISES = 99, 98, 97  # a step with it: ends the process, loses the engine, raises an ordinary error
STATUS = 66
STEP_S = 0.005
BEATS = {"heartbeat_ms": 100, "liveness_ms": 600}


class DeadlyEngine(SlowEngine):
    """A toy engine that ends the process in a step with the magic token."""

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        """Die, or judge."""
        token_ids = {token for step in steps for token in step.token_ids.tolist()}
        if MAGIC in token_ids:
            os._exit(STATUS)
        if LOST in token_ids:
            raise EngineLostError("the device is in error")
        if RAISES in token_ids:
            raise ValueError("magic")
        return super().step(steps, tap)


def work(broker: str, name: str) -> None:
    """Serve until SIGTERM, or death."""
    log.configure("warning")
    stop = Stop()
    verifier = Verifier(
        DeadlyEngine(info_with_tokenizer(kv_slots=100_000), STEP_S),
        StepCurve([1, 64], [0.005, 0.006]),
        incarnation=new_incarnation(),
        tokenizer_files=tokenizer_files(),
    )
    VerifierLoop(TargetConfig(broker=broker, drain_seconds=0.1), verifier, name).serve(stop)


def run_up(most_restarts: str, address: str, journal: str) -> int:
    """Run `specq up` with one verifier, which is started again so many times."""
    up.PROGRAM, up.MOST_RESTARTS, up.BACKOFF_S = ("-m", "tests.journal.deadly"), int(most_restarts), 0.1
    broker = BrokerConfig(bind=address, journal=journal, **BEATS)
    return up.run(Config(broker=broker, up=UpConfig(targets=1, drafters=0)))


def _option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        work(_option("--broker"), _option("--name"))
    elif sys.argv[1] == "up":
        sys.exit(run_up(*sys.argv[2:]))
    else:
        specq(prog_name="specq")
