"""Sessions in the background: what they take of others' steps, and what the others leave them; by a virtual clock."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from specq.protocol import Close, Open, SamplingParams, SessionFailed, Verdict
from specq.testing.late import LateEngine
from specq.testing.toy import ToyEngine, toy_info, toy_text
from specq.verifier.control.background import EARNED, MOST_SLOWDOWN, PERIOD, PLAIN, Background, ExpectedStep, Waiting
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions import admission
from specq.verifier.sessions.session import Session
from tests.verifier.timed_target import TEXT, Machine, TimedTarget
from tests.verifier.verifiers import chain, make_verifier, step

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
GPU = [(1, 3.45), (8, 3.75), (64, 4.9), (128, 5.2), (256, 6.4), (512, 10.0)]  # rows and milliseconds: a 7B on an H200
CPU = [(1, 9.0), (8, 14.0), (16, 26.0), (64, 100.0), (512, 800.0)]  # a small model on two cores
PROMPT, TOKENS = 20, 64  # of a session that is not in the background
SECONDS = 8.0  # of a service, by the virtual clock


@dataclass
class Times:
    """Seconds from the arrival to the first token, and between tokens, of the others; tokens in the background."""

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    background: int = 0


class Service:
    """A verifier with `num_others` sessions, each behind the last one, and as many in the background as are missing."""

    def __init__(self, points: list[tuple[int, float]], *, overlaps: bool, mixed_s: float = 0.0) -> None:
        self.machine = Machine()
        target = TimedTarget(
            self.machine, points, overlaps=overlaps, launch_s=0.0002, collect_s=0.0002, mixed_s=mixed_s
        )
        curve = StepCurve(SIZES, target.step_times(SIZES))
        self.curve = StepCurve(SIZES, target.step_times(SIZES))
        self.verifier = Verifier(target, curve, incarnation=1, max_sessions=256)
        self._next_id = 1
        self.in_background: set[int] = set()
        self.arrived: dict[int, float] = {}
        self.last: dict[int, float] = {}

    def open(self, prompt_len: int, num_tokens: int, *, is_background: bool) -> None:
        session_id, self._next_id = self._next_id, self._next_id + 1
        self.arrived[session_id] = self.machine.now
        if is_background:
            self.in_background.add(session_id)
        message = Open(
            session_id=session_id, epoch=1, prompt_len=prompt_len, tokens_left=num_tokens,
            params=SamplingParams(max_tokens=num_tokens), token_ids=TEXT.prompt(session_id, prompt_len),
            is_background=is_background,
        )  # fmt: skip
        assert self.verifier.handle(message, self.machine.now) == []

    def serve(self, seconds: float, num_others: int, num_background: int) -> Times:
        """Serve until the time is over; what still runs then stays."""
        times, end = Times(), self.machine.now + seconds
        began = self.machine.now
        rng = random.Random(1)
        while self.machine.now < end:
            sessions = self.verifier.sessions
            for _ in range(num_others - sum(i not in self.in_background for i in sessions)):
                self.open(PROMPT, rng.randint(TOKENS // 2, TOKENS), is_background=False)
            for _ in range(num_background - sum(i in self.in_background for i in sessions)):
                self.open(50, 64, is_background=True)
            self._step(times)
        times.seconds = self.machine.now - began
        return times

    def _step(self, times: Times) -> None:
        self.verifier.begin(self.machine.now, self.machine)
        self.machine.work(0.0001)
        for verdict in list(self.verifier.step(self.machine)):
            assert isinstance(verdict, Verdict)
            now, session_id = self.machine.now, verdict.session_id
            if session_id in self.in_background:
                times.background += len(verdict.token_ids)
            elif session_id in self.last:
                times.between_s.append((now - self.last[session_id]) / len(verdict.token_ids))
            else:
                times.first_s.append(now - self.arrived[session_id])
            self.last[session_id] = now
            if verdict.finish:
                self.verifier.handle(Close(session_id=session_id, epoch=1), now)
                self.in_background.discard(session_id)


@pytest.mark.parametrize("points", [GPU, CPU])
@pytest.mark.parametrize("overlaps", [False, True])
def test_others_hardly_feel_a_batch_and_it_takes_what_they_leave(
    points: list[tuple[int, float]], *, overlaps: bool
) -> None:
    mixed_s = 0.002 if points is GPU else 0.0
    alone = Service(points, overlaps=overlaps, mixed_s=mixed_s).serve(SECONDS, 8, 0)
    service = Service(points, overlaps=overlaps, mixed_s=mixed_s)
    beside = service.serve(SECONDS, 8, 64)
    assert np.mean(beside.between_s) < MOST_SLOWDOWN * np.mean(alone.between_s)
    longest = max(service.curve(512), np.max(beside.between_s))
    assert np.quantile(beside.first_s, 0.95) < 1.1 * np.quantile(alone.first_s, 0.95) + longest
    # Each token in the background needs a row of a prompt besides, at these lengths.
    row_s = (service.curve(64) - service.curve(8)) / 56
    earned = (MOST_SLOWDOWN - 1) / MOST_SLOWDOWN * SECONDS / row_s / (1 + 50 / 64)
    # The rest: the fixed cost of steps with prompts, and steps in which only prompts of the others run.
    assert beside.background > 0.65 * earned


def test_without_others_a_batch_takes_everything() -> None:
    service = Service(GPU, overlaps=True)
    alone = service.serve(5.0, 0, 64)
    others = Service(GPU, overlaps=True)
    for _ in range(64):
        others.open(50, 64, is_background=False)
    times = Times()
    while others.machine.now < 5.0:
        for _ in range(64 - len(others.verifier.sessions)):
            others.open(50, 64, is_background=False)
        others._step(times)
    tokens = len(times.first_s) + len(times.between_s)
    assert alone.background == pytest.approx(tokens, rel=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_steps_are_at_most_a_tenth_longer_as_a_mean(seed: int) -> None:
    """Over any time, however the load changes; and nearly all of it is spent where enough waits."""
    rng = random.Random(seed)
    rows_s = np.cumsum([0.01, *(rng.choice([0.0, 0.0002, 0.004]) for _ in SIZES[1:])])
    curve, background, saved = StepCurve(SIZES, rows_s.tolist()), Background(), [0.0]
    for _ in range(500):
        waiting = Waiting(rng.randint(1, 20), rng.choice([0, 3, 100]), has_prompts=rng.random() < 0.5)
        count, prompt_s = background.share(waiting, curve, fixed_s=0.003)
        step_s = curve(waiting.others)
        added_s = curve(waiting.others + count) - step_s
        prompt_s *= rng.random() < 0.5
        background.spend(prompt_s)
        assert 0 <= count <= waiting.decoding
        saved.append(saved[-1] + (MOST_SLOWDOWN - 1) * step_s - added_s - prompt_s)
    assert min(saved) > -1e-9


def test_one_row_that_costs_more_than_a_step_earns_comes_now_and_then() -> None:
    curve, background = StepCurve([1, 2, 3], [0.01, 0.014, 0.018]), Background()
    counts = [background.share(Waiting(1, 5, has_prompts=False), curve, 0.0).decoding for _ in range(640)]
    assert set(counts) == {0, 1}
    assert 140 <= sum(counts) <= EARNED * 640 / 0.4  # a row costs 0.4 steps


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0, 20.0, 100.0])
@pytest.mark.parametrize("has_prompts", [False, True])
def test_what_rows_really_add_is_learned(factor: float, *, has_prompts: bool) -> None:
    """Although the curve expects something else, and all steps take longer than expected."""
    curve, background = StepCurve([1, 100], [0.01, 0.03]), Background()
    seconds, alone = 0.0, 0.0
    for number in range(6000):
        num_decoding, prompt_s = background.share(Waiting(8, 60, has_prompts=has_prompts), curve, fixed_s=0.001)
        background.spend(prompt_s)
        base_s = curve(8)
        added_s = curve(8 + num_decoding) - base_s
        took_s = 1.2 * base_s + factor * (added_s + prompt_s)
        background.learn(ExpectedStep(base_s, added_s + prompt_s, background.is_base), took_s)
        if number >= 3000:
            seconds, alone = seconds + took_s, alone + 1.2 * base_s
    assert 1.05 < seconds / alone < 1.02 * MOST_SLOWDOWN


@pytest.mark.parametrize("sign", [1, -1])
def test_what_no_price_expresses_is_a_debt(sign: int) -> None:
    """Steps with prompts of the batch take six times as long, however few rows these have; prices vary in waves."""
    curve, background = StepCurve([1, 100], [0.01, 0.03]), Background()
    seconds, alone = 0.0, 0.0
    for number in range(6000):
        num_decoding, prompt_s = background.share(Waiting(8, 60, has_prompts=True), curve, fixed_s=0.001)
        background.spend(prompt_s)
        base_s = curve(8)
        added_s = curve(8 + num_decoding) - base_s
        wave = 3.0 if (number // 40) % 2 == (sign > 0) else 0.5
        took_s = base_s + wave * added_s + 5 * base_s * (prompt_s > 0)
        background.learn(ExpectedStep(base_s, added_s + prompt_s, background.is_base), took_s)
        if number >= 1000:
            seconds, alone = seconds + took_s, alone + base_s
    assert 1.05 < seconds / alone < 1.01 * MOST_SLOWDOWN


def test_what_the_host_does_for_a_step_may_be_felt_in_the_one_before() -> None:
    """Engines that overlap: other sessions than before, and prompts, delay the end that is seen of the step before."""
    curve, background = StepCurve([1, 100], [0.01, 0.03]), Background()
    base_s, shares, seconds = 0.7 * curve(8), list[tuple[int, float, bool]](), list[float]()
    for _ in range(6000):
        shared = background.share(Waiting(8, 60, has_prompts=True), curve, fixed_s=0.001)
        background.spend(shared.prompt_s)
        shares.append((*shared, background.is_base))
        if len(shares) == 1:
            continue
        (before, before_s, is_base), (num, prompt_s, _) = shares[-2:]
        added_s = curve(8 + before) - curve(8)
        took_s = base_s + added_s + base_s * (num != before) + 4 * prompt_s
        background.learn(ExpectedStep(curve(8), added_s + before_s, is_base), took_s)
        seconds.append(took_s)
    assert 1.05 < np.mean(seconds[-3001:]) / base_s < 1.01 * MOST_SLOWDOWN


def send(verifier: Verifier, session_id: int, length: int = 3, *, is_background: bool = False) -> list:
    message = Open(
        session_id=session_id, epoch=1, prompt_len=length, tokens_left=20, params=SamplingParams(),
        token_ids=np.arange(1, length + 1, dtype=np.int32), is_background=is_background,
    )  # fmt: skip
    return verifier.handle(message, 0.0)


def test_sessions_in_the_background_have_no_nodes_beside_others() -> None:
    verifier = make_verifier()
    send(verifier, 7), send(verifier, 8, is_background=True)
    step(verifier)
    for session_id in (7, 8):
        session = verifier.sessions[session_id]
        tokens = toy_text(session.token_ids, 3)
        verifier.handle(chain(tokens, session_id=session_id, base_len=session.length), 0.0)
    found = {verdict.session_id: len(verdict.node_ids) for verdict in list(step(verifier))}
    assert found[7] == 3
    assert found.get(8, 0) == 0


def test_how_to_draft_is_decided_for_the_sessions_that_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions in the background, which come and go beside one session, are no load that switches its drafts off."""
    service, loads = Service(GPU, overlaps=False), list[int]()
    meet = service.verifier.policy.meet
    monkeypatch.setattr(service.verifier.policy, "meet", lambda num: loads.append(num) or meet(num))
    assert service.serve(0.5, 1, 32).background > 100
    assert set(loads) == {1}
    service.serve(0.5, 0, 32)
    assert loads[-1] == 32


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_arrival_that_finds_the_memory_full_evicts_a_batch(
    monkeypatch: pytest.MonkeyPatch, *, overlaps: bool
) -> None:
    """But no session of a step in flight."""
    engine = (LateEngine if overlaps else ToyEngine)(toy_info(kv_slots=60))
    verifier = make_verifier(engine)
    evict, num_evicted = admission._evict, [0]

    def checked(session: Session, of: ToyEngine) -> None:
        flights = engine.flights if isinstance(engine, LateEngine) else ()
        assert not any(session.session_id in flight.batch.session_ids for flight in flights)
        num_evicted[0] += 1
        evict(session, of)

    monkeypatch.setattr(admission, "_evict", checked)
    for session_id in (1, 2, 3):
        send(verifier, session_id, 15, is_background=True)
    for _ in range(3):
        step(verifier)
    assert engine.free_slots < 20
    send(verifier, 9, 30)
    found = [verdict for _ in range(4) for verdict in step(verifier)]
    assert num_evicted[0]
    assert not any(isinstance(one, SessionFailed) for one in found)
    assert [len(one.token_ids) for one in found if one.session_id == 9]
    while verifier.has_work:  # and all come to their end
        found += step(verifier)
    assert {one.session_id for one in found if one.finish} == {1, 2, 3, 9}


