"""What the broker promises to those who submit: reasons, deadlines, lists; with a journal and without."""

from __future__ import annotations

import json

import numpy as np
import pytest

from specq.broker import Broker, Find
from specq.broker.gate import MAX_WORKERS
from specq.broker.jobs.verdicts import read_commit
from specq.broker.state import table
from specq.broker.state.ledger import restored
from specq.journal import StoredJob
from specq.protocol.arrays import UInt8Array
from specq.protocol.errors import JournalBusyError, ProtocolError
from specq.protocol.explanation import RejectedDraft, RoundTime, read_rejected
from specq.protocol.messages import (
    Accepted,
    Cancel,
    Failed,
    GetStatus,
    Hello,
    JobList,
    ListJobs,
    Message,
    Open,
    Status,
    Submit,
    Tokens,
    Verdict,
)
from specq.protocol.origins import (
    COLOCATED,
    CORRECTED,
    DRAFT_WORKER,
    DRAFTED,
    ORIGIN_CODES,
    ORIGINS,
    OWN,
    PLAIN,
    SUFFIX,
    origin_names,
)
from specq.protocol.params import SamplingParams
from specq.protocol.status_report import report_of
from specq.protocol.wire import encode
from specq.testing.toy import toy_info
from tests.broker.desk import ANN, BEN, Desk, desk_with, token_ids


def codes(*names: str) -> UInt8Array:
    return np.array([ORIGIN_CODES[name] for name in names], np.uint8)


def origins(*received: Message) -> list[str]:
    """Return the names of what came with tokens, in order."""
    found = [one.origins.tobytes() for one in received if isinstance(one, Tokens)]
    return [name for one in found for name in origin_names(one)]


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_with_the_reason() -> None:
    """Jobs that wait and run count; one that ends makes room."""
    desk = Desk(max_jobs=2, max_sessions=1)
    assert [desk.submit(i) for i in (1, 2)] == [[Accepted(job_id=1)], [Accepted(job_id=2)]]
    (refused,) = desk.submit(3)
    assert isinstance(refused, Failed)
    assert (refused.code, "the queue is full (2 jobs)" in refused.reason) == ("busy", True)
    assert desk.submit(1) == [Accepted(job_id=1)]
    desk.verdict(1, 7, finish="stop")
    assert desk.submit(3) == [Accepted(job_id=3)]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"priority": 1001}, "priority is 1001, but must be a whole number from -1000 to 1000"),
        ({"deadline_ms": -1}, "deadline_ms is -1"),
        ({"label": "x" * 1001}, "(1001 characters), but must be text of at most 1000 characters"),
    ],
)
def test_options_out_of_bounds_are_refused(fields: dict[str, object], reason: str) -> None:
    (refused,) = Desk().submit(1, **fields)
    assert isinstance(refused, Failed)
    assert reason in refused.reason


def test_without_the_journal_no_new_jobs() -> None:
    """What it has goes on, what it has not is refused after all, and all is well when it can be written again."""
    desk = Desk(has_journal=True)
    desk.submit(1)
    assert desk.journaled() == [Accepted(job_id=1)]
    desk.submit(2, BEN)
    (refused,) = desk.take(desk.broker.troubled("the disk is full", desk.now), BEN)
    assert isinstance(refused, Failed)
    assert (refused.code, "the disk is full" in refused.reason) == ("busy", True)
    (refused,) = desk.submit(3)
    assert "the disk is full" in refused.reason
    assert desk.verdict(1, 7, 8) == []
    desk.take(desk.broker.troubled("", desk.now))
    assert token_ids(desk.journaled()) == [7, 8]
    desk.submit(2, BEN)
    assert desk.journaled(BEN) == [Accepted(job_id=2)]
    assert [type(write.record).__name__ for write in desk.writes if write.record.job_id == 2] == [
        "JobTaken", "JobBound", "JobDropped", "JobTaken", "JobBound",
    ]  # fmt: skip


def test_a_journal_that_cannot_be_read_refuses() -> None:
    """Since the job might be one that ended."""
    desk = Desk(has_journal=True)
    desk.front(ANN, Submit(job_id=1, params=SamplingParams(), prompt_ids=np.array([5])))
    (refused,) = desk.take(desk.broker.found(1, JournalBusyError("it is broken"), desk.now), ANN)
    assert isinstance(refused, Failed)
    assert (refused.code, refused.reason) == ("busy", "it is broken")


