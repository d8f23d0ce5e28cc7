"""What the broker notes of jobs, whose events it takes, and who may see them."""

from __future__ import annotations

import weakref

import numpy as np
import orjson
import pytest

from specq.broker.state import table
from specq.broker.state.traces import MOST_EVENTS, MOST_TRACES
from specq.protocol import Assign, Clock, GetClock, GetTrace, Open, Trace, TraceEvents, trace_events
from tests.broker.desk import ANN, BEN, VERIFIER, Desk, desk_with
from tests.broker.test_roles import Guarded, a_job


def trace_of(desk: Desk, job_id: int = 0, client: bytes = ANN) -> dict:
    (answer,) = desk.front(client, GetTrace(job_id=job_id))
    assert isinstance(answer, Trace)
    assert answer.reason == ""
    return orjson.loads(answer.data.tobytes())


def names(trace: dict) -> list[tuple[str, str]]:
    return [(event["process"], event["event"]) for event in trace["events"]]


def noted(job_id: int, *at_us: int, kind: trace_events.Kind = trace_events.OPENED) -> TraceEvents:
    return trace_events.pack(job_id, [(kind, at / 1e6, 7) for at in at_us], 0, 25, 0)


def test_the_broker_notes_what_passes_through_it():
    desk = Desk()
    desk.submit(1, trace=True)
    desk.verdict(1, 7, 8)
    desk.now += 1
    desk.verdict(1, 9, finish="stop")
    trace = trace_of(desk)
    story = ("submitted", "journaled", "opened", "verdict", "delivered", "verdict", "finished", "delivered")
    assert names(trace) == [("broker", name) for name in story]
    verdicts = [event for event in trace["events"] if event["event"] == "verdict"]
    assert [(one["base_len"], one["tokens"]) for one in verdicts] == [(2, 2), (4, 1)]
    assert verdicts[1]["at_us"] - verdicts[0]["at_us"] == 1_000_000
    assert (trace["finish"], trace["in_all_processes"]) == ("stop", True)


def test_only_jobs_that_ask_are_traced_elsewhere():
    """Of the others the milestones are known; one who attaches again and again crowds nothing out."""
    desk = desk_with(1)
    desk.submit(2, trace=True)
    assert [(one.session_id, one.trace) for one in desk.received(b"", Open)] == [(1, False), (2, True)]
    for _ in range(200):
        desk.submit(1, BEN)
    desk.verdict(1, 7, finish="stop")
    trace = trace_of(desk, 1)
    assert [name for _, name in names(trace)] == ["submitted", "journaled", "opened", "finished"]
    assert (trace["in_all_processes"], trace["processes"]) == (False, [])


def test_a_few_others_are_traced_at_a_time():
    """Their places become free when they end."""
    desk = Desk(traced_at_once=2)
    desk.submit(9, trace=True)  # which takes no place
    for job_id in (1, 2, 3):
        desk.submit(job_id)
    desk.verdict(1, 7, finish="stop")
    for job_id in (4, 5):
        desk.submit(job_id)
    assert [one.session_id for one in desk.received(b"", Open) if one.trace] == [9, 1, 2, 4]


def test_events_of_the_verifier_come_in_by_time():
    desk = Desk()
    desk.submit(1, trace=True)
    desk.front(VERIFIER, noted(1, 100_000_500, 99_000_000))
    trace = trace_of(desk)
    assert names(trace)[0] == ("v", "opened")
    assert names(trace)[-1] == ("v", "opened")
    found = {part["role"]: (part["error_us"], part["is_complete"]) for part in trace["processes"]}
    assert found == {"target": (25, False)}
    desk.front(VERIFIER, noted(1, 100_000_600, kind=trace_events.CLOSED))
    assert [part["is_complete"] for part in trace_of(desk)["processes"]] == [True]


def test_events_of_strangers_and_of_unknown_jobs_are_dropped():
    desk = Desk()
    desk.submit(1, trace=True)
    desk.submit(2)
    desk.front(BEN, noted(1, 5))
    desk.front(VERIFIER, noted(2, 5))  # not traced there
    desk.front(VERIFIER, noted(3, 5))
    assert desk.broker.state.counts["late_traces"] == 3
    assert {process for process, _ in names(trace_of(desk, 1))} == {"broker"}


