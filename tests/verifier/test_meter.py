"""What a verifier counts of its steps: phases, rows, and whose nodes were accepted at which depth."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from specq.protocol import COLOCATED, EAGLE, LANES, LOOKAHEAD_LANE, MEDUSA, REMOTE, SUFFIX, SUFFIX_LANE
from specq.protocol.messages import COLOCATED_LANE, Close
from specq.protocol.stats import COUNTED_DEPTHS, MOST_ENTRIES, PHASES, ROW_LIMITS, STEP_LIMITS_US
from specq.protocol.wire import decode, encode
from specq.testing import World
from specq.testing.toy import ToyEngine
from specq.verifier.control.choices import DECISIONS, Choice, SourceTraits
from specq.verifier.control.forecast import Forecast
from specq.verifier.control.policy import FIRST_PLAIN, Policy
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.models.step_time import StepTime
from specq.verifier.sources.source_clock import LANES_OF
from specq.verifier.step.meter import KEPT_STEPS, Histogram, Moments, StepMeter, by_depth
from specq.verifier.step.rounds import NO_ROUNDS

JUDGED_S = 0.25


class SlowJudge(ToyEngine):
    """Says of each call that judging took a part of it."""

    def step(self, steps, tap=None):
        from dataclasses import replace

        return replace(super().step(steps), judge_s=JUDGED_S)


class Nodes:
    """What the meter reads of the rounds of a step."""

    def __init__(self, lanes: list[int], accepted: list[int]) -> None:
        self.nodes = np.arange(len(lanes), dtype=np.int32)
        self.lanes, self.is_accepted = np.array(lanes, np.uint8), np.array(accepted, np.uint8)


@pytest.mark.parametrize(("value", "place"), [(0, 0), (10, 0), (11, 1), (25, 1), (26, 2), (10**9, 3)])
def test_a_histogram_counts_what_is_at_most_a_limit(value, place):
    histogram = Histogram((10, 25, 50))
    histogram.observe(value)

    assert histogram.counts == [int(i == place) for i in range(4)]
    assert histogram.to_list() == [value, *histogram.counts][: place + 2]


def test_the_phases_of_a_step_are_all_of_its_time():
    """From the end of one forward pass to the end of the next, each moment belongs to one phase."""
    meter = StepMeter()
    meter.note(Moments(1.0, 1.5, 1.625, 1.75, 3.0), 0.5, 3, 1, NO_ROUNDS)

    found = {name: one[0] / 1e6 for name, one in meter.metrics()["step_us"].items()}
    assert found == {"wait": 0.125, "plan": 0.125, "forward": 0.75, "judge": 0.5, "host": 0.5}
    assert sum(found.values()) == 3.0 - 1.0


def test_what_was_not_measured_is_not_observed():
    """An engine that cannot time judging has no such figure. Before the first step there is no busy time."""
    meter = StepMeter()
    meter.note(Moments(None, 1.5, 1.625, 1.75, 3.0), 0.0, 3, 1, NO_ROUNDS)

    phases = meter.metrics()["step_us"]
    assert (phases["judge"], phases["host"], sum(phases["forward"][1:])) == ([], [], 1)


@pytest.mark.parametrize("num_steps", [1, KEPT_STEPS - 1, KEPT_STEPS, KEPT_STEPS + 1, 3 * KEPT_STEPS])
def test_nodes_are_counted_by_source(num_steps):
    """However many steps are counted at a time."""
    meter = StepMeter()
    lanes = [0, 7, SUFFIX_LANE, COLOCATED_LANE, COLOCATED_LANE, LOOKAHEAD_LANE, LANES[MEDUSA], LANES[EAGLE]]
    for _ in range(num_steps):
        meter.note(Moments(None, 1, 2, 3, 4), 0, 8, 2, Nodes(lanes, [1, 0, 1, 0, 1, 0, 0, 1]))
        meter.note(Moments(None, 1, 2, 3, 4), 0, 6, 2, NO_ROUNDS)

    judged = meter.metrics()["judged"]
    assert judged == {name: [0, 0] for name in LANES_OF} | {
        "remote": [2 * num_steps, num_steps],
        "suffix": [num_steps, num_steps],
        "lookahead": [num_steps, 0],
        "colocated": [2 * num_steps, num_steps],
        "medusa": [num_steps, 0],
        "eagle3": [num_steps, num_steps],
    }
    assert meter.metrics()["judged"] == judged  # once


def test_nodes_deeper_than_is_counted_count_with_the_last():
    verified_at = np.ones((COUNTED_DEPTHS + 5, 2), np.int64)
    verified_at[:, 1] = 0

    verified = [1] * (COUNTED_DEPTHS - 1) + [6]
    assert by_depth(verified_at) == {"verified_at": verified, "accepted_at": [0] * COUNTED_DEPTHS}
    assert by_depth(verified_at * 0) == {"verified_at": [], "accepted_at": []}


def test_a_verifier_times_its_steps_by_the_clock_that_it_is_given():
    from tests.verifier.verifiers import chain, open_session

    verifier = Verifier(SlowJudge(), StepCurve([1, 64], [0.005, 0.01]), incarnation=1)
    open_session(verifier)
    ticks = count()
    verifier.step(lambda: float(next(ticks)))
    verifier.handle(chain([1, 2, 3], base_len=verifier.sessions[7].length), 0.0)
    verifier.step(lambda: float(next(ticks)))

    metrics = verifier.heartbeat().metrics
    assert {name: sum(metrics["step_us"][name][1:]) for name in PHASES} == {
        **dict.fromkeys(("wait", "plan", "forward", "judge"), 2),
        "host": 1,
    }
    assert metrics["step_us"]["judge"][0] == 2e6 * JUDGED_S
    assert sum(metrics["step_rows"][1:]) == sum(metrics["step_sessions"][1:]) == 2


def test_counters_never_fall_when_sessions_end():
    """What closed sessions had counted stays, also when their places are used again."""
    world = World()
    verifier = world.add_verifier()
    world.add_drafter()
    seen, stats = [], []
    for number in range(1, 4):
        jobs = [world.submit(10 * number + i, [3, 4, number], max_tokens=60) for i in range(2)]
        world.run_until(lambda jobs=jobs: all(job.finish for job in jobs))
        world.run(2.0)
        stats += [job.stats for job in jobs]
        seen.append(verifier.heartbeat().metrics)

    last = seen[-1]
    for name in ("drafted", "stale", "hits", "misses", "drafted_rounds"):
        assert [one[name] for one in seen] == sorted(one[name] for one in seen)
        assert last[name] == sum(one[name] for one in stats)
    verified, accepted = (sum(one[name] for one in stats) for name in ("draft_tokens", "accepted_tokens"))
    assert [sum(numbers) for numbers in zip(*last["judged"].values(), strict=True)] == [verified, accepted]
    assert (sum(last["verified_at"]), sum(last["accepted_at"])) == (verified, accepted)
    assert accepted > 100


def test_a_session_that_is_closed_twice_counts_once():
    from tests.verifier.verifiers import chain, open_session

    verifier = Verifier(ToyEngine(), StepCurve([1, 64], [0.005, 0.01]), incarnation=1)
    open_session(verifier)
    verifier.handle(chain([1, 2, 3]), 0.0)
    verifier.step(float)
    for _ in range(2):
        verifier.handle(Close(session_id=7, epoch=1), 0.0)
    open_session(verifier, 8)

    assert verifier.heartbeat().metrics["drafted"] == 3


def met(num_sessions: int, names: list[str]) -> Policy:
    """Return a policy of a verifier with so many sessions and these sources, after a message of each source and its
    first plain steps."""
    curve = StepCurve([1, 64], [0.005, 0.01])
    traits = [SourceTraits(name, may_be_unread=name == COLOCATED) for name in names]
    time = StepTime(dict.fromkeys(names, False), (curve, curve))
    policy = Policy(Forecast(traits, time, overlaps=True), first_s=0.005)
    policy.forecast.hear(dict.fromkeys(names, 1))
    policy._num_steps = FIRST_PLAIN
    policy.meet(num_sessions)
    return policy


def test_choices_are_shown_with_what_is_foreseen_of_them():
    """Tokens a second, which of them is in use, and how often what was decided."""
    policy = met(4, [REMOTE, SUFFIX])

    metrics = policy.metrics()
    assert {name: used for name, (used, _) in metrics["choices"].items()} == {
        "none": 1,
        "remote": 0,
        "suffix": 0,
        "remote+suffix": 0,
    }
    assert metrics["choices"]["suffix"][1] == pytest.approx(
        policy.forecast.foresee(Choice(frozenset({SUFFIX})), 4).rate, abs=0.01
    )
    assert metrics["decisions"] == {"probe": 1}
    assert metrics["decided"] == policy.decisions[-1].numbers()


def test_without_sessions_no_forecast_is_made():
    assert met(0, [SUFFIX]).metrics() == {"choices": {}, "decisions": {}}


def test_the_fullest_heartbeat_arrives():
    """All choices of all sources, all depths, all limits: it is within its bound."""
    verifier = Verifier(ToyEngine(), StepCurve([1, 64], [0.005, 0.01]), incarnation=1)
    meter = verifier.meter
    for histogram in (*meter._phases.values(), meter._rows, meter._sessions):
        for limit in (*histogram.limits, histogram.limits[-1] + 1):
            histogram.observe(limit)
    verifier.trees._closed_verified_at[:] = 2**40
    verifier.policy = met(64, list(LANES_OF))
    for name in LANES_OF:  # drafts are tried unread only after some were read
        verifier.policy.forecast._time.wait(name).learn(1, 0.001, 0.001, joins=False)
    verifier.policy.num_decided = dict.fromkeys(DECISIONS, 2**40)

    metrics = decode(encode(verifier.heartbeat())).metrics
    assert len(metrics["step_us"]["host"]) == len(STEP_LIMITS_US) + 2
    assert len(metrics["step_rows"]) == len(ROW_LIMITS) + 2
    count = len(LANES_OF)
    num_choices = 1 + count + count * (count - 1) // 2 + 1 + 1
    assert len(metrics["choices"]) == num_choices, "none, one, two, all; one unread"
    assert metrics["decisions"].keys() == set(DECISIONS)
    assert len(str(metrics).split(",")) + 300 < MOST_ENTRIES  # room for more
