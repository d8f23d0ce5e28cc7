"""vLLM driven by sessions: each is one long-lived request of an engine core in this process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count
from typing import Any

from vllm import SamplingParams, envs
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.request import Request

from specq.engines.vllm.room import free_slots
from specq.engines.vllm.scheduler import Holding, SessionScheduler
from specq.engines.vllm.table import SessionTable
from specq.protocol import ConfigError, EngineError, EngineLostError, Int32Array, IntpArray, SessionStep
from specq.verification import Judgements, StepBatch

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
        self._table = SessionTable()
        self._held: dict[int, Holding] = {}  # by place
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
            self._free_slots = free_slots(self._scheduler.num_free, self._scheduler.block_size, self._table.slacks())
        return self._free_slots

    def open(self, session_id: int, token_ids: Int32Array) -> int:
        """Start a request; return how many of its tokens have KV."""
        if session_id in self._table:
            raise EngineError(f"session {session_id} is open already")
        request = Request(
            request_id=f"{session_id}.{next(self._numbers)}",
            prompt_token_ids=token_ids.tolist(),
            sampling_params=SamplingParams(temperature=0, max_tokens=self.max_length, detokenize=False),
            pooling_params=None,
            block_hasher=self._core.request_block_hasher,
        )
        holding = self._scheduler.hold(request)
        num_computed = int(request.num_computed_tokens)
        place = self._table.add(session_id, token_ids, num_computed, self._scheduler.room(holding))
        self._held[place] = holding
        self._free_slots = None
        return num_computed

    def close(self, session_id: int) -> None:
        """End a request; unknown ones are ignored."""
        place = self._table.remove(session_id)
        if place is not None:
            self._scheduler.drop(self._held.pop(place))
            self._free_slots = None

    def lengths(self, session_ids: Sequence[int]) -> IntpArray:
        """Return how many tokens of each session have KV, i64[n]; EngineError for one that is not open."""
        return self._table.computed[self._table.find(session_ids)]

    def step(self, batch: StepBatch) -> Judgements:
        """Run steps that were checked, in one forward pass; return the judgements in order."""
        places = self._table.find(batch.session_ids)
        holdings = [self._held[place] for place in places.tolist()]
        if not self._table.is_next(batch, places):
            for step, place, holding in zip(batch, places.tolist(), holdings, strict=True):
                self._check_transcript(step, int(self._table.lengths[place]), holding)
        output = self._output(batch, places, holdings)
        self._free_slots = None
        judgements = self._run(output, holdings, batch)
        self._table.commit(batch, places, judgements)
        said, judged = judgements.token_ids.tolist(), compress(holdings, batch.is_judged.tolist())
        ends = judgements.num_tokens.cumsum().tolist()
        for holding, first, end in zip(judged, [0, *ends], ends, strict=False):
            holding.unsaid += said[first:end]
        return judgements

    def _output(self, batch: StepBatch, places: IntpArray, holdings: Sequence[Holding]) -> SchedulerOutput:
        """Take the KV that a step needs, which must be free, and return what the workers have to know of it."""
        table, sizes = self._table, batch.sizes
        computed = table.computed[places]
        is_short = computed + sizes > table.rooms[places]
        has_grown = [i for i, short in enumerate(is_short.tolist()) if short or holdings[i].num_sent is None]
        for i in has_grown:
            self._scheduler.allocate(holdings[i], int(computed[i]), int(sizes[i]))
            table.rooms[places[i]] = self._scheduler.room(holdings[i])
        chains = {}
        if len(batch.parents):
            ends, num_nodes = batch.ends.tolist(), batch.num_nodes.tolist()
            chains = {
                holding.request.request_id: batch.token_ids[end - count : end].tolist()
                for holding, end, count in zip(holdings, ends, num_nodes, strict=True)
                if count
            }
        num_said = table.lengths[places] - table.num_prompt[places]
        return self._scheduler.output(holdings, sizes, computed, num_said, has_grown, chains)

    def _run(self, output: SchedulerOutput, holdings: Sequence[Holding], batch: StepBatch) -> Judgements:
        """Have the workers run a step. Where that fails, or takes longer than vLLM has patience for, nobody knows what they have done of
        it: it cannot be repeated."""
        request_ids = [holding.request.request_id for holding in holdings]
        try:
            judgements: Judgements = self._core.collective_rpc(
                "specq_step", timeout=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, args=(output, request_ids, batch)
            )[0]
        except Exception as error:
            raise EngineLostError(f"vLLM's workers failed in a step: {type(error).__name__}: {error}") from error
        return judgements

    @staticmethod
    def _check_transcript(step: SessionStep, length: int, holding: Holding) -> None:
        """Raise EngineError unless the step goes on with the request's own tokens, and is judged at their end only."""
        holding.tell()
        if step.token_ids.tolist() != holding.request.all_token_ids[step.start : step.base_len]:
            raise EngineError(f"session {step.session_id}: the step's tokens are not those of its transcript")
        if step.judged != (step.base_len == length):
            raise EngineError(
                f"session {step.session_id}: a step is judged at the end of its transcript, and only there"
            )

    def shutdown(self) -> None:
        """Let go of the device and of worker processes."""
        self._core.shutdown()