def test_a_cancel_does_not_overtake_its_submit() -> None:
    """Though the journal is asked first whether it knows the job."""
    desk = Desk(has_journal=True)
    desk.front(ANN, Submit(job_id=1, params=SamplingParams(), prompt_ids=np.array([5])))
    desk.front(ANN, Cancel(job_id=1))
    desk.found(Find(1), ANN)
    received = desk.journaled()
    assert isinstance(received[-1], Tokens)
    assert received[-1].finish == "cancelled"


# --- deadlines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_sessions", [0, 1])
def test_a_deadline_ends_a_job_that_runs_or_waits(max_sessions: int) -> None:
    """At the first tick after it, with what it has; not before."""
    desk = desk_with(1, max_sessions=1)
    desk.submit(2, deadline_ms=1000, priority=0)
    if max_sessions:
        desk.verdict(1, 3, finish="stop")
        desk.verdict(2, 4, 5)
    desk.sent.clear()
    desk.tick(0.9)
    assert 2 in desk.broker.state.jobs.active
    received = desk.tick(0.2)
    assert isinstance(received[-1], Failed)
    assert received[-1].code == "deadline"
    assert f"{2 * max_sessions} of at most 10 tokens" in received[-1].reason
    assert 2 not in desk.broker.state.jobs.active


# --- after a restart --------------------------------------------------------------------------------------------------


def test_a_text_goes_on_with_the_same_weights_only() -> None:
    """A verifier of the same name with others is left alone, until there are no tokens that could be mixed."""
    desk = desk_with(1, 2)
    desk.verdict(1, 7)
    desk.hello(b"other", fingerprint="another")
    desk.sent.clear()
    desk.leave()
    assert [(to, m.session_id) for to, m in desk.sent if isinstance(m, Open)] == [(b"other", 2)]
    desk.hello(b"again")
    assert [(to, m.session_id, m.token_ids.tolist()) for to, m in desk.sent if isinstance(m, Open)][1:] == [
        (b"again", 1, [5, 6, 7])
    ]


def test_a_restarted_broker_waits_for_its_verifiers() -> None:
    """A client that asks too early is neither refused nor answered; later it is."""
    broker = Broker(incarnation=1, liveness_ms=3000)
    broker.restore([], 10.0)
    submit = encode(Submit(job_id=1, params=SamplingParams(), prompt_ids=np.array([5])))
    assert broker.from_front(ANN, submit, 12.9) == []
    (refused,) = broker.from_front(ANN, submit, 13.1)
    assert b"no_verifier" in refused.frames[1]


# --- memory and lists -------------------------------------------------------------------------------------------------


def test_only_what_the_journal_has_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that ended leave the memory, the oldest first, but not before the journal has their ends."""
    monkeypatch.setattr(table, "KEEP_FINISHED", 3)
    desk = Desk(has_journal=True)
    for i in range(1, 8):
        desk.submit(i)
        desk.verdict(i, 7, finish="stop")
    assert len(desk.broker.state.jobs.finished) == 7
    desk.journaled()
    desk.submit(8)
    desk.verdict(8, 7, finish="stop")
    assert list(desk.broker.state.jobs.finished) == [6, 7, 8]
    monkeypatch.setattr(table, "KEEP_TOKENS", 7)
    desk.journaled()
    desk.submit(9)
    desk.verdict(9, 7, finish="stop")
    assert list(desk.broker.state.jobs.finished) == [8, 9]


def test_without_a_journal_lists_come_from_memory() -> None:
    """Those that wait and run first, then those that ended, in pages."""
    desk = desk_with(1, 2, 3, 4, max_sessions=1)
    desk.verdict(1, 7, finish="stop")
    desk.verdict(2, 7, finish="stop")
    desk.front(BEN, Cancel(job_id=4))

    def listed(**page: int) -> list[tuple[int, str]]:
        (answer,) = desk.front(BEN, ListJobs(**page))
        assert isinstance(answer, JobList)
        lines = json.loads(answer.data.tobytes())
        return [(line["job_id"], line["state"]) for line in lines]

    assert listed() == [(3, "running"), (4, "cancelled"), (2, "finished"), (1, "finished")]
    assert listed(limit=1, skip=1) == [(2, "finished")]


def test_a_status_has_room_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header holds about 440."""
    monkeypatch.setattr(Broker, "validates", False)  # it looks at each worker after each message
    desk = Desk()
    for number in range(MAX_WORKERS - len(desk.broker.state.workers.all())):
        desk.front(b"%d" % number, Hello(role="draft", name=f"drafter-{number}", incarnation=number, model=toy_info()))
    (status,) = desk.front(ANN, GetStatus())
    assert isinstance(status, Status)
    report = report_of(status)
    assert len({worker["name"] for worker in report["workers"]}) == MAX_WORKERS


