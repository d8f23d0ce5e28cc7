"""Prompts beside sessions that generate: by a virtual clock, how long these wait between tokens, and how long prompts
take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, quantiles

import numpy as np
import pytest

from specq.protocol import Open, SamplingParams, Verdict
from specq.simulate.scenarios import HardwareCurve
from specq.verifier.control.prefill_limit import UNLIMITED, PrefillLimit, _by_curve
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.step.plan import plan
from specq.verifier.trees import DraftTrees
from tests.verifier.sessions import make_session
from tests.verifier.timed_target import TEXT, Machine, TimedTarget

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def on_gpu(machine: Machine) -> TimedTarget:
    """A 7B model on an H200, behind which the host runs ahead; steps with prompts have no whole CUDA graph."""
    return TimedTarget(
        machine, [(1, 3.45), (8, 3.75), (64, 4.9), (128, 5.2), (256, 6.4), (512, 10.0)],
        overlaps=True, launch_s=0.0007, collect_s=0.0005, mixed_s=0.0012, attended_s=2e-9,
    )  # fmt: skip


def on_cpu(machine: Machine) -> TimedTarget:
    """A small model on a processor: each row takes time."""
    return TimedTarget(
        machine, [(1, 9.0), (512, 9.0 + 511 * 0.9)],
        overlaps=False, launch_s=0.0002, collect_s=0.0002, attended_s=4e-7,
    )  # fmt: skip


@dataclass(frozen=True)
class Load:
    """A machine, how many sessions generate there, and how long the prompt is that comes beside them."""

    make: Callable[[Machine], TimedTarget]
    num_sessions: int
    prompt_len: int


LOADS = {"gpu": Load(on_gpu, 64, 32_768), "cpu": Load(on_cpu, 8, 1500)}
EITHER = [pytest.param(LOADS["gpu"], id="gpu", marks=pytest.mark.slow), pytest.param(LOADS["cpu"], id="cpu")]


@dataclass
class Text:
    prompt: list[int]
    opened: float
    arrivals: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.arrivals[0] - self.opened


class Service:
    """A verifier on a machine that only takes time."""

    def __init__(self, make: Callable[[Machine], TimedTarget], **options: float) -> None:
        self.machine = Machine()
        target = make(self.machine)
        # Where the host runs ahead of the device, steps take less than those that were measured, which the host waited
        # for.
        waited = 1.3 if target.overlaps else 1.0
        curve = StepCurve(SIZES, [waited * seconds for seconds in target.step_times(SIZES)])
        self.verifier = Verifier(target, curve, incarnation=1, max_sessions=128, max_uncommitted=1 << 30, **options)  # type: ignore[arg-type]
        self.texts: list[Text] = []

    def open(self, prompt_len: int, num_tokens: int = 1_000_000 - 40_000) -> Text:
        session_id = len(self.texts)
        prompt = TEXT.prompt(session_id, prompt_len)
        message = Open(
            session_id=session_id, epoch=1, prompt_len=prompt_len, tokens_left=num_tokens,
            params=SamplingParams(ignore_eos=True),
            token_ids=prompt,
        )  # fmt: skip
        assert self.verifier.handle(message, self.machine.now) == []
        self.texts.append(Text(prompt.tolist(), self.machine.now))
        return self.texts[-1]

    def step(self) -> None:
        for verdict in self.verifier.step(self.machine):
            assert isinstance(verdict, Verdict)
            text = self.texts[verdict.session_id]
            text.token_ids += verdict.token_ids.tolist()
            text.arrivals += [self.machine.now] * len(verdict.token_ids)

    def until(self, texts: Sequence[Text], num_tokens: int) -> None:
        while any(len(text.token_ids) < num_tokens for text in texts):
            self.step()

    def check(self) -> None:
        """Each text is what the target alone would say."""
        for session_id, text in enumerate(self.texts):
            assert TEXT.follows(session_id, np.array(text.prompt, np.int32).tolist(), text.token_ids)


def gaps(texts: Sequence[Text], began: float) -> list[float]:
    """Seconds between tokens from a moment on."""
    return [float(gap) for text in texts for gap in np.diff([at for at in text.arrivals if at >= began])]


def ratio(found: Sequence[float]) -> float:
    return quantiles(found, n=100)[98] / median(found)


def beside(load: Load, **options: float) -> tuple[Service, Text, list[Text], float]:
    """Let a long prompt come to its end beside sessions that generate; return it and these, and what a plain step of
    theirs takes."""
    service = Service(load.make, **options)
    shorts = [service.open(20) for _ in range(load.num_sessions)]
    service.until(shorts, 50)
    plain_s = median(gaps(shorts, 0.0))
    long = service.open(load.prompt_len)
    service.until([long], 1)
    service.check()
    return service, long, shorts, plain_s


def alone(load: Load) -> float:
    """Return the seconds to the first token of a long prompt without other sessions."""
    service = Service(load.make)
    service.until([long := service.open(load.prompt_len)], 1)
    return long.first_s


@pytest.mark.parametrize("load", EITHER)
def test_a_long_prompt_is_gentle_on_its_neighbours(load: Load) -> None:
    """Also against the plain steps before it came, and from its first rows on; without the limit they wait for it."""
    _, long, shorts, plain_s = beside(load)
    found = gaps(shorts, long.opened)
    assert ratio([*gaps(shorts, 0.0)]) < 2
    assert quantiles(found, n=100)[98] < 2 * plain_s
    assert median(found) > 1.5 * plain_s  # what they can spare is used
    _, long, shorts, plain_s = beside(load, max_prefill_slowdown=0)
    assert quantiles(gaps(shorts, long.opened), n=100)[98] > 2 * plain_s


@pytest.mark.parametrize(("slowdown", "most"), [(1.8, 17 / 16 * 1.8 / 0.8), (1, 17 / 16 * (1 + 8 / 1.25))])
def test_a_long_prompt_takes_a_bounded_time(slowdown: float, most: float) -> None:
    """With the least rows, every fourth time twice as many, 7.9 times as long as alone."""
    load = LOADS["cpu"]
    _, long, _, _ = beside(load, max_prefill_slowdown=slowdown)
    assert 0.7 * most * alone(load) < long.first_s < 1.1 * most * alone(load)


def test_a_long_prompt_rests_for_one_step_in_seventeen() -> None:
    """So that what a step without prompts takes is known. The step after it has rows of the prompt again."""
    load = LOADS["cpu"]
    service = Service(load.make)
    shorts = [service.open(20) for _ in range(load.num_sessions)]
    service.until(shorts, 50)
    long, left, is_resting = service.open(load.prompt_len), [load.prompt_len], list[bool]()
    session = service.verifier.sessions[len(shorts)]
    while not long.token_ids:
        service.step()
        left.append(session.num_pending)
        is_resting.append(left[-1] == left[-2])
    assert 1 <= sum(is_resting) <= len(is_resting) / 17
    assert not any(both == (True, True) for both in pairwise(is_resting))


def test_prompts_are_not_crumbled_where_steps_with_them_are_dear() -> None:
    """Where each step with prompts takes 20 ms more, at least as much again goes to their rows, once that is known."""

    def make(machine: Machine) -> TimedTarget:
        return TimedTarget(
            machine, [(1, 9.0), (512, 9.0 + 511 * 0.9)], overlaps=False, launch_s=0.0002, collect_s=0.0002, mixed_s=0.02
        )  # fmt: skip

    _, long, shorts, plain_s = beside(Load(make, 8, 400))
    rows_s = 400 * 0.0009
    beyond = sum(gap - plain_s for gap in gaps(shorts[:1], long.opened))
    assert rows_s < beyond < 3.5 * rows_s


@pytest.mark.parametrize("make", [on_gpu, on_cpu])
def test_a_burst_of_short_prompts_is_as_quick_as_without_a_limit(make: Callable[[Machine], TimedTarget]) -> None:
    """A session with an early first token does not slow the others of the burst down."""
    first_s = []
    for slowdown in (1.8, 0.0):
        service = Service(make, max_prefill_slowdown=slowdown)
        burst = [service.open(40 + i) for i in range(64)]
        service.until(burst, 1)
        first_s.append([text.first_s for text in burst])
    assert first_s[0] == first_s[1]


@pytest.mark.parametrize("make", [on_gpu, on_cpu])
def test_a_burst_that_comes_in_parts_is_as_quick_as_without_a_limit(make: Callable[[Machine], TimedTarget]) -> None:
    """Two sessions, and twice as many with each step: those that decode are never more than those that come."""
    first_s = []
    for slowdown in (1.8, 0.0):
        service = Service(make, max_prefill_slowdown=slowdown)
        for count in (2, 4, 8, 16, 32):
            burst = [service.open(40 + i) for i in range(count)]
            service.step()
        service.until(service.texts, 1)
        first_s.append([text.first_s for text in burst])
    assert first_s[0] == first_s[1]


@pytest.mark.parametrize("load", EITHER)
def test_prompts_that_come_beside_others_are_limited_however_short(load: Load) -> None:
    """What prompts take was learned from a long one before."""
    service, _, shorts, plain_s = beside(load)
    began = service.machine.now
    burst = [service.open(60) for _ in range(load.num_sessions // 2)]
    service.until(burst, 1)
    ended = service.machine.now
    service.until(burst, 50)
    assert plain_s < median(gaps(shorts, ended)) < 1.5 * plain_s
    assert quantiles(gaps(shorts, began), n=100)[98] < 2 * plain_s
    service.check()


def test_a_long_prompt_of_a_burst_does_not_hold_up_the_short_ones() -> None:
    """They come to their first tokens as without a limit; then it computes beside them."""
    service = Service(on_gpu)
    long = service.open(32_768)
    shorts = [service.open(20) for _ in range(64)]
    service.until(shorts, 1)
    began = service.machine.now
    assert began < 0.1
    service.until([long], 1)
    assert ratio(gaps(shorts, began)) < 2


@pytest.mark.parametrize("limit", [PrefillLimit(), UNLIMITED])
def test_sessions_that_generate_take_part_in_each_step(limit: PrefillLimit) -> None:
    """However few rows a step has, and though prompts come first: these get what is left, and a row at least."""
    trees, curve = DraftTrees(), StepCurve([1, 64], [0.004, 0.005])
    prompts = [make_session(list(range(1, 101)), session_id=i, trees=trees) for i in (1, 2)]
    others = [make_session([3, 4], session_id=i, trees=trees) for i in range(3, 13)]
    for session in others:
        session.kv_len = 1
    for max_rows, num_left in ((16, 6), (11, 1)):
        shares = plan([*prompts, *others], curve, max_rows=max_rows, free_slots=1000, prefill=limit).shares
        assert shares.batch.session_ids == [1, *range(3, 13)]
        assert shares.batch.num_tokens.tolist() == [num_left, *[1] * 10]


def test_a_machine_that_became_slower_is_noticed_before_a_prompt_comes() -> None:
    """Plain steps take three times as long as was measured; so will rows of prompts, and the first of them already are
    as many as fit."""

    def slow(machine: Machine) -> TimedTarget:
        target = on_cpu(machine)
        target._curve = HardwareCurve([(1, 27.0), (512, 27.0 + 511 * 2.7)])
        return target

    service = Service(slow)
    service.verifier.control.curves = (StepCurve(SIZES, on_cpu(Machine()).step_times(SIZES)),) * 2
    shorts = [service.open(20) for _ in range(8)]
    service.until(shorts, 80)
    plain_s, began = median(gaps(shorts, 0.0)), service.machine.now
    service.until([service.open(600)], 1)
    assert max(gaps(shorts, began)) < 2.2 * plain_s


def test_row_time_is_separated_from_context_time() -> None:
    """Steps with more and more context, of different sizes, beside other numbers of sessions."""
    rng, curve = np.random.default_rng(0), StepCurve([1, 512], [0.004, 0.009])
    limit = PrefillLimit()
    for _ in range(80):
        rows, start, others = int(rng.integers(20, 400)), int(rng.integers(0, 30_000)), int(rng.integers(1, 64))
        attended = np.arange(start + 1, start + rows + 1).sum()
        seconds = curve(others + rows) + 0.001 + rows * 2e-6 + attended * 1e-9
        limit._learn_prompts((np.array([start], np.int32), np.array([rows])), others, 0, seconds, curve, is_late=False)
    expected = 200 * (0.005 / 511 + 2e-6) + 0.001 + np.arange(20_001, 20_201).sum() * 1e-9
    attended = np.arange(20_001, 20_201).cumsum()
    found = limit._seconds(_by_curve(64, 200, curve(64), curve), attended)[-1]
    assert found == pytest.approx(expected, rel=0.1)
