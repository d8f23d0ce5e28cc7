"""A verifier's process with the toy model: starts at once, takes the time for a step that it is told.

python -m tests.journal.toy_target BROKER [MILLISECONDS [BIND ADVERTISE MAX_SESSIONS [KEYS]]]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from specq.config.sections import TargetConfig
from specq.processes.target import VerifierLoop
from specq.protocol.step_output import NO_TAP, StepOutput, Tap
from specq.protocol.types import ModelInfo, SessionStep
from specq.runtime import log
from specq.testing.tokenizer import tokenizer_files, tokenizer_json
from specq.testing.toy import ToyEngine, toy_info
from specq.text.codec import num_tokens, tokenizer_hash
from specq.transport.broker_link import new_incarnation
from specq.transport.sockets import Stop
from specq.verifier.control.step_curve import StepCurve
from specq.verifier.core import Verifier


class SlowEngine(ToyEngine):
    """A toy engine whose steps take time."""

    def __init__(self, info: ModelInfo, seconds: float) -> None:
        super().__init__(info)
        self.seconds = seconds

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        """Wait, and judge."""
        time.sleep(self.seconds)
        return super().step(steps, tap)


def main(
    broker: str,
    milliseconds: str = "2",
    bind: str = "tcp://127.0.0.1:*",
    advertise: str = "",
    max_sessions: str = "64",
    keys: str = "",
) -> None:
    """Serve until SIGTERM."""
    log.configure("info")
    stop, size = Stop(), num_tokens(tokenizer_json())
    info = replace(
        toy_info(kv_slots=100_000), vocab_size=size, num_tokens=size, tokenizer_hash=tokenizer_hash(tokenizer_json())
    )
    verifier = Verifier(
        SlowEngine(info, float(milliseconds) / 1000),
        StepCurve([1, 64], [0.001, 0.002]),
        incarnation=new_incarnation(),
        max_sessions=int(max_sessions),
        max_step_rows=max(512, int(max_sessions)),  # a token for each session in each step
        tokenizer_files=tokenizer_files(),
    )
    config = TargetConfig(broker=broker, bind=bind, advertise=advertise, max_sessions=int(max_sessions), keys=keys)
    loop = VerifierLoop(config, verifier, "toy")
    loop.serve(stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
