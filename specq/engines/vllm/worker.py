"""What runs in each of vLLM's workers: one step, judged by specq in the place of vLLM's samplers.

Under tensor parallelism each worker has all logits and judges them; the judge is deterministic, so all say the same.
The V1 model runner only: the V2 runner takes drafts from the device's memory, not from the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from specq.protocol import EngineError, Judgement, SessionStep
from specq.verification.devices import warm_up
from specq.verification.explain import log_decisions
from specq.verification.faults import judge_each

NO_TOKEN = -1  # where a row of sampled tokens ends; vLLM's own filler
ANY_TOKEN = [0]  # what a request "said" that could not be judged; it is dropped before its next step


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

    def specq_step(self, output: SchedulerOutput, steps: Mapping[str, SessionStep]) -> list[Judgement]:
        """Run a step of requests, each with its session's step; return the judgements in order of `steps`."""
        self.specq_judge.steps = steps
        self.execute_model(output)
        self.sample_tokens(None)
        judged = self.specq_judge.judgements
        return [judged[step.session_id] for step in steps.values() if step.judged]


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
        self.steps: Mapping[str, SessionStep] = {}
        self.judgements: dict[int, Judgement] = {}

    def sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> SamplerOutput:
        """Judge logits [rows, vocab]: those after each request's last token, and after each of its drafted ones."""
        requests = self._runner.input_batch
        steps = [self.steps[request_id] for request_id in requests.req_ids[: requests.num_reqs]]
        rows = _judged_rows(logits, steps)
        judgements = judge_each(steps, rows)
        self.judgements = {judgement.session_id: judgement for judgement in judgements}
        if self._verbose and steps[0].session_id >= 0:  # not while it is profiled
            log_decisions(steps, rows, judgements)
        if judgements and not self._has_judged:
            self._has_judged = True
            warm_up(rows)
        return SamplerOutput(sampled_token_ids=self._sampled(steps, logits.device), logprobs_tensors=None)

    def _sampled(self, steps: list[SessionStep], device: torch.device) -> torch.Tensor:
        """Return i32[requests, longest]: what each request goes on with, for the runner's own books."""
        nothing = [NO_TOKEN]
        said = [
            (self.judgements[step.session_id].token_ids.tolist() or ANY_TOKEN) if step.judged else nothing
            for step in steps
        ]
        longest = max(map(len, said))
        padded = [tokens + nothing * (longest - len(tokens)) for tokens in said]
        return torch.tensor(padded, dtype=torch.int32, device=device)


def _judged_rows(logits: torch.Tensor, steps: list[SessionStep]) -> torch.Tensor:
    """Return the rows that are judged: all but one row of each step that is not."""
    if all(step.judged for step in steps):
        return logits
    counts = [1 + step.tree.num_nodes for step in steps]
    is_judged = [step.judged for step, count in zip(steps, counts, strict=True) for _ in range(count)]
    return logits[torch.tensor(is_judged, device=logits.device)]
