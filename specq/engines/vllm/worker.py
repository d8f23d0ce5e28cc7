"""What runs in each of vLLM's workers: steps, judged by specq (`specq.engines.vllm.runner`).

Under tensor parallelism each worker has all logits and judges them; the judge is deterministic, so all say the same.
The V1 model runner only: the V2 runner takes drafts from the device's memory, not from the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from specq.engines.vllm.graphs import possible_graphs
from specq.engines.vllm.plans import Plan
from specq.engines.vllm.runner import RunnerSteps
from specq.engines.vllm.versions import missing_parts
from specq.protocol import EngineError
from specq.verification import Judgements


class JudgingWorker:
    """What vLLM mixes into its worker class (`worker_extension_cls`); called by `collective_rpc`."""

    model_runner: Any
    rank: int
    execute_model: Any

    def specq_install(self, verbose: bool) -> tuple[bool, dict[int, Sequence[int]], int]:
        """Make ready for steps; return whether they overlap with the host, which whole graphs steps with drafts have: rows of each session
        -> numbers of sessions, and how many bytes these took. EngineError if this vLLM's runner is another one."""
        if not isinstance(self.model_runner, GPUModelRunner):
            raise EngineError(f"vLLM runs {type(self.model_runner).__name__}, not the V1 model runner")
        if missing := missing_parts(self.model_runner):
            raise EngineError(f"vLLM's model runner has no {', '.join(missing)}")
        self.specq_steps = RunnerSteps(self.model_runner, self.execute_model, verbose=verbose and self.rank == 0)
        graphs = self.specq_steps.graphs
        captured = graphs.capture(possible_graphs(self.model_runner))
        return self.specq_steps.overlaps, captured, graphs.num_bytes

    @torch.inference_mode()
    def specq_launch(self, plan: Plan, collects: bool) -> Judgements | None:
        """See `RunnerSteps.launch`; then, if `collects`, collect the oldest step."""
        self.specq_steps.launch(plan)
        return self.specq_collect() if collects else None

    @torch.inference_mode()
    def specq_collect(self) -> Judgements | None:
        """See `RunnerSteps.collect`; all workers find the same, and the first one says it."""
        found = self.specq_steps.collect()
        return found if self.rank == 0 else None

    def specq_discard(self) -> None:
        """See `RunnerSteps.discard`."""
        self.specq_steps.discard()


class NoProposer:
    """Makes vLLM ready to verify drafts (method `custom_class`), where its attention must know of them; drafts come from elsewhere."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, *args: Any, **options: Any) -> None:
        """Nothing to load."""