@pytest.mark.parametrize("changes", [{"values": np.zeros(9, np.int32)}, {"times_us": np.zeros(2, np.int64)}])
def test_arrays_that_do_not_fit_together_are_refused(changes):
    desk = Desk()
    desk.submit(1, trace=True)
    arrays = {"kinds": np.ones(1, np.uint8), "times_us": np.zeros(1, np.int64), "values": np.zeros(8, np.int32)}
    desk.front(VERIFIER, TraceEvents(job_id=1, **arrays | changes))
    assert desk.broker.state.counts["dropped_front"] == 1
    assert {process for process, _ in names(trace_of(desk, 1))} == {"broker"}


def test_what_is_kept_is_bounded():
    """Of a job the last events of each process, and jobs in all; what is gone is counted."""
    desk = Desk(max_sessions=0)
    desk.submit(1, trace=True)
    for i in range(10):
        desk.front(VERIFIER, noted(1, *range(i * 100, i * 100 + 100)))
        for _ in range(100):
            desk.job(1).trace.add_often(desk.now, "verdict", 1, 1, 0, 0)
    trace = trace_of(desk, 1)
    (part,) = [one for one in trace["processes"] if one["role"] == "target"]
    kept = [process for process, _ in names(trace)].count("v")
    assert (kept, part["dropped"]) == (500, 500)
    assert kept <= MOST_EVENTS
    assert trace["dropped"] >= 1000 - MOST_EVENTS
    for job_id in range(2, MOST_TRACES + 2):
        desk.now += 0.01
        desk.submit(job_id)
    (gone,) = desk.front(ANN, GetTrace(job_id=1))
    assert "there is no trace of job 1" in gone.reason
    assert desk.job(1).trace is None


def test_a_trace_keeps_no_job(monkeypatch):
    """What a job said is gone with the job; its trace is there, complete, and takes what is sent of it late."""
    monkeypatch.setattr(table, "KEEP_FINISHED", 1)
    desk = Desk()
    desk.submit(1, trace=True, label="old")
    kept = weakref.ref(desk.job(1))
    desk.verdict(1, 7, finish="stop")
    assert kept() is not None
    desk.submit(2)
    desk.verdict(2, 7, finish="stop")
    assert kept() is None
    desk.front(VERIFIER, noted(1, 5, kind=trace_events.CLOSED))
    trace = trace_of(desk, 1)
    assert (trace["label"], trace["finish"], trace["model"]) == ("old", "stop", "toy")
    assert ("v", "closed") in names(trace)


def test_a_lost_verifier_is_in_the_trace_and_the_next_one_goes_on():
    desk = Desk()
    desk.submit(1, trace=True)
    desk.verdict(1, 7)
    desk.now += 100
    desk.hello(b"other")
    desk.take(desk.broker.tick(desk.now))
    trace = trace_of(desk)
    story = [name for _, name in names(trace)]
    assert story.index("crashed") < len(story) - 1 - story[::-1].index("opened")
    assert [part["is_lost"] for part in trace["processes"] if part["role"] == "target"] == [True, False]


def test_the_clock_is_the_brokers():
    desk = Desk()
    (answer,) = desk.front(ANN, GetClock(sent_us=12))
    assert answer == Clock(echo_us=12, clock_us=int(desk.now * 1e6))


@pytest.mark.parametrize(("who", "seen"), [("alice", True), ("bob", False), ("hub", True)])
def test_traces_are_their_owners(who, seen):
    """Bob cannot see that a trace exists. Without an id he receives no trace."""
    guarded = Guarded()
    guarded.begin()
    guarded.say("alice", a_job(2))
    for job_id in (0, 1):
        (answer,) = guarded.received(who, GetTrace(job_id=job_id))
        assert ("there is no trace" not in answer.reason) == seen


def test_others_cannot_add_to_a_trace():
    guarded = Guarded(traced_at_once=4)
    assigned = guarded.begin()
    assert isinstance(assigned, Assign)
    assert assigned.trace
    for who in ("bob", "phone"):
        guarded.say(who, noted(1, 5))
    assert guarded.counts["late_traces"] == 2
    guarded.say("laptop", noted(1, 5))
    assert guarded.counts["late_traces"] == 2
