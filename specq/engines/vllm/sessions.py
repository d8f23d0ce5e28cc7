"""vLLM driven by sessions: each is one long-lived request of an engine core in this process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from vllm import SamplingParams, envs
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.request import Request

from specq.engines.vllm.scheduler import Grant, Holding, SessionScheduler
from specq.protocol import ConfigError, EngineError, EngineLostError, Int32Array, Judgement, SessionStep

MAX_CHAIN = 16
OPTIONS = {
    "scheduler_cls": "specq.engines.vllm.scheduler.SessionScheduler",
    "worker_extension_cls": "specq.engines.vllm.worker.JudgingWorker",
    "speculative_config": {
        "method": "custom_class",
        "model": "specq.engines.vllm.worker.NoProposer",
        "num_speculative_tokens": MAX_CHAIN,
    },
    "async_scheduling": False,
}


class Sessions:
    """Sessions as requests; made with the arguments of `EngineArgs`; see `specq.engines.vllm.engine.Way`."""

    max_chain = MAX_CHAIN

    def __init__(self, options: dict[str, Any], *, verbose: bool) -> None:
        config = EngineArgs(**options, **OPTIONS).create_engine_config()
        self._has_lost = False
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False, executor_fail_callback=self._lose)
        self._core.collective_rpc("specq_install", args=(verbose,))
        self._scheduler: SessionScheduler = self._core.scheduler
        self._check()
        self._held: dict[int, Holding] = {}
        self._numbers = count()  # a session that is opened again is another request
        self._free_slots: int | None = None
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")
        self.vocab_size = config.model_config.get_vocab_size()
        self.max_length = config.model_config.max_model_len
        self.kv_slots = self.free_slots

    def _check(self) -> None:
        """Raise ConfigError for models whose KV cannot be cut back after rejected drafts, or shared among stages."""
        if self._scheduler.has_mamba_layers or self._scheduler.is_encoder_decoder:
            raise ConfigError("the vllm engine runs decoders with attention only")
        if self._scheduler.use_pp:
            raise ConfigError("the vllm engine has no pipeline parallelism; use --tensor-parallel-size")

    def _lose(self) -> None:
        """Note that a worker process is gone, in the thread of vLLM's that watches over them; the next step or heartbeat says so."""
        self._has_lost = True

    @property
    def free_slots(self) -> int:
        """See `specq.engines.Engine.free_slots`."""
        if self._has_lost:
            raise EngineLostError("a worker process of vLLM's is gone; its own message says which and why")
        if self._free_slots is None:
            self._free_slots = self._scheduler.free_slots(list(self._held.values()))
        return self._free_slots

    def open(self, session_id: int, token_ids: Int32Array) -> int:
        """Start a request; return how many of its tokens have KV."""
        if session_id in self._held:
            raise EngineError(f"session {session_id} is open already")
        request = Request(
            request_id=f"{session_id}.{next(self._numbers)}",
            prompt_token_ids=token_ids.tolist(),
            sampling_params=SamplingParams(temperature=0, max_tokens=self.max_length, detokenize=False),
            pooling_params=None,
            block_hasher=self._core.request_block_hasher,
        )
        self._held[session_id] = self._scheduler.hold(request)
        self._free_slots = None
        return int(request.num_computed_tokens)

    def close(self, session_id: int) -> None:
        """End a request; unknown ones are ignored."""
        holding = self._held.pop(session_id, None)
        if holding is not None:
            self._scheduler.drop(holding)
            self._free_slots = None

    def length(self, session_id: int) -> int:
        """Return how many of a session's tokens have KV; EngineError if it is not open."""
        return int(self._request(session_id).num_computed_tokens)

    def step(self, steps: Sequence[SessionStep]) -> list[Judgement]:
        """Run steps that were checked, in one forward pass; return the judgements in order."""
        for step in steps:
            self._check_transcript(step)
        output = self._scheduler.output([self._grant(step) for step in steps])
        self._free_slots = None
        judgements = self._run(output, steps)
        for step in steps:
            self._request(step.session_id).num_computed_tokens += len(step.token_ids)
        for judgement in judgements:
            request = self._request(judgement.session_id)
            request.append_output_token_ids(judgement.token_ids.tolist())
            request.num_computed_tokens += len(judgement.path)
        return judgements

    def _run(self, output: SchedulerOutput, steps: Sequence[SessionStep]) -> list[Judgement]:
        """Have the workers run a step. Where that fails, or takes longer than vLLM has patience for, nobody knows what they have done of
        it: it cannot be repeated."""
        named = {self._request(step.session_id).request_id: step for step in steps}
        try:
            judgements: list[Judgement] = self._core.collective_rpc(
                "specq_step", timeout=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, args=(output, named)
            )[0]
        except Exception as error:
            raise EngineLostError(f"vLLM's workers failed in a step: {type(error).__name__}: {error}") from error
        return judgements

    def _grant(self, step: SessionStep) -> Grant:
        return Grant(self._held[step.session_id], len(step.token_ids), step.tree.token_ids.tolist())

    def _check_transcript(self, step: SessionStep) -> None:
        """Raise EngineError unless the step goes on with the request's own tokens, and is judged at their end only."""
        request = self._request(step.session_id)
        if step.token_ids.tolist() != request.all_token_ids[step.start : step.base_len]:
            raise EngineError(f"session {step.session_id}: the step's tokens are not those of its transcript")
        if step.judged != (step.base_len == request.num_tokens):
            raise EngineError(
                f"session {step.session_id}: a step is judged at the end of its transcript, and only there"
            )

    def _request(self, session_id: int) -> Any:
        holding = self._held.get(session_id)
        if holding is None:
            raise EngineError(f"session {session_id} is not open")
        return holding.request

    def shutdown(self) -> None:
        """Let go of the device and of worker processes."""
        self._core.shutdown()
