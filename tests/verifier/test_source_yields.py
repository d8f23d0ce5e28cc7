"""What sources of drafts took and brought, and what is guessed from that."""

import math
from itertools import count

import numpy as np
import pytest

from specq.drafting.draft_model.source import ColocatedSource
from specq.protocol import COLOCATED, COLOCATED_LANE, EAGLE, REMOTE, SUFFIX, SUFFIX_LANE, Open, SamplingParams
from specq.testing.toy import ToyEngine, toy_text
from specq.testing.toy_drafters import ToyChains
from specq.verifier.control.load_level import LoadLevel
from specq.verifier.control.source_clock import SourceClock, by_lane
from specq.verifier.control.source_yields import Yield, leanest, promise
from specq.verifier.control.step_curve import StepCurve
from specq.verifier.control.window import Window
from specq.verifier.core import Verifier
from specq.verifier.step.commit import NO_ROUNDS

TICK_S = 1e-6
STEP = Yield(0.1, 3.0)  # of which 0.01 s and a token are the target's own


def test_what_brings_less_in_its_own_seconds_than_all_do_is_left_out():
    """The worst first: without it, what is left is faster, and more is not worth its seconds."""
    yields = {EAGLE: Yield(0.06, 1.2), COLOCATED: Yield(0.005, 0.6), SUFFIX: Yield(0.025, 0.2)}
    dropped, gain = leanest(STEP, yields)
    assert dropped == {EAGLE, SUFFIX}
    assert gain == pytest.approx(math.log((1.6 / 0.015) / 30))


def test_what_costs_nothing_stays():
    """Also where it brings nothing; and where all pay, nothing is left out."""
    assert leanest(STEP, {SUFFIX: Yield(0.0, 0.0)}) == (frozenset(), 0.0)
    assert leanest(STEP, {COLOCATED: Yield(0.01, 1.0), REMOTE: Yield(0.001, 0.1)}) == (frozenset(), 0.0)


def test_sources_that_take_longer_than_the_whole_step_leave_something():
    """Clocks do not agree to the microsecond: no rate becomes negative or infinite."""
    dropped, gain = leanest(STEP, {EAGLE: Yield(0.2, 0.1)})
    assert dropped == {EAGLE}
    assert 0 < gain < 10


@pytest.mark.parametrize(
    ("source", "seconds", "is_hopeless"), [(EAGLE, 0.5, True), (EAGLE, 0.005, False), (SUFFIX, None, False)]
)
def test_what_is_added_promises_more_than_it_brought_beside_others(source, seconds, is_hopeless):
    """What takes five steps promises a loss at best; what is cheap, or unknown, does not."""
    yields = {} if seconds is None else {source: Yield(seconds, 0.3)}
    assert (promise(STEP, yields, frozenset({source}), frozenset()) < -0.5) == is_hopeless


def test_what_is_dropped_promises_its_seconds():
    """Others may find all that it brought."""
    yields = {EAGLE: Yield(0.05, 1.0)}
    assert promise(STEP, yields, frozenset(), frozenset({EAGLE})) == pytest.approx(math.log(2))


