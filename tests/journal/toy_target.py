"""A verifier's process with the toy model: starts at once, takes the given time for a step.

python -m tests.journal.toy_target BROKER [MILLISECONDS [BIND ADVERTISE MAX_SESSIONS [KEYS [NAME]]]]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specq.config.sections import TargetConfig
from specq.processes.target import VerifierLoop
from specq.protocol import NO_TAP, ModelInfo, SessionStep, StepOutput, Tap
from specq.runtime import log
from specq.testing import ToyEngine, tokenizer_files, tokenizer_json, toy_info
from specq.text.codec import num_tokens, tokenizer_hash
from specq.transport import Stop, new_incarnation
from specq.verifier import StepCurve, Verifier


class SlowEngine(ToyEngine):
    """A toy engine whose steps take time."""

    def __init__(self, info: ModelInfo, seconds: float) -> None:
        super().__init__(info)
        self.seconds = seconds

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        """Wait, and judge."""
        time.sleep(self.seconds)
        return super().step(steps, tap)


def info_with_tokenizer(name: str = "toy", **changes: Any) -> ModelInfo:
    """Return the toy model with a tokenizer of its own, so that it takes text."""
    size = num_tokens(tokenizer_json())
    own = {"vocab_size": size, "num_tokens": size, "tokenizer_hash": tokenizer_hash(tokenizer_json())}
    return replace(toy_info(name), **own | changes)


def main(
    broker: str,
    milliseconds: str = "2",
    bind: str = "tcp://127.0.0.1:*",
    advertise: str = "",
    max_sessions: str = "64",
    keys: str = "",
    name: str = "toy",
) -> None:
    """Serve until SIGTERM."""
    log.configure("info")
    stop = Stop()
    verifier = Verifier(
        SlowEngine(info_with_tokenizer(kv_slots=100_000), float(milliseconds) / 1000),
        StepCurve([1, 64], [0.001, 0.002]),
        incarnation=new_incarnation(),
        max_sessions=int(max_sessions),
        max_step_rows=max(512, int(max_sessions)),  # a token for each session in each step
        tokenizer_files=tokenizer_files(),
    )
    config = TargetConfig(broker=broker, bind=bind, advertise=advertise, max_sessions=int(max_sessions), keys=keys)
    VerifierLoop(config, verifier, name).serve(stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
