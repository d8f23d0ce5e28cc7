"""Sessions that arrive in a burst begin together: the rule by itself, and first tokens by a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

import numpy as np
import pytest

from specq.protocol import Close, Int32Array, Open, SamplingParams, Verdict
from specq.testing.toy import ToyEngine, toy_info
from specq.verifier import StepCurve, Verifier
from specq.verifier.control.bursts import GAPS, LEAST, MOST_GAP_S, PATIENCE_S, Bursts
from tests.verifier.test_prefill_limit import Service, Text, on_cpu, on_gpu
from tests.verifier.timed_target import Machine, TimedTarget

STEP_S = 0.03


def burst(gaps: Iterable[float]) -> tuple[Bursts, float]:
    found, now = Bursts(), 100.0
    for gap in gaps:
        now += gap
        found.arrive(now)
    return found, now


def test_a_step_is_put_off_until_none_has_arrived_for_some_gaps():
    bursts, last = burst([0.0004] * 50)
    assert bursts.wait_s(last, 20, STEP_S) == pytest.approx(GAPS * 0.0004, rel=0.01)
    assert bursts.wait_s(last + 1.01 * GAPS * 0.0004, 20, STEP_S) == 0.0


def test_fast_arrivals_are_waited_for_as_long_as_sockets_are_polled():
    bursts, last = burst([0.00001] * 20)
    assert bursts.wait_s(last, 20, STEP_S) == pytest.approx(PATIENCE_S)


def test_a_step_is_put_off_no_longer_than_it_takes():
    bursts, last = burst([0.0004] * 100)
    assert bursts.wait_s(last, 1, 99 * 0.0004 - 1e-9) == 0.0
    assert bursts.wait_s(last, 1, 99 * 0.0004 + 0.0005) == pytest.approx(0.0005, abs=1e-6)


def test_where_more_wait_than_would_miss_the_step_it_begins():
    bursts, last = burst([0.001] * 30)
    bursts.begin_step()
    bursts.arrive(last := last + 0.001)
    assert bursts.wait_s(last, 29, STEP_S) > 0
    assert bursts.wait_s(last, 31, STEP_S) == 0.0


@pytest.mark.parametrize("gap_s", [0.0001, 2 * MOST_GAP_S])
def test_few_sessions_are_no_burst_and_neither_are_slow_ones(gap_s):
    quick, last = burst([0.0001] * (LEAST - 1))
    assert quick.wait_s(last, 0, STEP_S) == 0.0
    slow, last = burst([gap_s] * LEAST)
    assert (slow.wait_s(last, 0, 10.0) > 0) == (gap_s < MOST_GAP_S)


def test_who_arrives_while_a_step_runs_is_waited_for_anew():
    bursts, last = burst([0.0004] * 50)
    bursts.begin_step()
    assert bursts.wait_s(last, 0, STEP_S) == 0.0
    bursts.arrive(last + 0.0004)
    assert bursts.wait_s(last + 0.0004, 0, STEP_S) > 0


@pytest.mark.parametrize("num_ended", [LEAST - 1, LEAST])
def test_after_many_have_ended_together_the_first_one_is_waited_for(num_ended):
    bursts = Bursts()
    bursts.end(num_ended, 100.0)
    bursts.arrive(100.01)
    assert (bursts.wait_s(100.01, 1, STEP_S) > 0) == (num_ended == LEAST)
    assert bursts.wait_s(100.01 + PATIENCE_S + 1e-9, 1, STEP_S) == 0.0
    bursts.begin_step()
    bursts.arrive(101.0)
    assert bursts.wait_s(101.0, 1, STEP_S) == 0.0


NUM_TOKENS = 8
NEW_TOKENS = 9  # of a prompt whose beginning has KV


class Waves(Service):
    """Sessions that arrive one after the other, `gap_s` apart, and end together; then as many others."""

    def __init__(self, make: Callable[[Machine], TimedTarget], gap_s: float, prompt_len: int, *, gathers: bool) -> None:
        super().__init__(make)
        self._gap_s, self._prompt_len, self._gathers = gap_s, prompt_len, gathers

    def wave(self, num_sessions: int) -> float:
        """Serve so many sessions to their end; return the median of the seconds to their first tokens."""
        self._first, self._began, self._most = len(self.texts), self.machine.now + 0.002, num_sessions
        while self._coming < float("inf") or not all(len(text.token_ids) >= NUM_TOKENS for text in self._own):
            self._deliver()
            while self._gathers and (wait_s := self.verifier.gather(self.machine.now)):
                self.machine.wait(min(self.machine.now + wait_s, self._coming))
                self._deliver()
            if self.verifier.has_work:
                self.step()
            else:
                self.machine.wait(self._coming)
        for session_id in range(self._first, len(self.texts)):
            self.verifier.handle(Close(session_id=session_id, epoch=1), self.machine.now)
        return median(text.first_s for text in self._own)

    @property
    def _own(self) -> list[Text]:
        return self.texts[self._first :]

    @property
    def _coming(self) -> float:
        """When the next session of the wave arrives."""
        num = len(self._own)
        return self._began + num * self._gap_s if num < self._most else float("inf")

    def _deliver(self) -> None:
        while self._coming <= self.machine.now:
            arrived = self._coming
            self.open(self._prompt_len, NUM_TOKENS).opened = arrived


def to_as_they_come(
    make: Callable[[Machine], TimedTarget], num_sessions: int, gap_s: float, prompt_len: int
) -> tuple[float, float]:
    """Return the median seconds to the first token of the third of three waves, bursts gathered and as they come."""
    found = []
    for gathers in (True, False):
        waves = Waves(make, gap_s, prompt_len, gathers=gathers)
        found.append([waves.wave(num_sessions) for _ in range(3)][-1])
        waves.check()
    return found[0], found[1]


def slow_prompts(machine: Machine) -> TimedTarget:
    """A 7B model whose steps with prompts take long as such, as in vLLM."""
    return TimedTarget(
        machine, [(1, 6.0), (64, 6.7), (128, 7.4), (512, 18.0), (2048, 50.0)],
        overlaps=True, launch_s=0.002, collect_s=0.0005, mixed_s=0.015,
    )  # fmt: skip


@pytest.mark.parametrize("num_sessions", [20, 64])
def test_a_burst_has_its_first_tokens_sooner_where_steps_with_prompts_take_long(num_sessions):
    together, as_they_come = to_as_they_come(slow_prompts, num_sessions, 0.0003, NEW_TOKENS)
    assert together < 0.75 * as_they_come


@pytest.mark.parametrize("make", [on_gpu, on_cpu, slow_prompts])
@pytest.mark.parametrize("prompt_len", [NEW_TOKENS, 60])
@pytest.mark.parametrize(("num_sessions", "gap_s"), [(1, 0.0), (3, 0.0001), (20, 0.0002), (64, 0.001), (10, 0.02)])
def test_no_request_waits_much_longer_than_without_bursts(make, prompt_len, num_sessions, gap_s):
    together, as_they_come = to_as_they_come(make, num_sessions, gap_s, prompt_len)
    assert together < 1.1 * as_they_come + PATIENCE_S


class _OpensAllButOne(ToyEngine):
    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        if session_id == 3:
            raise ValueError("no")
        return super().open(session_id, token_ids, owner)


def test_a_session_that_fails_while_others_are_waited_for_may_be_closed_before_the_step():
    """Nothing is said of it, and the others go on."""
    verifier = Verifier(_OpensAllButOne(toy_info()), StepCurve([1, 64], [0.05, 0.06]), incarnation=1)
    for session_id in range(1, 9):
        prompt = np.array([5, 6, 7], np.int32)
        opening = Open(
            session_id=session_id, epoch=1, prompt_len=3, tokens_left=5, params=SamplingParams(), token_ids=prompt
        )
        verifier.handle(opening, 0.0001 * session_id)
    assert verifier.gather(0.0008) > 0
    verifier.handle(Close(session_id=3, epoch=1), 0.0009)
    verdicts = [one for one in verifier.step(lambda: 0.001) if isinstance(one, Verdict)]
    assert [one.session_id for one in verdicts] == [1, 2, 4, 5, 6, 7, 8]
