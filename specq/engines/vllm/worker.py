"""What runs in each of vLLM's workers: one step, judged by specq in the place of vLLM's samplers.

Under tensor parallelism each worker has all logits and judges them; the judge is deterministic, so all say the same.
The V1 model runner only: the V2 runner takes drafts from the device's memory, not from the scheduler.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from specq.engines.vllm.rows import judged_rows, said_rows
from specq.protocol import EngineError
from specq.verification import Judgements, StepBatch
from specq.verification.devices import warm_up
from specq.verification.explain import log_decisions
from specq.verification.faults import judge_each


class JudgingWorker:
    """What vLLM mixes into its worker class (`worker_extension_cls`); called by `collective_rpc`."""

    model_runner: Any
    rank: int
    execute_model: Any
    sample_tokens: Any

    def specq_install(self, verbose: bool) -> None:
        """Put specq's judge in the place of vLLM's samplers; EngineError if this vLLM has another place for them."""
        if not isinstance(self.model_runner, GPUModelRunner) or not hasattr(self.model_runner, "_sample"):
            raise EngineError(f"vLLM runs {type(self.model_runner).__name__}, not the V1 model runner")
        self.specq_judge = RunnerJudge(self.model_runner, verbose=verbose and self.rank == 0)
        self.model_runner._sample = self.specq_judge.sample  # noqa: SLF001  # vLLM has no other place to put it

    def specq_step(self, output: SchedulerOutput, request_ids: list[str], batch: StepBatch) -> Judgements:
        """Run a step of requests, each with its session's step in `batch`; return the judgements in order."""
        self.specq_judge.ask(request_ids, batch)
        self.execute_model(output)
        self.sample_tokens(None)
        return self.specq_judge.judgements


class NoProposer:
    """Makes vLLM ready to verify drafts (method `custom_class`); drafts come from elsewhere."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, *args: Any, **options: Any) -> None:
        """Nothing to load."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **options: Any) -> list[list[int]]:
        """Return no drafts."""
        return [[] for _ in sampled_token_ids]


class RunnerJudge:
    """`sample` stands in for the model runner's `_sample`, which turns the logits of a step into tokens."""

    def __init__(self, runner: Any, *, verbose: bool) -> None:
        self._runner, self._verbose = runner, verbose
        self._has_judged = False
        self._batch, self._places = StepBatch.of([]), dict[str, int]()
        self.judgements = Judgements.of([])

    def ask(self, request_ids: list[str], batch: StepBatch) -> None:
        """Take in which requests are in the next step, and what is asked for each."""
        self._batch, self._places = batch, {request_id: i for i, request_id in enumerate(request_ids)}

    def sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> SamplerOutput:
        """Judge logits [rows, vocab]: those after each request's last token, and after each of its drafted ones."""
        requests, batch = self._runner.input_batch, self._batch
        order = np.array([self._places[name] for name in requests.req_ids[: requests.num_reqs]], np.intp)
        rows = judged_rows(batch, order)
        judged = logits if rows is None else logits[torch.from_numpy(rows).to(logits.device)]
        self.judgements = judge_each(batch, judged)
        if self._verbose and batch.session_ids[0] >= 0:  # not while it is profiled
            log_decisions(batch, judged, self.judgements)
        if len(self.judgements) and not self._has_judged:
            self._has_judged = True
            warm_up(judged)
        said = torch.from_numpy(said_rows(batch, order, self.judgements)).to(logits.device)
        return SamplerOutput(sampled_token_ids=said, logprobs_tensors=None)