def test_the_status_reports_the_journal() -> None:
    desk = Desk(has_journal=True)
    desk.submit(1)
    (status,) = desk.front(ANN, GetStatus())
    assert isinstance(status, Status)
    journal = {"kept": True, "records": 2, "records_waiting": 2, "commits": 0, "commit_seconds": 0.0, "trouble": ""}
    assert status.report["journal"] == journal


# --- origins ----------------------------------------------------------------------------------------------------------


def test_a_client_learns_where_each_token_comes_from() -> None:
    """As the verdicts say; one that says nothing has plain tokens alone. What overlaps is counted once, also for who
    comes later."""
    desk = desk_with(1)
    said = (DRAFT_WORKER, SUFFIX, CORRECTED)
    first = desk.verdict(1, 7, 8, 9, origins=codes(*said))
    second = desk.verdict(1, 9, 4, base_len=4, origins=codes(CORRECTED, COLOCATED))
    third = desk.verdict(1, 5, finish="stop")
    assert origins(*first, *second, *third) == [*said, COLOCATED, PLAIN]
    again = desk.submit(1, BEN)
    assert origins(*again[1:]) == [*said, COLOCATED, PLAIN]


def test_a_job_of_an_older_journal_does_not_say_more_than_it_knows() -> None:
    """There a token was drafted or not; the count of accepted drafts goes on from them."""
    stored = StoredJob(
        Submit(job_id=5, params=SamplingParams(), prompt_ids=np.array([5], np.int32)),
        token_ids=np.arange(3, dtype="<i4").tobytes(),
        origins=b"\1\0\1",
        weights="toy int",
    )
    job = restored(stored)
    assert job.session.was_placed, "so it goes first, and costs its client nothing again"
    assert origin_names(job.delta(0).origins.tobytes()) == (DRAFTED, OWN, DRAFTED)
    assert job.stats.accepted_tokens == 2


@pytest.mark.parametrize("wrong", [codes(PLAIN), codes(PLAIN) * 3, np.array([4, len(ORIGINS)], np.uint8)])
def test_origins_are_one_a_token(wrong: UInt8Array) -> None:
    verdict = Verdict(session_id=1, epoch=1, base_len=1, token_ids=np.array([1, 2], np.int32), origins=wrong)
    allowed = f"codes of origins, from 0 to {len(ORIGINS) - 1}"
    with pytest.raises(ProtocolError, match=f"origins must hold {allowed}, one a token, or nothing"):
        read_commit(encode(verdict))


# --- what became of drafts --------------------------------------------------------------------------------------------


def a_round() -> dict[str, object]:
    """Return the fields of a verdict on two drafts. The second draft is wrong."""
    return {
        "node_ids": np.array([0, 1]),
        "mask": np.array([1, 0]),
        "node_lanes": np.array([0, 255]),
        "us": (1500, 20),
        "node_tokens": np.array([7, 9]),
        "node_parents": np.array([-1, 0]),
        "node_probs": np.array([0.5, 0.25]),
        "origins": codes(DRAFT_WORKER, CORRECTED),
    }


@pytest.mark.parametrize("has_journal", [False, True])
def test_who_asks_for_it_learns_what_was_rejected(has_journal: bool) -> None:
    """The verifier is asked to report it. After the end of the job is sent, no record of it is kept."""
    desk = Desk(has_journal=has_journal)
    desk.submit(1, explain=True)
    if has_journal:
        desk.journaled()
    assert [one.explain for one in desk.received(b"", Open)] == [True]
    heard = desk.verdict(1, 7, 8, **a_round())
    heard += desk.journaled() if has_journal else []
    (told,) = [one for one in heard if isinstance(one, Tokens)]
    rejected, rounds = read_rejected(told)
    assert rejected == (RejectedDraft(1, 9, -1, SUFFIX, 0.25),)
    assert rounds == (RoundTime(0, 1500, 20),)
    desk.verdict(1, 5, finish="stop")
    if has_journal:
        desk.journaled()
    (_, again) = desk.submit(1, BEN)
    assert isinstance(again, Tokens)
    assert (len(again.token_ids), read_rejected(again)) == (3, ((), ()))


def test_who_does_not_ask_is_sent_none_of_it() -> None:
    desk = desk_with(1)
    (told,) = desk.verdict(1, 7, 8, **a_round())
    assert isinstance(told, Tokens)
    assert read_rejected(told) == ((), ())
