"""What the broker's report says of workers, sessions and faults, how large it may become, and who sees what."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from specq.broker import Broker
from specq.broker.jobs.reports import MOST_SESSIONS
from specq.broker.state.memory import MOST_FAULTS, MOST_OF_ONE, FaultLog
from specq.protocol import GetStatus, Heartbeat, Hello, SessionFailed, encode, report_of
from specq.protocol.layout import MAX_ARRAY
from specq.testing.toy import toy_info
from tests.broker.desk import ANN, Desk, desk_with
from tests.broker.test_roles import Guarded


def asked(desk: Desk, sessions: int = 10) -> dict:
    (status,) = desk.front(ANN, GetStatus(sessions=sessions))
    return report_of(status)


def test_the_busiest_jobs_come_first_and_waiting_jobs_last():
    """By tokens a second since they were submitted."""
    desk = desk_with(1, 2, 3, max_sessions=2)
    desk.now += 2
    desk.verdict(2, 7, 8, 9)
    desk.verdict(1, 7)
    found = asked(desk)["sessions"]
    assert [(one["job"], one["state"], one["tokens"], one["age_s"]) for one in found["busiest"]] == [
        (2, "running", 3, 2.0),
        (1, "running", 1, 2.0),
        (3, "waiting", 0, 2.0),
    ]
    assert [one["job"] for one in asked(desk, 1)["sessions"]["busiest"]] == [2]
    assert "sessions" not in asked(desk, 0)
    assert found["num"] == 3


def test_tokens_count_once_with_the_verifier_that_committed_them():
    desk = desk_with(1)
    desk.verdict(1, 7, 8)
    desk.verdict(1, 9)
    report = asked(desk)
    assert [(one["tokens"], one["drafts"], one["incarnation"]) for one in report["workers"]] == [(3, 0, 1)]
    assert report["time_s"] == desk.now


def test_a_report_is_far_smaller_than_a_frame(monkeypatch):
    """With as many sessions as there may be, of the longest labels."""
    monkeypatch.setattr(Broker, "validates", False)  # it looks at each job after each message
    desk = Desk(max_sessions=0, max_jobs=10_000)
    for job_id in range(1, 3001):
        desk.now += 0.01  # not more requests a second than the broker takes
        desk.submit(job_id, label="\U0001f40d" * 1000)
    report = asked(desk, 2**31 - 1)
    assert (report["sessions"]["num"], len(report["sessions"]["busiest"])) == (3000, MOST_SESSIONS)
    assert len(orjson.dumps(report)) < MAX_ARRAY / 10


def test_faults_are_there_with_their_reason():
    """A verifier gives a job back, is silent, and the job fails in the end."""
    desk = desk_with(1)
    job = desk.job(1)
    gone = SessionFailed(session_id=1, epoch=job.session.epoch, reason="no room", retry=True)
    desk.back(gone)
    desk.now += 100.0
    desk.take(desk.broker.tick(desk.now))
    desk.hello(b"other")
    wrong = SessionFailed(session_id=1, epoch=job.session.epoch, reason="its weights are broken")
    desk.take(desk.broker.from_back(job.session.verifier, encode(wrong), desk.now))
    desk.front(b"other", Heartbeat(incarnation=1, state="failed"))
    desk.front(b"x", Hello(role="target", name="odd", incarnation=1, model=toy_info(), endpoint="y"))
    desk.broker.troubled("the disk is full", desk.now)
    found = [(one["kind"], one["who"], one["reason"]) for one in asked(desk)["faults"]]
    assert found[:2] == [
        ("journal_trouble", "journal", "the disk is full"),
        ("worker_failed", "v", "it reported an error"),
    ]
    assert ("job_failed", "1", "its weights are broken") in found
    assert ("worker_lost", "v", "it sent nothing for too long") in found
    assert ("given_back", "1", "no room") in found


def test_the_log_of_faults_is_short_and_counts_what_comes_again():
    log = FaultLog()
    for i in range(100):
        log.note("worker_refused", "d", f"reason {i // 2}", float(i))
    found = log.report(100.0, lambda owner: True)
    assert len(found) == MOST_FAULTS
    assert found[0] == {"age_s": 1.0, "kind": "worker_refused", "who": "d", "reason": "reason 49", "count": 2}


def test_one_key_cannot_hide_the_faults_of_others():
    """A draft worker that is refused under ever new names has the last few in the log, and the others keep theirs."""
    guarded = Guarded()
    guarded.begin()
    guarded.broker.troubled("the disk is full", 0.0)
    guarded.broker.state.faults.note("job_failed", "9", "it was too long", 0.0, by="alice", owner="alice")
    misfit = replace(toy_info(), tokenizer_hash="another")
    for number in range(100):
        hello = Hello(role="draft", name=f"d{number}", incarnation=number + 1, model=misfit)
        guarded.say("phone", hello, b"socket %d" % number)
    (status,) = guarded.received("hub", GetStatus())
    found = [(one["kind"], one["who"]) for one in report_of(status)["faults"]]
    assert found[:MOST_OF_ONE] == [("worker_refused", f"d{99 - number}") for number in range(MOST_OF_ONE)]
    assert found[MOST_OF_ONE:] == [("job_failed", "9"), ("journal_trouble", "journal")]


@pytest.mark.parametrize(("who", "seen"), [("alice", True), ("bob", False), ("hub", True)])
def test_sessions_and_their_faults_are_shown_to_their_owner_and_to_the_brokers_key(who, seen):
    guarded = Guarded()
    guarded.begin()
    guarded.broker.state.faults.note("job_failed", "9", "secret", 0.0, owner="alice")
    (status,) = guarded.received(who, GetStatus(sessions=10))
    report = report_of(status)
    assert [one["job"] for one in report["sessions"]["busiest"]] == [1] * seen
    assert report["sessions"]["num"] == seen
    assert [one["reason"] for one in report["faults"]] == ["secret"] * seen
    assert [worker["name"] for worker in report["workers"]] == ["gpu", "laptop"]
