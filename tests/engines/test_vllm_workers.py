"""What vLLM's workers are told, and when: processes are asked for a step as soon as the next one is launched."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import count
from typing import Any

import pytest

from specq.protocol.errors import EngineLostError
from tests.devices import NEEDS_VLLM

pytestmark = NEEDS_VLLM

ANY = [None] * 6
PROCESSES, HERE = "MultiprocExecutor", "UniProcExecutor"


class Asked(list[str]):
    """The messages to two workers, which answer collections with numbers, the second one with others; `fails`: they fail to do that."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self._numbers, self.fails = count(), fails

    def answer(self, method: str, *_: Any, **options: Any) -> Future[Any]:
        """Note a message."""
        assert options == {"non_block": True}
        self.append(method.removeprefix("specq_"))
        future = Future[Any]()
        if self[-1] == self.fails:
            future.set_exception(RuntimeError("out of memory"))
        else:
            future.set_result([next(self._numbers) if self[-1] == "collect" else None, -1])
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
        (PROCESSES, "launch launch collect launch collect discard launch collect"),
        (HERE, "launch launch collect launch discard launch collect collect"),
    ],
)
def test_the_oldest_step_is_collected_and_the_newest_discarded(executor: str, expected: str) -> None:
    """Two are in flight; one behind which another was launched is asked for once."""
    asked = Asked()
    told = workers(executor, asked)
    told.launch(*ANY)
    told.launch(*ANY)
    assert told.collect() == 0
    told.launch(*ANY)
    told.discard()
    told.launch(*ANY)
    assert [told.collect(), told.collect()] == [1, 2]
    assert asked == expected.split()


LOST = pytest.raises(EngineLostError, match="RuntimeError: out of memory")


@pytest.mark.parametrize("end", ["collect", "discard"])
@pytest.mark.parametrize("executor", [PROCESSES, HERE])
def test_what_fails_in_a_worker_says_what(executor: str, end: str) -> None:
    """Nothing is known of that step any more."""
    told = workers(executor, Asked(fails=end))
    told.launch(*ANY)
    with LOST:
        getattr(told, end)()


@pytest.mark.parametrize("end", ["collect", "discard"])
def test_a_launch_that_fails_in_a_process_is_never_taken_for_another_one(end: str) -> None:
    """The host goes on, and learns of it when it asks for that step, whatever is said then; the step before is whole."""
    asked = Asked()
    told = workers(PROCESSES, asked)
    told.launch(*ANY)
    asked.fails = "launch"
    told.launch(*ANY)
    assert told.collect() == 0
    with LOST:
        getattr(told, end)()


def test_a_launch_that_fails_here_says_so_at_once() -> None:
    """There is no such step then."""
    with LOST:
        workers(HERE, Asked(fails="launch")).launch(*ANY)
