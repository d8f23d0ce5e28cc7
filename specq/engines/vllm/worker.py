"""What runs in each of vLLM's workers: steps, judged by specq (`specq.engines.vllm.patches.runner`).

Under tensor parallelism each worker has all logits and judges them. The judge is deterministic, so all have the same
result. It supports only the V1 model runner. The V2 runner takes drafts from the device's memory, not from the
scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm import envs
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from specq.engines.vllm.late_tokens import HELLO, TokenReceiver
from specq.engines.vllm.patches.cuda_graphs import possible_graphs
from specq.engines.vllm.patches.runner import RunnerSteps, StepResult
from specq.engines.vllm.step_delta import StepDelta
from specq.engines.vllm.versions import missing_parts
from specq.protocol import EngineError, StepOutput
from specq.verification import TokenMasks


class JudgingWorker:
    """A mix-in for vLLM's worker class (`worker_extension_cls`), called by `collective_rpc`."""

    model_runner: Any
    rank: int
    execute_model: Any

    def specq_prepare(self) -> None:
        """Let vLLM capture its whole CUDA graphs for plain steps, also if it has a drafter.

        Otherwise it would capture them for drafts of one length only. Attention on latent vectors needs that.
        """
        runner = self.model_runner
        if getattr(runner, "drafter", None) is not None and not runner.model_config.use_mla:
            runner.uniform_decode_query_len = runner.cudagraph_dispatcher.uniform_decode_query_len = 1

    def specq_install(
        self, verbose: bool, is_apart: bool, addresses: Sequence[str] = ()
    ) -> tuple[bool, dict[int, Sequence[int]], int]:
        """Prepare the worker for steps. Raises EngineError if this vLLM's runner does not fit.

        Returns whether steps overlap with the host, the whole graphs beside vLLM's own (see `possible_graphs`), and
        their size in bytes. `is_apart`: the worker has its own process. addresses: where each worker receives draft
        tokens (`late_tokens`).
        """
        if not isinstance(self.model_runner, GPUModelRunner):
            raise EngineError(f"vLLM runs {type(self.model_runner).__name__}, not the V1 model runner")
        if missing := missing_parts(self.model_runner):
            raise EngineError(f"vLLM's model runner has no {', '.join(missing)}")
        # With asynchronous scheduling, vLLM's runner handles tokens that are not sampled yet. specq does this in its
        # own way.
        self.model_runner.use_async_scheduling = self.model_runner.use_async_spec_decode = False
        self._specq_is_apart = is_apart
        late = TokenReceiver(addresses[self.rank], envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS) if addresses else None
        self.specq_late = late
        self.specq_steps = RunnerSteps(
            self.model_runner, self.execute_model, verbose=verbose and self.rank == 0, is_apart=is_apart, late=late
        )
        graphs = self.specq_steps.graphs
        captured = graphs.capture(possible_graphs(self.model_runner))
        return self.specq_steps.overlaps, captured, graphs.num_bytes

    def specq_greet(self) -> None:
        """Wait for the host's first message (`late_tokens`)."""
        assert self.specq_late is not None
        self.specq_late.take(HELLO)

    def specq_leave_out(self, lengths: list[int]) -> None:
        """See `WholeGraphs.leave_out`."""
        self.specq_steps.graphs.leave_out(lengths)

    @torch.inference_mode()
    def specq_launch(self, delta: StepDelta, num_in_flight: int) -> StepResult | StepOutput | None:
        """Launch a step; see `RunnerSteps.launch`. All workers have the same result, and the first one returns it.

        Without data from the host for judging, a thread of vLLM returns it once the device has judged. The same holds
        for a step whose masks come with a later message. Otherwise the worker waits for the device itself.
        """
        answer = self.specq_steps.launch(delta, num_in_flight)
        if self.rank:
            return None
        is_later = delta.feeds or delta.is_judged_late or not self._specq_is_apart
        return answer if is_later else answer.get_output()

    @torch.inference_mode()
    def specq_judge(self, masks: TokenMasks) -> None:
        """See `RunnerSteps.judge`."""
        self.specq_steps.judge(masks)

    def specq_discard(self) -> None:
        """See `RunnerSteps.discard`."""
        self.specq_steps.discard()


class NoProposer:
    """Makes vLLM verify drafts (method `custom_class`), if its attention must know of them. It drafts no tokens."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, *args: Any, **options: Any) -> None:
        """Do nothing."""
