"""Whether steps wait for drafts of draft workers, by a virtual clock with a device beside the host; and how long these
take to answer."""

from __future__ import annotations

import pytest

from specq.verifier.control.round_trips import RoundTrips
from tests.verifier.timed_service import FarDrafters, TimedService, h200_target
from tests.verifier.timed_target import Machine


def service(far: FarDrafters, *, is_measured: bool = True) -> TimedService:
    """Return a service whose only drafts come from draft workers."""
    target = h200_target(Machine())
    return TimedService(
        target, [], far=far, loop_s=0.0004, session_loop_s=0.00001, prompt_len=20, num_tokens=64,
        measures_drafts=is_measured,
    )  # fmt: skip


def rate_of(served: TimedService, mode: str, num_sessions: int, seconds: float = 1.0) -> float:
    served.mode = mode
    served.serve(0.3, num_sessions)
    return served.serve(seconds, num_sessions).rate


@pytest.mark.parametrize(
    ("round_trip_ms", "num_sessions"),
    [
        *[(20, 1), (20, 16), (50, 1)],
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((50, 16), (1, 64), (20, 64), (50, 64))),
    ],
)
def test_drafts_that_come_too_late_cost_hardly_anything(round_trip_ms: int, num_sessions: int) -> None:
    """However far away they are drafted, and although all of them are used."""
    found = service(FarDrafters(round_trip_ms / 1000, 0.8), is_measured=False)
    plain = rate_of(found, "plain", num_sessions)
    rate_of(found, "async", num_sessions)
    assert rate_of(found, "async", num_sessions) > 0.97 * plain


@pytest.mark.parametrize("round_trip_ms", [pytest.param(1, marks=pytest.mark.slow), 20])
def test_drafts_that_come_in_thousands_are_handled_while_the_device_computes(round_trip_ms: int) -> None:
    """A draft for each of 64 sessions and each step would take the host twice as long as the device takes for the step.
    What there is no time for is dropped."""
    found = service(FarDrafters(round_trip_ms / 1000, 0.8, num_workers=64, draft_s=0.00015), is_measured=False)
    plain = rate_of(found, "plain", 64)
    rate_of(found, "async", 64)
    assert rate_of(found, "async", 64) > 0.96 * plain
    assert found.verifier.sources.num_sent["remote"] > 0


def test_drafts_that_come_in_time_are_waited_for() -> None:
    found = service(FarDrafters(0.001, 0.8), is_measured=False)
    plain = rate_of(found, "plain", 1)
    assert rate_of(found, "async", 1) > 1.3 * plain


@pytest.mark.parametrize("is_measured", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_drafters_that_become_distant_soon_have_no_cost(is_measured: bool) -> None:
    """What was learned of them when they were near holds no more."""
    far = FarDrafters(0.001, 0.8)
    found = service(far, is_measured=is_measured)
    plain = rate_of(found, "plain", 1)
    assert rate_of(found, "async", 1, 5.0) > 1.3 * plain
    far.round_trip_s = 0.05
    rate_of(found, "async", 1)
    assert rate_of(found, "async", 1, 3.0) > 0.97 * plain


@pytest.mark.slow
@pytest.mark.parametrize("is_measured", [True, False])
def test_drafters_that_come_near_are_waited_for_again(is_measured: bool) -> None:
    """Within some seconds, since steps wait for a trial now and then."""
    far = FarDrafters(0.05, 0.8)
    found = service(far, is_measured=is_measured)
    plain = rate_of(found, "plain", 1)
    rate_of(found, "async", 1, 3.0)
    far.round_trip_s = 0.001
    rate_of(found, "async", 1, 8.0)
    assert rate_of(found, "async", 1, 3.0) > 1.3 * plain


def test_a_round_trip_ends_with_the_first_draft_that_knows_of_the_commit() -> None:
    """Others are committed meanwhile, and older drafts still come."""
    trips = RoundTrips()
    trips.commit(7, 10, 1.0)
    trips.commit(7, 11, 1.1)
    assert trips.answer(7, 9, 1.2) is None
    assert trips.answer(8, 30, 1.2) is None
    assert trips.answer(7, 12, 1.3) == pytest.approx(0.3)
    assert trips.answer(7, 12, 1.4) is None


def test_an_answer_that_never_comes_is_given_up() -> None:
    trips = RoundTrips()
    trips.commit(7, 10, 1.0)
    trips.commit(8, 10, 2.1)
    assert trips.answer(8, 10, 2.3) == pytest.approx(0.2)
