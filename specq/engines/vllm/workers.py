"""RPC to vLLM's workers. Calls in this process run one after another. Worker processes run ahead of the host.

A step is one message to all workers and one answer from each. The first worker's answer is the result. A worker process
launches the step and reads the next message. Meanwhile a thread of vLLM waits for the device and answers. So the host
handles one step while the next is launched, as in vLLM's scheduler. An error in a worker arrives with its own answer,
or with the next one.

An error raised here must not hold vLLM's message queues. vLLM's future holds its error, and the error's frames hold the
future and the queues. Up to vLLM 0.31 a garbage collector that finds them together waits forever. It ends a queue's
ZeroMQ context while the queue's sockets are open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import structlog
from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from specq.engines.vllm.late_tokens import TokenSender
from specq.engines.vllm.step_delta import StepDelta
from specq.protocol import EngineError, EngineLostError, StepOutput
from specq.verification import TokenMasks

log = structlog.get_logger(__name__)

Installed = tuple[bool, dict[int, Sequence[int]], int]


def executor_of(config: VllmConfig) -> type[Executor]:
    """Return vLLM's executor for this configuration.

    If it has worker processes, they get threads that answer, as with vLLM's asynchronous scheduler. Before it captures
    CUDA graphs, it prepares its workers for these (`JudgingWorker.specq_prepare`).
    """
    found: type[Executor] = Executor.get_class(config)
    config.scheduler_config.async_scheduling = issubclass(found, MultiprocExecutor)

    def initialize(executor: Executor, *arguments: Any) -> None:
        executor.collective_rpc("specq_prepare")
        found.initialize_from_config(executor, *arguments)

    return type(found.__name__, (found,), {"initialize_from_config": initialize})


class Workers:
    """The workers of `executor` (`specq.engines.vllm.worker`). All do the same; the first one's result counts.

    - are_apart: whether they have their own processes.
    - late: sends them draft tokens, if they are all on this machine.

    Each method raises EngineLostError if a worker fails, or exceeds vLLM's timeout. The state of the workers is then
    unknown, so the call cannot be repeated.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.are_apart = isinstance(executor, MultiprocExecutor)
        self.late: TokenSender | None = None
        self._flights = deque[Future[Any]]()  # results of steps, oldest first
        self._judging = deque[Future[Any]]()  # answers about steps that were judged late

    def install(self, verbose: bool) -> list[Installed]:
        """See `JudgingWorker.specq_install`; return the result of each worker. Errors are passed on."""
        late = self._sender()
        patience_s = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS  # if one device fails, the others wait for it
        arguments = (verbose, self.are_apart, late.addresses if late is not None else [])
        found: list[Installed] = self._executor.collective_rpc("specq_install", patience_s, arguments)
        if late is not None:
            late.connect()
            self._executor.collective_rpc("specq_greet", patience_s)
            late.hide()
        self.late = late
        return found

    def _sender(self) -> TokenSender | None:
        """Return the sender of draft tokens, if workers are processes on this machine; else None."""
        if not self.are_apart or self._executor.local_world_size != self._executor.world_size:
            return None
        try:
            return TokenSender(self._executor.world_size)
        except EngineError as error:
            log.warning("async_draft_launch_disabled", reason=str(error))
            return None

    def leave_out(self, lengths: list[int]) -> None:
        """See `JudgingWorker.specq_leave_out`."""
        self._answer(self._ask("specq_leave_out", lengths))

    def launch(self, delta: StepDelta) -> None:
        """See `RunnerSteps.launch`."""
        launched = self._ask("specq_launch", delta, len(self._flights))
        if launched.done():  # the call has already failed here
            self._answer(launched)
        self._flights.append(launched)

    def judge(self, masks: TokenMasks) -> None:
        """Let the newest step be judged, which waits for its masks."""
        self._judging.append(self._ask("specq_judge", masks))

    def collect(self) -> StepOutput:
        """Wait for the oldest step and return its output."""
        found: StepOutput = self._answer(self._flights.popleft())
        while self._judging and self._judging[0].done():
            self._answer(self._judging.popleft())
        return found

    def close(self) -> None:
        """Close the sender of draft tokens."""
        if self.late is not None:
            self.late.close()

    def discard(self) -> None:
        """Forget the newest step; see `RunnerSteps.discard`."""
        discarded = self._ask("specq_discard")
        self._answer(self._flights.pop())
        self._answer(discarded)

    def _ask(self, method: str, *arguments: Any) -> Future[Any]:
        patience_s = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        try:
            asked: Future[Any] = self._executor.collective_rpc(method, patience_s, arguments, non_block=True)
        except Exception as error:
            raise self._lost(error) from error
        return asked

    def _answer(self, asked: Future[Any]) -> Any:
        try:
            return asked.result()[0]
        except Exception as error:
            raise self._lost(error) from error
        finally:
            del asked  # this frame is one of the raised error's frames

    def _lost(self, error: Exception) -> EngineLostError:
        """Return the error to raise for an error of vLLM.

        In worker processes, errors and causes lose their frames, because these hold vLLM's queues. The worker's own log
        shows where it failed.
        """
        behind: BaseException | None = error if self.are_apart else None
        while behind is not None:
            behind.__traceback__ = None
            behind = behind.__context__
        return EngineLostError(f"vLLM's workers failed in a step: {type(error).__name__}: {error}")
