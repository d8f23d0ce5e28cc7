"""Messages to vLLM's workers: one message per step, and one answer, which also reports failures."""

from __future__ import annotations

import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from specq.protocol.errors import EngineLostError
from tests.devices import NEEDS_VLLM

pytestmark = NEEDS_VLLM

PLAN: Any = None  # is not looked at
PROCESSES, HERE = "MultiprocExecutor", "UniProcExecutor"


class Late(Future[Any]):
    """An answer that comes when it is waited for."""

    def result(self, timeout: float | None = None) -> Any:
        """Return it."""
        if not self.done():
            self.set_result([self.value, None])
        return super().result(timeout)

    value: int | None = None


class Asked(list[str]):
    """The messages to two workers, with how many steps are in flight where one is launched; the first worker answers
    steps with numbers, and the second one with nothing; `fails`: they fail to do that."""

    def __init__(self, fails: str = "", *, at_once: bool = False) -> None:
        super().__init__()
        self._numbers, self.fails, self._at_once = count(), fails, at_once

    def answer(self, method: str, _: float, arguments: tuple[Any, ...], **options: Any) -> Future[Any]:
        """Note a message."""
        assert options == {"non_block": True}
        name = method.removeprefix("specq_")
        self.append(f"{name} {arguments[1]}" if name == "launch" else name)
        future = Late()
        if name == "launch":
            future.value = next(self._numbers)
        if name != self.fails:
            return future
        error = RuntimeError("out of memory")
        if self._at_once:
            future.set_exception(error)
            return future
        failing: Any = SimpleNamespace(done=lambda: False, result=lambda: (_ for _ in ()).throw(error))
        return failing


def workers(executor: str, asked: Asked) -> Any:
    """Return `Workers` of one of vLLM's executors, which was never started."""
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    from specq.engines.vllm.workers import Workers

    of_vllm: Any = {**vars(multiproc_executor), **vars(uniproc_executor)}[executor]
    methods = {"collective_rpc": lambda _, *args, **options: asked.answer(*args, **options), "shutdown": lambda _: None}
    made = type("Fake", (of_vllm,), methods)
    return Workers(made.__new__(made))


@pytest.mark.parametrize("executor", [PROCESSES, HERE])
def test_the_oldest_step_is_collected_and_the_newest_discarded(executor: str) -> None:
    """Two are in flight; nothing is asked for a step but that it is launched."""
    asked = Asked()
    told = workers(executor, asked)
    told.launch(PLAN)
    told.launch(PLAN)
    assert told.collect() == 0
    told.launch(PLAN)
    told.discard()
    told.launch(PLAN)
    assert [told.collect(), told.collect()] == [1, 3]
    assert asked == ["launch 0", "launch 1", "launch 1", "discard", "launch 1"]


LOST = pytest.raises(EngineLostError, match="RuntimeError: out of memory")


@pytest.mark.parametrize("executor", [PROCESSES, HERE])
def test_what_fails_in_a_worker_says_what(executor: str) -> None:
    """Nothing is known of that step any more."""
    told = workers(executor, Asked(fails="discard"))
    told.launch(PLAN)
    with LOST:
        told.discard()


@pytest.mark.parametrize("end", ["collect", "discard"])
def test_a_launch_that_fails_in_a_process_is_never_taken_for_another_one(end: str) -> None:
    """The host continues, and gets the error when it asks for that step, despite other messages. The last step is
    whole."""
    asked = Asked()
    told = workers(PROCESSES, asked)
    told.launch(PLAN)
    asked.fails = "launch"
    told.launch(PLAN)
    assert told.collect() == 0
    with LOST:
        getattr(told, end)()


def test_a_launch_that_fails_here_says_so_at_once() -> None:
    """The step does not exist then."""
    with LOST:
        workers(HERE, Asked(fails="launch", at_once=True)).launch(PLAN)


class Answers:
    """vLLM's queue of a worker's answers: the worker fails, or is silent."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails

    def dequeue(self, timeout: float | None = None) -> Any:
        """Return a worker's answer."""
        from vllm.v1.executor.multiproc_executor import WorkerProc

        if not self._fails:
            raise TimeoutError
        return WorkerProc.ResponseStatus.FAILURE, "out of memory"

    def shutdown(self) -> None:
        """As of vLLM's queue."""


@pytest.mark.parametrize("fails", [True, False])
def test_an_error_holds_no_queue_of_vllms(fails: bool) -> None:
    """Once vLLM's executor is shut down, its queues are gone: without the garbage collector, and though somebody has
    the error."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from specq.engines.vllm.workers import Workers

    executor: Any = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.is_failed, executor.futures_queue = False, deque()
    executor.rpc_broadcast_mq = SimpleNamespace(enqueue=lambda _: None, shutdown=lambda: None)
    executor.response_mqs = [Answers(fails=fails)]
    executor.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(enable_fault_tolerance=False))
    answers = weakref.ref(executor.response_mqs[0])
    told = Workers(executor)
    told.launch(PLAN)
    with pytest.raises(EngineLostError, match="out of memory" if fails else "timed out") as lost:
        told.collect()
    executor.shutdown()
    assert answers() is None
    assert isinstance(lost.value.__cause__, RuntimeError if fails else TimeoutError)


@pytest.mark.parametrize(("executor", "answers"), [(PROCESSES, True), (HERE, False)])
def test_processes_have_threads_that_answer(monkeypatch: pytest.MonkeyPatch, executor: str, answers: bool) -> None:
    """vLLM starts them where it schedules asynchronously."""
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    from specq.engines.vllm import workers as asked

    of_vllm = {**vars(multiproc_executor), **vars(uniproc_executor)}[executor]
    monkeypatch.setattr(asked.Executor, "get_class", lambda _: of_vllm)
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False))
    assert issubclass(asked.executor_of(config), of_vllm)
    assert config.scheduler_config.async_scheduling is answers


def test_a_step_whose_masks_come_later_lets_its_worker_read_on() -> None:
    """Also if its tokens cannot feed the next step. Its masks come with the worker's next message."""
    import torch

    from specq.engines.vllm.patches.runner import StepResult
    from specq.engines.vllm.worker import JudgingWorker
    from specq.verification import StepBatch

    answer, worker = StepResult(StepBatch.of([]), torch.zeros(0, 8)), JudgingWorker()
    worker.rank, worker._specq_is_apart = 0, True
    worker.specq_steps = SimpleNamespace(launch=lambda *_: answer)  # type: ignore[assignment]
    with ThreadPoolExecutor(1) as pool:
        launched = pool.submit(worker.specq_launch, SimpleNamespace(feeds=False, is_judged_late=True), 1)
        try:
            assert launched.result(60) is answer
        finally:
            answer.drop()
