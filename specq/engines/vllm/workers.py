"""What vLLM's workers are told to do, and say: in this process one after the other, in processes of their own ahead of it.

A worker process launches a step while the host goes on, and is asked for the step before by the same message: as soon as it has launched, it waits for
that one. So between the end of a step and the launch of the one after the next there are one answer and one message, and no others, as between vLLM's
own scheduler and its workers. What fails in a worker is told with the next answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from specq.engines.vllm.plans import Plan
from specq.protocol import EngineLostError
from specq.verification import Judgements

Installed = tuple[bool, dict[int, Sequence[int]], int]


@dataclass(slots=True)
class _Flight:
    """A step that was launched: whether it was, and what it says, if that was asked for: then the answer says also whether the next one was launched."""

    launched: Future[Any]
    collected: Future[Any] | None = None


class Workers:
    """The workers of `executor` (`specq.engines.vllm.worker`), each of which does the same; what the first says is taken.

    Each method raises EngineLostError where something fails in one of them, or takes longer than vLLM has patience for: nobody knows what they have
    done of it, so it cannot be repeated.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._are_apart = isinstance(executor, MultiprocExecutor)
        self._flights = deque[_Flight]()  # oldest first

    def install(self, verbose: bool) -> list[Installed]:
        """See `JudgingWorker.specq_install`; return what each says. What it raises goes on."""
        patience_s = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS  # where one device alone fails, the others wait for it
        found: list[Installed] = self._executor.collective_rpc("specq_install", patience_s, (verbose,))
        return found

    def launch(self, plan: Plan) -> None:
        """See `RunnerSteps.launch`."""
        collects = self._are_apart and bool(self._flights) and self._flights[-1].collected is None
        launched = self._ask("specq_launch", plan, collects)
        if not self._are_apart:
            self._answer(launched)
        if collects:
            self._flights[-1].collected = launched
        self._flights.append(_Flight(launched))

    def collect(self) -> Judgements:
        """Wait for the oldest step; see `RunnerSteps.collect`."""
        flight = self._flights.popleft()
        collected = flight.collected or self._ask("specq_collect")
        self._answer(flight.launched)
        found: Judgements = self._answer(collected)
        return found

    def discard(self) -> None:
        """Forget the newest step; see `RunnerSteps.discard`."""
        discarded = self._ask("specq_discard")
        self._answer(self._flights.pop().launched)
        self._answer(discarded)

    def _ask(self, method: str, *arguments: Any) -> Future[Any]:
        patience_s = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        try:
            asked: Future[Any] = self._executor.collective_rpc(method, patience_s, arguments, non_block=True)
        except Exception as error:
            raise _lost(error) from error
        return asked

    def _answer(self, asked: Future[Any]) -> Any:
        try:
            return asked.result()[0]
        except Exception as error:
            raise _lost(error) from error


def _lost(error: Exception) -> EngineLostError:
    return EngineLostError(f"vLLM's workers failed in a step: {type(error).__name__}: {error}")
