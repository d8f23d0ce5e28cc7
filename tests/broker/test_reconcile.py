"""What a heartbeat lists against what the broker expects: the pure rules, without a broker."""

from __future__ import annotations

import pytest

from specq.broker.state.transcript import HeartbeatMark
from specq.broker.workers.assignment import Action, Expected, Kind, Reported, reconcile


def session(length: int = 10, at_last: int = -1, *, is_missing: bool = False) -> dict[int, Expected]:
    """Return one session of epoch 7, with these committed lengths now and at the worker's last heartbeat."""
    return {1: Expected(7, length, HeartbeatMark(at_last, is_missing))}


@pytest.mark.parametrize(
    ("length", "at_last", "reported", "kind"),
    [
        pytest.param(10, 10, 10, "keep", id="equal"),
        pytest.param(10, -1, 4, "keep", id="fewer, at the first heartbeat"),
        pytest.param(10, 6, 6, "keep", id="fewer, and what came since may be on its way"),
        pytest.param(10, 6, 5, "behind", id="fewer than at the last heartbeat"),
        pytest.param(10, 10, 0, "behind", id="none at all, where there were some"),
        pytest.param(10, 10, 12, "ahead", id="more, and the broker stands still"),
        pytest.param(10, 9, 12, "keep", id="more, and the broker goes on"),
        pytest.param(10, -1, 12, "keep", id="more, at the first heartbeat"),
    ],
)
def test_lengths_decide_about_a_session_that_both_have(length: int, at_last: int, reported: int, kind: Kind) -> None:
    """A difference counts only if it was there at the last heartbeat: what is on its way is not lost."""
    assert reconcile(session(length, at_last), {1: Reported(7, reported)}) == [Action(kind, 1, 7, reported)]


def test_a_session_that_is_not_expected_is_closed() -> None:
    assert reconcile({}, {}) == []
    assert reconcile({}, {1: Reported(7, 3)}) == [Action("close", 1, 7, 3)]


@pytest.mark.parametrize("epoch", [6, 8])
def test_a_session_of_another_epoch_is_closed_under_that_epoch(epoch: int) -> None:
    """It does not count as missing: the worker has yet to close the one before."""
    assert reconcile(session(), {1: Reported(epoch, 10)}) == [Action("close", 1, epoch, 10)]


@pytest.mark.parametrize(("is_missing", "kind"), [(False, "missing"), (True, "lost")])
def test_a_session_is_lost_the_second_time_that_it_is_missing(is_missing: bool, kind: Kind) -> None:
    assert reconcile(session(is_missing=is_missing), {}) == [Action(kind, 1, 7)]


def test_a_returning_session_stops_counting_as_missing() -> None:
    """After the mark is confirmed, counting starts anew."""
    expected = session(at_last=10, is_missing=True)
    assert reconcile(expected, {1: Reported(7, 10)}) == [Action("keep", 1, 7, 10)]
    expected[1].mark.confirm(10)
    assert reconcile(expected, {}) == [Action("missing", 1, 7)]


def test_each_session_has_one_action_and_arguments_stay_unchanged() -> None:
    """Reported ones first, in their order; the arguments stay as they are, so that the same call gives the same
    answer."""
    expected = {i: Expected(i, 10, HeartbeatMark(10)) for i in (1, 2, 3)}
    reported = {2: Reported(2, 9), 9: Reported(5, 1), 1: Reported(1, 10)}
    first = reconcile(expected, reported)
    assert first == [
        Action("behind", 2, 2, 9), Action("close", 9, 5, 1), Action("keep", 1, 1, 10), Action("missing", 3, 3),
    ]  # fmt: skip
    assert expected == {i: Expected(i, 10, HeartbeatMark(10)) for i in (1, 2, 3)}
    assert reconcile(expected, reported) == first
