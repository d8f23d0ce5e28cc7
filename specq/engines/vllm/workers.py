"""What vLLM's workers are told, and say: in this process one after the other, in processes of their own ahead of it.

There is one message for a step, to all workers, and one answer of each: the first one's is what the step says. A worker
process launches the step and looks for the next message; meanwhile a thread of vLLM's waits for the device and answers.
So the host handles a step while the next one is launched, as vLLM's own scheduler does. What fails in a worker is told
with an answer of its own, or with the next one.

An error that is raised here holds none of vLLM's message queues. vLLM's future holds its error, and the error's frames
hold the future and the queues. A garbage collector that finds them together waits forever, up to vLLM 0.31: it ends a
queue's ZeroMQ context while the queue's sockets are open.
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
from specq.protocol import EngineError, EngineLostError
from specq.verification import Judgements

log = structlog.get_logger(__name__)

Installed = tuple[bool, dict[int, Sequence[int]], int]


def executor_of(config: VllmConfig) -> type[Executor]:
    """Return vLLM's executor for this configuration; the worker processes of one that has some shall have threads that
    answer, as with vLLM's asynchronous scheduler."""
    found: type[Executor] = Executor.get_class(config)
    config.scheduler_config.async_scheduling = issubclass(found, MultiprocExecutor)
    return found


class Workers:
    """The workers of `executor` (`specq.engines.vllm.worker`), each of which does the same; what the first says is
    taken.

    are_apart  whether they are processes of their own
    late       sends them drafted tokens, where they are all on this machine

    Each method raises EngineLostError where something fails in one of them, or takes longer than vLLM has patience for:
    nobody knows what they have done of it, so it cannot be repeated.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.are_apart = isinstance(executor, MultiprocExecutor)
        self.late: TokenSender | None = None
        self._flights = deque[Future[Any]]()  # what steps say, oldest first

    def install(self, verbose: bool) -> list[Installed]:
        """See `JudgingWorker.specq_install`; return what each says. What it raises goes on."""
        late = self._sender()
        patience_s = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS  # where one device alone fails, the others wait for it
        arguments = (verbose, self.are_apart, late.addresses if late is not None else [])
        found: list[Installed] = self._executor.collective_rpc("specq_install", patience_s, arguments)
        if late is not None:
            late.connect()
            self._executor.collective_rpc("specq_greet", patience_s)
            late.hide()
        self.late = late
        return found

    def _sender(self) -> TokenSender | None:
        """Return what sends drafted tokens, where workers are processes, all on this machine."""
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
        if launched.done():  # here, where it has failed
            self._answer(launched)
        self._flights.append(launched)

    def collect(self) -> Judgements:
        """Wait for the oldest step and return its judgements."""
        found: Judgements = self._answer(self._flights.popleft())
        return found

    def close(self) -> None:
        """Let go of what they are told through."""
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
            del asked  # this frame is one of the raised error's

    def _lost(self, error: Exception) -> EngineLostError:
        """Return what is raised for an error of vLLM's. Where workers are processes, that error and those behind it
        lose their frames: these hold vLLM's queues, and where a worker failed is in the worker's own log."""
        behind: BaseException | None = error if self.are_apart else None
        while behind is not None:
            behind.__traceback__ = None
            behind = behind.__context__
        return EngineLostError(f"vLLM's workers failed in a step: {type(error).__name__}: {error}")
