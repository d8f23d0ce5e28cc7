"""Jobs in the background: what verifiers are told of them, and places that they yield."""

from __future__ import annotations

import pytest

from specq.broker.state.job import AGED_S, QUARANTINE_CRASHES
from specq.journal import Crashes
from specq.protocol import BACKGROUND, CAPABILITIES, PROMPT_LOGPROBS, Close, Open
from tests.broker.desk import VERIFIER, Desk


def test_a_verifier_is_told_which_sessions_yield() -> None:
    desk = Desk()
    desk.submit(1, priority=-1)
    desk.submit(2)
    desk.submit(3, priority=5)
    assert {one.session_id: one.is_background for one in desk.received(VERIFIER, Open)} == {1: True, 2: False, 3: False}


def test_an_older_verifier_serves_them_as_others() -> None:
    desk = Desk(capabilities=tuple(one for one in CAPABILITIES if one != BACKGROUND))
    desk.submit(1, priority=-1)
    assert [one.is_background for one in desk.received(VERIFIER, Open)] == [False]


def test_a_full_verifier_gives_a_place_of_the_background_to_others() -> None:
    """The place of the job that has the fewest tokens. It goes on where it was, once there is room."""
    desk = Desk(max_sessions=2)
    for job_id in (1, 2):
        desk.submit(job_id, priority=-1)
    desk.verdict(1, 7, 8)
    desk.submit(3)
    assert [one.session_id for one in desk.received(VERIFIER, Close)] == [2]
    assert desk.job(3).session.verifier == VERIFIER
    desk.submit(4, priority=-1)  # another in the background takes nobody's place
    desk.submit(5)
    assert [one.session_id for one in desk.received(VERIFIER, Close)] == [2, 1]
    desk.submit(6)  # nor do others among themselves
    assert not desk.job(6).session.verifier
    desk.verdict(3, 9, finish="stop")
    assert desk.job(6).session.verifier == VERIFIER
    desk.verdict(5, 9, finish="stop")
    opened = desk.received(VERIFIER, Open)[-1]
    assert (opened.session_id, len(opened.token_ids)) in ((1, 4), (2, 2))


@pytest.mark.parametrize("is_aged", [False, True])
def test_a_job_that_has_waited_for_long_yields_no_more(*, is_aged: bool) -> None:
    desk = Desk(max_sessions=1)
    desk.submit(1)
    desk.submit(2, priority=-1)
    for _ in range(int((AGED_S + 1 if is_aged else AGED_S - 5) / 0.25)):
        desk.tick()
    desk.verdict(1, 9, finish="stop")
    assert desk.received(VERIFIER, Open)[-1].is_background is not is_aged
    desk.submit(3)
    assert bool(desk.job(3).session.verifier) is not is_aged


def test_a_place_that_a_job_may_not_have_is_not_freed_for_it() -> None:
    """While a job in quarantine waits, a verifier is kept for it. A job that needs this verifier waits, too."""
    desk = Desk(capabilities=tuple(one for one in CAPABILITIES if one != PROMPT_LOGPROBS))
    for job_id in (1, 2):
        desk.submit(job_id)
    for job_id in (1, 2):
        desk.job(job_id).crashes = Crashes(QUARANTINE_CRASHES, 0, 0)
        desk.broker.state.jobs.note_quarantine(desk.job(job_id))
    desk.hello(b"able", capabilities=(*CAPABILITIES, PROMPT_LOGPROBS))
    for job_id in (3, 4):
        desk.submit(job_id, priority=-1)
    desk.hello(b"again", capabilities=())
    desk.leave()
    assert {desk.job(job_id).session.verifier for job_id in (1, 2)} == {b"", b"again"}
    desk.submit(5, prompt_logprobs=0)
    assert [desk.job(job_id).session.verifier for job_id in (3, 4, 5)] == [b"able", b"able", b""]
