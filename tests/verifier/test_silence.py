"""How long a verifier sends nothing, against how long its heartbeats said, by a virtual clock: on machines that are
slow, and slower than when they were measured."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from specq.broker.state.registry import MOST_STEP, Worker
from specq.protocol import Heartbeat, Hello, Open, SamplingParams
from specq.verifier.control.prefill_limit import LEAST_ROWS, LONGEST_S, SLOWER
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from tests.verifier.timed_target import INFO, TEXT, Machine, TimedTarget

BEAT_S, LIVENESS_S = 0.5, 3.0
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
LAPTOP = {1: 9.0, 8: 25.0, 64: 110.0, 512: 900.0}  # rows: milliseconds, of a small model on two quiet cores
LARGE = {1: 600.0, 8: 640.0, 64: 1300.0, 512: 9000.0}  # of a large one


class Service:
    """A verifier on a processor, `slower` times as slow as when its steps were measured, in the loop of its process;
    when it beats the broker's record is asked how long it may be silent."""

    def __init__(self, step_ms: dict[int, float], slower: float) -> None:
        self.machine = Machine()
        target = TimedTarget(
            self.machine, [(rows, slower * ms) for rows, ms in step_ms.items()], overlaps=False, launch_s=0.0,
            collect_s=0.0
        )  # fmt: skip
        curve = StepCurve(SIZES, [seconds / slower for seconds in target.step_times(SIZES)])
        self.verifier = Verifier(target, curve, incarnation=1, max_sessions=64, max_uncommitted=1 << 30)
        hello = Hello(role="target", name="v", incarnation=1, model=INFO, endpoint="tcp://127.0.0.1:1", max_sessions=64)
        self.worker = Worker(b"v", hello, last_seen=0.0)
        self.step_ms, self.num_lost = list[int](), 0

    def beat(self) -> None:
        beat = self.verifier.heartbeat()
        self.step_ms.append(beat.step_ms)
        self.worker.beat(beat, self.machine.now)

    def open(self, first_id: int, count: int, prompt_len: int, num_tokens: int = 16) -> None:
        for session_id in range(first_id, first_id + count):
            message = Open(
                session_id=session_id, epoch=1, prompt_len=prompt_len, tokens_left=num_tokens,
                params=SamplingParams(ignore_eos=True),
                token_ids=TEXT.prompt(session_id, prompt_len),
            )  # fmt: skip
            assert self.verifier.handle(message, self.machine.now) == []

    def serve(self) -> list[float]:
        """Serve until all is done; return what the steps took, and count how often the broker would have taken the
        verifier for lost."""
        ends = [self.machine.now]
        while self.verifier.has_work:
            if self.machine.now - self.worker.last_seen >= BEAT_S:
                self.beat()
            reports = self.verifier.step(self.machine)
            self.num_lost += self.worker.is_silent(self.machine.now, LIVENESS_S)
            if list(reports):
                self.worker.last_seen = self.machine.now
            ends.append(self.machine.now)
        return [after - before for before, after in pairwise(ends)]


@pytest.mark.parametrize(
    ("step_ms", "slower"), [(LAPTOP, 1.0), (LAPTOP, 4.0), (LAPTOP, 8.0), (LARGE, 1.0), (LARGE, 4.0)]
)
def test_a_burst_on_a_busy_machine_loses_no_verifier(step_ms: dict[int, float], slower: float) -> None:
    """64 sessions at once, and 64 more beside those that generate: the heartbeat before was the last of an idle
    verifier."""
    service = Service(step_ms, slower)
    service.beat()
    service.open(0, 64, prompt_len=60)
    service.serve()
    service.open(64, 32, prompt_len=400)
    service.serve()
    assert service.num_lost == 0


def test_prefill_steps_stay_short_without_decoding_sessions() -> None:
    """As many rows as take half a second by what is expected, on a machine that became slower too once that is
    known."""
    for slower in (1.0, 4.0):
        service = Service(LAPTOP, slower)
        service.open(0, 1, prompt_len=6000, num_tokens=1)
        took = service.serve()
        assert max(took) < slower * 1.1 * LONGEST_S
        assert max(took[4:]) < 1.3 * LONGEST_S
        assert np.mean(took[4:-1]) > 0.7 * LONGEST_S  # and not crumbs


def test_a_large_model_has_some_rows_in_each_step() -> None:
    """Though each of its steps takes longer than that."""
    service = Service(LARGE, 1.0)
    service.open(0, 1, prompt_len=40 * LEAST_ROWS, num_tokens=1)
    assert len(service.serve()) <= 40


@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_the_announced_step_time_is_as_short_as_possible(slower: float) -> None:
    """On a laptop a verifier that hangs in a step is found within some seconds, whatever the largest step would take,
    before a burst and after it."""
    service = Service(LAPTOP, slower)
    service.beat()
    service.open(0, 64, prompt_len=60)
    service.serve()
    service.beat()
    assert service.step_ms[0] <= 1000 * SLOWER * LONGEST_S
    assert max(service.step_ms) <= 1000 * SLOWER * slower * 1.1 * LONGEST_S


def test_a_hung_worker_is_found_for_any_announcement() -> None:
    """It may be wrong, or lie: there is an absolute bound."""
    worker = Service(LAPTOP, 1.0).worker
    worker.beat(Heartbeat(incarnation=1, state="ready", pending=1, step_ms=3_600_000), 0.0)
    assert not worker.is_silent((1 + MOST_STEP) * LIVENESS_S - 0.1, LIVENESS_S)
    assert worker.is_silent((1 + MOST_STEP) * LIVENESS_S + 0.1, LIVENESS_S)
