"""How many verifiers and draft workers: the rule under simulated load, by a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Callable

from specq.ray.scaling import (
    CALM_WINDOWS,
    RETRY_S,
    WINDOW_S,
    Sample,
    Scale,
    ScaleLimits,
    gain,
    sample_of,
    scaled,
    without_room,
)

LIMITS = ScaleLimits(targets=(1, 3), drafters=(1, 4), max_sessions=8)
MINUTES = 60.0
TICK_S = 2.0


class World:
    """Totals that grow as the load says. `share`: accepted drafts for each own token, by number of draft workers."""

    def __init__(self, share: Callable[[int], float], seed: int = 1) -> None:
        self.share, self.rng = share, random.Random(seed)
        self.state, self.now, self.total = Scale(1, 1), 0.0, Sample()
        self.changes: list[tuple[float, int, int]] = []

    def run(self, seconds: float, running: int, waiting: int = 0, limits: ScaleLimits = LIMITS) -> None:
        """Let time pass under a steady load, with noise of a few percent."""
        until = self.now + seconds
        while self.now < until:
            own = 50 * TICK_S * max(min(running, 8), 0.0)
            accepted = own * self.share(self.state.drafters) * self.rng.uniform(0.9, 1.1)
            self.total = Sample(waiting, running, self.total.tokens + own + accepted, self.total.accepted + accepted)
            before = self.state
            self.state = scaled(before, self.total, self.now, limits)
            if (before.targets, before.drafters) != (self.state.targets, self.state.drafters):
                self.changes.append((self.now, self.state.targets, self.state.drafters))
            self.now += TICK_S


def test_draft_workers_grow_while_each_one_adds_tokens():
    world = World(lambda number: 0.2 * number)
    world.run(10 * MINUTES, running=8)
    assert [drafters for _, _, drafters in world.changes] == [2, 3, 4]


def test_a_draft_worker_without_gain_stops_and_does_not_flap():
    """In ten minutes: one trial, its end, and at most one more trial."""
    world = World(lambda number: 0.4 if number >= 2 else 0.2)
    world.run(10 * MINUTES, running=8)
    assert world.state.drafters == 2
    assert [drafters for _, _, drafters in world.changes][:3] == [2, 3, 2]
    assert len(world.changes) <= 5


def test_draft_workers_that_bring_nothing_end_at_the_least():
    world = World(lambda number: 0.2 * number)
    world.run(2 * MINUTES, running=8)
    assert world.state.drafters == 4
    world.share = lambda number: 0.0
    world.run(3 * MINUTES, running=8)
    assert world.state.drafters == 1
    before = len(world.changes)
    world.run(30 * MINUTES, running=8)
    assert [drafters for _, _, drafters in world.changes[before:]] in ([2, 1], [2, 1] * 2), "few trials"
    assert world.state.drafters == 1


def test_draft_workers_that_are_too_slow_alone_are_tried_together():
    world = World(lambda number: 0.0 if number < 2 else 0.2 * number)
    world.run(10 * MINUTES, running=8)
    assert world.state.drafters == 4


def test_draft_workers_follow_the_load_down_and_up():
    world = World(lambda number: 0.2 * number)
    world.run(2 * MINUTES, running=8)
    world.run(10 * MINUTES, running=1)
    assert world.state.drafters == 1
    world.run(2 * MINUTES, running=8)
    assert world.state.drafters == 4


def test_a_load_that_changes_faster_than_the_rule_does_not_flap():
    world = World(lambda number: 0.2 * number)
    world.run(2 * MINUTES, running=8)
    before = len(world.changes)
    for _ in range(15):
        world.run(WINDOW_S, running=2)
        world.run(WINDOW_S, running=8)
    assert len(world.changes) == before


def test_verifiers_grow_by_the_queue_and_shrink_when_others_have_room():
    world = World(lambda number: 0.0)
    world.run(1.5 * WINDOW_S, running=8, waiting=3)
    assert world.state.targets == 2
    world.run(3 * WINDOW_S, running=16, waiting=3)
    assert world.state.targets == 3
    world.run(10 * MINUTES, running=16)
    assert world.state.targets == 3
    world.run((CALM_WINDOWS + 2) * WINDOW_S, running=2)
    assert world.state.targets == 2


def test_a_queue_that_empties_within_a_window_starts_nothing():
    world = World(lambda number: 0.0)
    for _ in range(30):
        world.run(0.5 * WINDOW_S, running=8, waiting=5)
        world.run(0.5 * WINDOW_S, running=8, waiting=0)
    assert {targets for _, targets, _ in world.changes} <= {1}


def test_nothing_changes_while_a_process_starts():
    state = scaled(Scale(1, 1), Sample(5, 8), 0.0, LIMITS)
    later = scaled(state, Sample(5, 8, 1000.0, 500.0), 10 * WINDOW_S, LIMITS, is_settled=False)
    assert (later.targets, later.drafters, later.began) == (1, 1, 10 * WINDOW_S)


def test_counters_that_restart_begin_a_new_window():
    state = scaled(Scale(1, 1), Sample(0, 8, 1000.0, 500.0), 0.0, LIMITS)
    later = scaled(state, Sample(0, 8, 10.0, 5.0), 10 * WINDOW_S, LIMITS)
    assert later.first == Sample(0, 8, 10.0, 5.0)
    assert later.drafters == 1


def test_a_worker_without_a_place_is_given_up():
    """Else all would wait for it; draft workers are tried again later."""
    state = without_room(Scale(2, 3), {"target-2", "draft-3"}, 50.0, LIMITS)
    assert (state.targets, state.drafters, state.retry_at) == (1, 2, 50.0 + RETRY_S)
    least = Scale(1, 1)
    assert without_room(least, {"target-1", "draft-1"}, 50.0, LIMITS) == least
    assert without_room(Scale(2, 3), {"target-1", "draft-2"}, 50.0, LIMITS) == Scale(2, 3)  # a node's death


def test_gain_is_the_tokens_of_drafts_for_each_own_token():
    assert gain(Sample(tokens=100, accepted=20), Sample(tokens=400, accepted=120)) == 0.5
    assert gain(Sample(), Sample()) is None


def test_totals_are_summed_over_brokers_and_drafts_counted_once():
    worker = {"name": "target-1", "role": "target", "metrics": {"judged": {"remote": [50, 30]}}}
    drafter = {"name": "draft-1", "role": "draft", "tokens": 9}
    reports = [
        {"loads": {"m": {"waiting": 1, "running": 2}}, "workers": [worker | {"tokens": 100}, drafter]},
        {"loads": {"m": {"waiting": 0, "running": 3}}, "workers": [worker | {"tokens": 40}]},
    ]
    assert sample_of(reports) == Sample(1, 5, 140, 30)
