"""What vLLM's workers are told, and when: processes are asked for a step by the message that launches the next one."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import count
from typing import Any

import pytest

from specq.protocol.errors import EngineLostError
from tests.devices import NEEDS_VLLM

pytestmark = NEEDS_VLLM

PLAN: Any = None  # is not looked at
PROCESSES, HERE = "MultiprocExecutor", "UniProcExecutor"


class Asked(list[str]):
    """The messages to two workers, which answer collections with numbers, and the second one with nothing; `fails`: they fail to do that."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self._numbers, self.fails = count(), fails

    def answer(self, method: str, _: float, arguments: tuple[Any, ...], **options: Any) -> Future[Any]:
        """Note a message."""
        assert options == {"non_block": True}
        name = method.removeprefix("specq_")
        collects = name == "collect" or (name == "launch" and arguments[1])
        self.append("launch+collect" if name == "launch" and collects else name)
        future = Future[Any]()
        if name == self.fails:
            future.set_exception(RuntimeError("out of memory"))
        else:
            future.set_result([next(self._numbers) if collects else None, None])
        return future


def workers(executor: str, asked: Asked) -> Any:
    """Return `Workers` of one of vLLM's executors, which was never started."""
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    from specq.engines.vllm.workers import Workers

    of_vllm: Any = {**vars(multiproc_executor), **vars(uniproc_executor)}[executor]
    methods = {"collective_rpc": lambda _, *args, **options: asked.answer(*args, **options), "shutdown": lambda _: None}
    made = type("Fake", (of_vllm,), methods)
    return Workers(made.__new__(made))


@pytest.mark.parametrize(
    ("executor", "expected"),
    [
        (PROCESSES, "launch launch+collect launch+collect discard launch collect"),
        (HERE, "launch launch collect launch discard launch collect collect"),
    ],
)
def test_the_oldest_step_is_collected_and_the_newest_discarded(executor: str, expected: str) -> None:
    """Two are in flight; one behind which another was launched is asked for once."""
    asked = Asked()
    told = workers(executor, asked)
    told.launch(PLAN)
    told.launch(PLAN)
    assert told.collect() == 0
    told.launch(PLAN)
    told.discard()
    told.launch(PLAN)
    assert [told.collect(), told.collect()] == [1, 2]
    assert asked == expected.split()


LOST = pytest.raises(EngineLostError, match="RuntimeError: out of memory")


@pytest.mark.parametrize("end", ["collect", "discard"])
@pytest.mark.parametrize("executor", [PROCESSES, HERE])
def test_what_fails_in_a_worker_says_what(executor: str, end: str) -> None:
    """Nothing is known of that step any more."""
    told = workers(executor, Asked(fails=end))
    told.launch(PLAN)
    with LOST:
        getattr(told, end)()


@pytest.mark.parametrize("end", ["collect", "discard"])
def test_a_launch_that_fails_in_a_process_is_never_taken_for_another_one(end: str) -> None:
    """The host goes on, and learns of it when it waits for that message: it asks for the step before, too."""
    asked = Asked()
    told = workers(PROCESSES, asked)
    told.launch(PLAN)
    asked.fails = "launch"
    told.launch(PLAN)
    with LOST:
        getattr(told, end)()


def test_a_first_launch_that_fails_in_a_process_is_told_with_the_step() -> None:
    """Nothing else has asked for an answer before."""
    asked = Asked(fails="launch")
    told = workers(PROCESSES, asked)
    told.launch(PLAN)
    with LOST:
        told.collect()


def test_a_launch_that_fails_here_says_so_at_once() -> None:
    """There is no such step then."""
    with LOST:
        workers(HERE, Asked(fails="launch")).launch(PLAN)
