"""`specq worker --role target --engine slow`: the torch engine, with steps that take as long as a large model's.

A toy's step is cheaper than the handling of a draft node, so that drafts are hardly ever worth verifying: the more so
the busier the machine. Here they are, as with the models that speculation is for; and waiting takes no processor.

    python -m tests.end_to_end.slow_target worker --role target --engine slow ...
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from specq.cli import main
from specq.engines import ENGINES, EngineSpec
from specq.engines.torch.engine import TorchEngine
from specq.protocol import NO_TAP, SessionStep, StepOutput, Tap

STEP_S = 0.008


class SlowEngine(TorchEngine):
    """See the module."""

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        """Step, and wait."""
        time.sleep(STEP_S)
        return super().step(steps, tap)


SLOW = EngineSpec(SlowEngine)

if __name__ == "__main__":
    ENGINES["slow"] = "tests.end_to_end.slow_target:SLOW"
    main(prog_name="specq")
