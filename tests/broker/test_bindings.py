"""Which verifier's crash counts against which job when the broker itself starts again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specq.broker import Broker
from specq.broker.jobs.reports import status_report
from specq.broker.state.memory import GRACE_S
from specq.journal import Crashes, StoredJob
from specq.protocol.messages import Heartbeat, Hello, Open
from specq.testing.fake_journal import FakeJournal
from specq.testing.toy import toy_info
from tests.broker.desk import VERIFIER, Desk

LATE = GRACE_S + 1


def journal_of(desk: Desk) -> FakeJournal:
    journal = FakeJournal()
    journal.write([write.record for write in desk.writes])
    return journal


def running(*job_ids: int) -> Desk:
    """Return a broker whose verifier, of incarnation 1, has these jobs."""
    desk = Desk(has_journal=True)
    for job_id in job_ids:
        desk.submit(job_id)
    return desk


def restarted(stored: list[StoredJob]) -> Desk:
    """Return the next broker, which knows no verifier yet."""
    desk = Desk(has_journal=True)
    desk.broker, desk.sent, desk.writes = Broker(incarnation=2, has_journal=True), [], []
    desk.broker.restore(stored, desk.now)
    return desk


def hello(desk: Desk, incarnation: int) -> None:
    info = toy_info()
    desk.front(b"v%d" % incarnation, Hello(role="target", name="v", incarnation=incarnation, model=info, endpoint="x"))


def opened(desk: Desk) -> list[int]:
    return [one.session_id for one in desk.received(b"", Open)]


def test_a_verifier_that_comes_back_clears_its_jobs() -> None:
    """They wait for it, though another one is there, and no failure is counted."""
    desk = restarted(journal_of(running(1, 2)).unfinished())
    hello(desk, 7)
    assert opened(desk) == []
    assert status_report(desk.broker.state)["jobs"] == {"waiting": 2, "running": 0, "finished": 0}
    hello(desk, 1)
    assert sorted(opened(desk)) == [1, 2]
    desk.now += LATE
    for incarnation in (1, 7):
        desk.front(b"v%d" % incarnation, Heartbeat(incarnation=incarnation, state="ready"))
    desk.take(desk.broker.tick(desk.now))
    assert [job.crashes for job in desk.broker.state.jobs.active.values()] == [Crashes(), Crashes()]


def test_one_that_does_not_is_a_death_of_each_of_its_jobs() -> None:
    """After the time for it; then others go on with them, and the journal knows."""
    stored = journal_of(running(1, 2)).unfinished()
    assert [job.placed for job in stored] == [1, 1]
    desk = restarted(stored)
    hello(desk, 7)
    desk.now += LATE
    desk.front(b"v7", Heartbeat(incarnation=7, state="ready"))
    desk.take(desk.broker.tick(desk.now))
    assert sorted(opened(desk)) == [1, 2]
    again = FakeJournal()
    again.jobs = {job.submit.job_id: replace(job) for job in stored}
    again.write([write.record for write in desk.writes])
    assert [(job.crashes, job.placed) for job in again.unfinished()] == [(Crashes(1), 7), (Crashes(1), 7)]


@pytest.mark.parametrize(("num_jobs", "is_given_up"), [(1, True), (2, False)])
def test_a_quarantined_job_that_was_alone_is_given_up(num_jobs: int, is_given_up: bool) -> None:
    """Its second crash alone ends it; with others beside it, a crash counts as no one job's."""
    stored = journal_of(running(*range(1, num_jobs + 1))).unfinished()
    stored[0].crashes = Crashes(3, 1, 0)
    desk = restarted(stored)
    desk.now += LATE
    desk.take(desk.broker.tick(desk.now))
    job = desk.broker.state.jobs.get(1)
    assert job is not None
    assert (job.transcript.finish, job.crashes) == (
        ("error", Crashes(4, 2, 0)) if is_given_up else ("", Crashes(4, 1, 0))
    )


@pytest.mark.parametrize(("state", "expected"), [("leaving", Crashes()), ("failed", Crashes(1))])
def test_how_a_verifier_leaves_is_in_its_last_word(state: str, expected: Crashes) -> None:
    """A clean exit counts against no job, an error exit counts at once. Either way the jobs are then unplaced."""
    desk = running(1)
    desk.leave(state=state)
    (stored,) = journal_of(desk).unfinished()
    assert (stored.crashes, stored.placed) == (expected, 0)


def test_a_stopping_broker_unbinds_jobs_of_live_verifiers() -> None:
    """When it stops: of one that is silent meanwhile the next broker will know whether it died."""
    desk = running(1)
    since = desk.now = desk.now + 1
    assert desk.broker.awaits_verifiers(since)
    desk.take(desk.broker.unbind_jobs(since, desk.now))
    assert [job.placed for job in journal_of(desk).unfinished()] == [1]
    desk.front(VERIFIER, Heartbeat(incarnation=1, state="ready"))
    assert not desk.broker.awaits_verifiers(since)
    desk.take(desk.broker.unbind_jobs(since, desk.now))
    assert [job.placed for job in journal_of(desk).unfinished()] == [0]


def test_what_is_cancelled_while_it_waits_is_left_alone() -> None:
    """No crash counts against it, and no verifier opens it."""
    desk = restarted(journal_of(running(1)).unfinished())
    job = desk.job(1)
    job.transcript.finish = "cancelled"
    desk.broker.intake.finish(job)
    desk.now += LATE
    desk.take(desk.broker.tick(desk.now))
    hello(desk, 1)
    assert (opened(desk), job.crashes) == ([], Crashes())
