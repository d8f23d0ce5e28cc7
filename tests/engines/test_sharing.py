"""Whether passes are shared with the helpers, from how long each pass took: here, as a model of the machine has it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from specq.engines.native.sharing import COST, FIRST, LEAST, TRIAL, Sharing

Seconds = Callable[[int, bool], float]  # of a pass, by its number and whether it is shared


def served(sharing: Sharing, count: int, seconds: Seconds, kind: str = "a") -> list[bool]:
    """Let passes of a kind take their time; return which were shared."""
    ways = []
    for i in range(count):
        ways.append(sharing.should_share(kind))
        sharing.note(kind, seconds(i, ways[-1]))
    return ways


@pytest.mark.parametrize(("alone", "passes"), [(1.1, TRIAL), (1.6, 1)])
def test_a_pass_is_shared_at_first_and_so_on_where_that_is_faster(alone, passes):
    """A trial of what is evidently slower takes one pass."""
    ways = served(Sharing(), 3900, lambda _, shared: 1.0 if shared else alone)
    assert ways[:FIRST] == [True] * FIRST
    assert not any(ways[FIRST : FIRST + passes])
    trials = ways.count(False) // passes
    assert trials * passes * (alone - 1.0) == pytest.approx(COST * 3900, rel=0.1)


def test_a_slow_first_pass_does_not_decide():
    """It reads the weights from the disk; the other passes of the same way have the same weight."""
    ways = served(Sharing(), 60, lambda i, shared: 5.0 if i == 0 else 1.0 if shared else 1.6)
    assert ways.count(False) <= TRIAL


def test_helpers_that_are_always_late_are_left_alone():
    ways = served(Sharing(), 4000, lambda _, shared: 5.0 if shared else 1.0)
    assert ways.count(True) <= FIRST + 6 * TRIAL


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("late", "is_shared"), [(0.02, True), (0.3, False)])
def test_sharing_is_chosen_by_the_mean_time_with_late_helpers(late, is_shared, seed):
    """A helper that is late costs four passes; others save a third."""
    rng = np.random.default_rng(seed)
    ways = served(Sharing(), 4000, lambda _, shared: (4.0 if rng.random() < late else 0.65) if shared else 1.0)
    assert np.mean(ways[1000:]) == pytest.approx(int(is_shared), abs=0.15)


def test_a_neighbour_that_comes_is_noticed_at_once_and_one_that_goes_in_time():
    sharing = Sharing()
    assert served(sharing, 3000, lambda _, shared: 0.6 if shared else 1.0)[-1]
    ways = served(sharing, 300, lambda _, shared: 3.0 if shared else 1.0)
    assert ways.index(False) <= 8
    assert ways.count(True) <= 8 + 3 * TRIAL
    ways = served(sharing, 1000, lambda _, shared: 0.6 if shared else 1.0)
    assert ways.index(True) <= 2.0 / COST
    assert all(ways[-LEAST + TRIAL :])


def test_after_a_neighbour_that_stays_long_passes_are_shared_again_as_soon():
    """Sharing lost 40% at each trial, so the next one comes when that is a small part of the time."""
    sharing = Sharing()
    served(sharing, 5000, lambda _, shared: 1.4 if shared else 1.0)
    ways = served(sharing, 200, lambda _, shared: 0.6 if shared else 1.0)
    assert ways.index(True) <= 0.4 / COST + 1


def test_kinds_are_measured_apart():
    sharing = Sharing()
    served(sharing, 200, lambda _, shared: 3.0 if shared else 1.0, "small")
    served(sharing, 200, lambda _, shared: 0.6 if shared else 1.0, "large")
    assert (sharing.should_share("small"), sharing.should_share("large")) == (False, True)