def test_seconds_and_rows_of_a_step_are_counted_once():
    """Of each source: its seconds, and what its rows added to the step; tokens are those that were accepted."""
    engine, ticks = ToyEngine(), count()
    drafter = ColocatedSource(ToyChains(), StepCurve([1, 64], [0.0005, 0.0005]), chain=3, fan_out=1)
    verifier = Verifier(engine, StepCurve([1, 64], [0.005, 0.0113]), (drafter,), incarnation=1)
    prompt = np.array([5, 6, 7], np.int32)
    verifier.handle(
        Open(session_id=7, epoch=1, prompt_len=3, tokens_left=50, params=SamplingParams(), token_ids=prompt), 0.0
    )
    learned = []
    verifier.arms.learn = lambda *known, **_: learned.append(known[4])
    for _ in range(3):
        verifier.begin(0.0, lambda: TICK_S * next(ticks))
        verifier.step(lambda: TICK_S * next(ticks))
    text = verifier.sessions[7].token_ids[3:]
    assert text == toy_text(prompt.tolist(), len(text))
    own = learned[-1][COLOCATED]
    num_nodes = engine.num_rows[-1] - 1
    assert own.tokens == num_nodes > 0, "all that the toy drafts is accepted"
    assert own.seconds >= 3 * TICK_S + num_nodes * 0.0001  # begin, collect, observe: each asks the clock twice at least
    assert own.seconds < 100 * TICK_S + num_nodes * 0.0001
    assert learned[-1][REMOTE].tokens == 0
    again = verifier.sources.clock.yields(NO_ROUNDS, 1, verifier.curve)
    assert again[COLOCATED] == Yield(0.0, 0.0)


def test_scratch_rows_cost_what_rows_cost():
    """They are asked for, and nobody judges them."""
    clock = SourceClock([EAGLE, SUFFIX])
    clock.add(EAGLE, 0.5, num_scratch=10)
    yields = clock.yields(NO_ROUNDS, 11, StepCurve([1, 11], [0.01, 0.06]))
    assert yields == {EAGLE: Yield(pytest.approx(0.55), 0), SUFFIX: Yield(0.0, 0)}


def test_what_is_done_once_is_no_price():
    """A source that compiles in one step of ten took 10 ms in each of the others; what others took counts as it is, but
    for the longest."""
    window = Window()
    for i in range(10):
        took = {EAGLE: Yield(2.0 if i == 4 else 0.01, 1.0), SUFFIX: Yield(0.001, 0.0)}
        window.add(2, 0.02, 1, frozenset({EAGLE}), yields=took)
    assert window.yields(frozenset({EAGLE})) == {EAGLE: Yield(pytest.approx(0.01), 1.0)}
    assert window.yields(frozenset({EAGLE, SUFFIX, REMOTE}))[SUFFIX].seconds == pytest.approx(0.001)
    assert window.step == Yield(pytest.approx(0.02), 2.0)


def test_nodes_are_counted_by_lane():
    lanes = np.array([COLOCATED_LANE, SUFFIX_LANE, COLOCATED_LANE], np.uint8)
    found = by_lane(lanes, np.array([1, 0, 0], np.uint8))
    assert found[COLOCATED_LANE].tolist() == [2, 1]
    assert found[SUFFIX_LANE].tolist() == [1, 0]


def test_the_variance_of_a_window_is_that_of_many_like_it():
    """Steps that differ by much say little of the rate; equal ones say all."""
    rng = np.random.default_rng(0)
    windows = [Window() for _ in range(1000)]
    for window in windows:
        for tokens, seconds in zip(rng.integers(1, 6, 30), rng.exponential(0.02, 30) + 0.01, strict=True):
            window.add(int(tokens), float(seconds), 1)
    spread = np.var([window.log_rate for window in windows])
    assert np.mean([window.variance for window in windows]) == pytest.approx(spread, rel=0.2)
    even = Window()
    for _ in range(30):
        even.add(2, 0.02, 1)
    assert even.variance == pytest.approx(0.0, abs=1e-9)


def test_a_trial_of_steps_that_differ_by_much_does_not_end_early():
    """One of five steps of a trial takes long, as on a crowded machine: the same mean loss by even steps is evident,
    and this is not."""
    is_over = {}
    for kind, seconds in {"even": [0.06] * 5, "uneven": [0.01] * 4 + [0.26]}.items():
        level = LoadLevel.of(frozenset({EAGLE, SUFFIX}))
        for _ in range(25):
            level.before.add(2, 0.012, 1)
        level.trial = frozenset({SUFFIX})
        for one in seconds:
            level.window.add(2, one, 1)
        is_over[kind] = level.is_over(0.0)
    assert is_over == {"even": True, "uneven": False}