def test_the_first_in_the_background_decode_until_they_end() -> None:
    """And their number changes at most once a period: changed sessions cost the host more."""
    service = Service(GPU, overlaps=True)
    for _ in range(64):
        service.open(2, 4000, is_background=True)
    times = Times()
    for _ in range(4):
        service._step(times)
    service.open(PROMPT, 10_000, is_background=False)
    joined = []
    for _ in range(20 * PERIOD):
        before = {i: one.length for i, one in service.verifier.sessions.items() if i in service.in_background}
        service._step(times)
        after = {i: service.verifier.sessions[i].length for i in before if i in service.verifier.sessions}
        joined.append([i for i in after if after[i] > before[i]])
    for own in joined[PERIOD:]:
        assert own == [*range(1, len(own) + 1)]
    changes = [(a, b) for a, b in pairwise(joined[PERIOD:]) if a != b]
    assert len(changes) <= 2.2 * 19
    assert max(len(own) for own in joined) > 10


def test_the_background_takes_no_turn_of_others() -> None:
    """More sessions decode than a step takes: they take turns, and none in the background comes before them."""
    service, times = Service(GPU, overlaps=False), Times()
    service.verifier.planner.max_sessions = 4
    for number in range(8):
        service.open(2, 400, is_background=number >= 6)
    for _ in range(6 * PERIOD):
        service._step(times)
    lengths = [session.length for _, session in sorted(service.verifier.sessions.items())]
    assert max(lengths[:6]) - min(lengths[:6]) <= 1
    assert lengths[6:] == [2, 2]


def test_a_debt_is_paid_before_anything_is_spent() -> None:
    curve, background = StepCurve([1, 100], [0.01, 0.03]), Background()
    waiting = Waiting(8, 60, has_prompts=False)
    for _ in range(2 * PERIOD + PLAIN):
        background.share(waiting, curve, 0.001)
    assert background.share(waiting, curve, 0.001).decoding > 3
    base_s = curve(8)
    background.learn(ExpectedStep(base_s), 9 * base_s)
    for _ in range(PERIOD):  # at most 6.4 steps were saved
        assert background.share(waiting, curve, 0.001).decoding == 0
