"""The virtual clock."""

import pytest

from specq.protocol.errors import EngineError
from specq.simulate.machine import EventQueue


def test_events_run_in_the_order_of_their_times_then_of_asking():
    queue, seen = EventQueue(), []
    for name, time in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
        queue.at(time, lambda name=name: seen.append((name, queue.now)))
    queue.run(5.0)
    assert seen == [("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 2.0)]
    assert queue.now == 5.0


def test_what_lies_beyond_waits():
    queue, seen = EventQueue(), []
    queue.at(1.5, seen.append, "later")
    queue.run(1.0)
    assert seen == []
    queue.run(0.5)
    assert seen == ["later"]


def test_the_past_is_now():
    """An event asked for too late runs at once, and the clock does not go back."""
    queue, seen = EventQueue(), []
    queue.at(1.0, lambda: queue.at(0.2, lambda: seen.append(queue.now)))
    queue.run(2.0)
    assert seen == [1.0]


def test_waiting_stops_when_the_condition_holds():
    queue, seen = EventQueue(), []
    for time in (1.0, 2.0, 3.0):
        queue.at(time, seen.append, time)
    queue.run_until(lambda: len(seen) == 2, limit_s=10)
    assert (queue.now, seen, queue.num_events) == (2.0, [1.0, 2.0], 2)


@pytest.mark.parametrize("limit_s", [2.5, 100])
def test_waiting_in_vain_is_an_error(limit_s):
    """Both with events after the limit and without events."""
    queue = EventQueue()
    for time in (1.0, 2.0, 3.0):
        queue.at(time, lambda: None)
    with pytest.raises(EngineError, match="did not happen"):
        queue.run_until(lambda: False, limit_s)
