"""Notes of a process by the broker's clock, their way over the wire, and a trace as text and as Chrome's format."""

from __future__ import annotations

import json

import pytest

from specq.observe import chrome, timeline
from specq.observe.sections import REASONS, drafts_by
from specq.observe.timeline import described
from specq.protocol import LANES, REMOTE, SUFFIX, Clock, GetClock, TraceEvents, decode, encode, trace_events
from specq.runtime.tracing import MOST_EVENTS, MOST_SESSIONS, Tracer
from specq.verifier.control.choices import Choice, DraftDecision
from tests.each import each


class Ticking:
    """A clock that is `ahead` of the broker's, and a line that takes `there_s` and `back_s`."""

    def __init__(self, ahead: float = 1000.0) -> None:
        self.ahead, self.broker = ahead, 50.0

    def __call__(self) -> float:
        return self.broker + self.ahead

    def compare(self, tracer: Tracer, there_s: float, back_s: float) -> None:
        asked = next(message for message in tracer.messages() if isinstance(message, GetClock))
        self.broker += there_s
        answer = Clock(echo_us=asked.sent_us, clock_us=int(self.broker * 1e6))
        self.broker += back_s
        tracer.take_clock(answer)


@pytest.fixture
def clock() -> Ticking:
    return Ticking()


@pytest.fixture
def tracer(clock) -> Tracer:
    """One that notes what happens to a session, 1."""
    tracer = Tracer(clock)
    tracer.open(1)
    return tracer


def sent(tracer: Tracer) -> list[TraceEvents]:
    return [message for message in tracer.messages() if isinstance(message, TraceEvents)]


def test_no_events_are_sent_without_tracing(clock):
    tracer = Tracer(clock)
    tracer.note(1, trace_events.OPENED, clock(), 5)

    assert not tracer.is_on
    assert list(tracer.messages()) == []


@each(("there_s", "back_s"), [(0.001, 0.001), (0.0, 0.010), (0.010, 0.0), (0.2, 0.003)])
def test_times_are_the_brokers_within_the_error_that_is_stated(clock, there_s, back_s):
    """However unequal the two ways are."""
    tracer = Tracer(clock)
    tracer.open(1)
    at = clock.broker
    tracer.note(1, trace_events.OPENED, clock(), 5, 9)
    assert sent(tracer) == []  # the clocks were not compared yet

    clock.compare(tracer, there_s, back_s)
    (message,) = sent(tracer)

    (event,) = trace_events.unpack(decode(encode(message)))
    assert abs(event["at_us"] - at * 1e6) <= message.error_us + 1
    assert message.error_us == pytest.approx((there_s + back_s) / 2 * 1e6, abs=2)
    assert (event["event"], event["context_tokens"], event["tokens_left"]) == ("opened", 5, 9)


def test_the_shortest_of_the_last_round_trips_counts(clock, tracer):
    """And an old one no longer does: clocks drift."""
    for took in (0.5, 0.002, 0.4):
        clock.compare(tracer, took, 0.0)
    assert tracer.offsets[""].error_us == pytest.approx(1000, abs=2)
    for _ in range(16):
        clock.compare(tracer, 0.01, 0.01)
    assert tracer.offsets[""].error_us == pytest.approx(10_000, abs=2)


def test_a_session_that_ended_is_sent_and_forgotten(clock, tracer):
    clock.compare(tracer, 0.0, 0.0)
    tracer.note(1, trace_events.CLOSED, clock(), 5)
    tracer.end(1)

    assert len(sent(tracer)) == 1
    assert not tracer.is_on


def test_rings_are_bounded_and_say_what_they_lost(clock, tracer):
    clock.compare(tracer, 0.0, 0.0)
    for _ in range(MOST_EVENTS + 5):
        tracer.note(1, trace_events.ROUND, clock(), *(2**40,) * 8)
    (message,) = sent(tracer)
    assert (len(message.kinds), message.dropped) == (MOST_EVENTS, 5)
    assert decode(encode(message)) == message

    for session_id in range(2, MOST_SESSIONS + 50):
        tracer.open(session_id)
    assert sum(map(tracer.traces, range(MOST_SESSIONS + 50))) == MOST_SESSIONS


def test_kinds_of_a_later_version_are_left_out():
    later = trace_events.Kind(200, "later", ("x",))
    message = trace_events.pack(1, [(later, 1.0, 5), (trace_events.CLOSED, 2.0, 6)], 0, 0, 0)

    assert [event["event"] for event in trace_events.unpack(message)] == ["closed"]


# --- as text, and for Perfetto ----------------------------------------------------------------------------------------


@pytest.fixture
def trace() -> dict:
    def event(at_us: int, process: str, name: str, **values: object) -> dict:
        return {"at_us": at_us, "process": process, "event": name} | values

    counts = {"base_len": 4, "tokens": 3, "verified": 4, "accepted": 2}
    split = {"wait_us": 10, "plan_us": 20, "forward_us": 3000, "commit_us": 40}
    return {
        "job": 7,
        "label": '"q1"',
        "model": "tiny",
        "finish": "stop",
        "in_all_processes": True,
        "dropped": 0,
        "processes": [
            {"name": "v", "role": "target", "error_us": 250, "dropped": 3, "is_complete": True, "is_lost": True}
        ],
        "events": [
            event(1000, "broker", "submitted", prompt_tokens=4),
            event(1500, "broker", "assigned", drafter="d\x1b[2J", lane=0),
            event(2000, "v", "round", **counts, **split),
            event(5000, "v", "judged", lane=0, verified=4, accepted=2, base_len=4),
            event(5001, "v", "judged", lane=255, verified=1, accepted=0, base_len=4),
            event(5500, "broker", "something new", what="x"),
            event(6000, "broker", "finished", finish="stop", tokens=3, reason=""),
        ],
    }


def test_a_timeline_says_what_happened_when_and_where(trace):
    text = timeline(trace)

    assert 'job 7 "q1" on tiny, ended: stop' in text
    assert "v +-0.250 ms" in text
    assert "v: was lost, with the events that it had not sent; 3 earlier events are forgotten" in text
    assert "1.000  v        round from 4: +3 tokens, 2 of 4 drafts accepted; wait 0.01, plan 0.02, forward" in text
    assert "accepted; wait 0.01, plan 0.02, forward 3.00, commit 0.04 ms\n" in text
    assert "lookup: 0 of 1 accepted" in text
    assert "d?[2J: 2 of 4 accepted" in text
    assert "something new: what x" in text
    assert all(line.isprintable() for line in text.splitlines())


def test_every_kind_of_event_has_words():
    """With the values that it carries."""
    kinds = trace_events.KINDS.values()
    events = [{"at_us": 0, "process": "v", "event": kind.name} | dict.fromkeys(kind.values, 1) for kind in kinds]
    whole = {"job": 1, "label": "", "model": "", "finish": "", "dropped": 0, "in_all_processes": False, "processes": []}

    lines = timeline(whole | {"events": events}).splitlines()

    assert not any("at_us" in line or "_tokens 1" in line for line in lines)
    assert "has not ended" in lines[0]
    assert any("not traced in all processes" in line for line in lines)


@each(
    ("reason", "when", "why"),
    [
        ("probe", "still", "it is in a trial"),
        ("probe_won", "from now on", "a trial was faster"),
        ("probe_lost", "still", "a trial of it was slower"),
        ("drafts_fell", "from now on", "it became slower"),
    ],
)
def test_a_decision_is_said_in_a_sentence(clock, tracer, reason, when, why):
    decision = DraftDecision(9, 4, reason, Choice(), 28.0, Choice(frozenset({SUFFIX})), 30.5)
    assert decided(clock, tracer, decision.numbers()) == (
        f"plain decoding {when}, with 4 sessions: 28.0 tokens/s expected, drafts from lookup 30.5 ({why})"
    )


def test_every_reason_has_words():
    assert set(REASONS) == set(trace_events.DECISIONS)


@each("choice", [Choice(frozenset(one), unread) for one in ((), (REMOTE,), LANES) for unread in (False, True)])
def test_a_choice_keeps_its_sources_on_its_way(clock, tracer, choice):
    """For any forecast rates."""
    said = decided(clock, tracer, DraftDecision(9, 1, "probe_won", choice, 1e300, Choice(), 0.0).numbers())
    assert said.startswith(f"{drafts_by(str(choice))} from now on, with 1 session: ")


@each("values", [(9, 1, 0, 1, 0, 1), (9, *(-1,) * 5), (2**31 - 1,) * 6])
def test_decisions_of_a_later_version_cause_no_error(clock, tracer, values):
    """Unknown sources are left out, and an unknown reason is shown as a number."""
    assert f"(reason {values[0]})" in decided(clock, tracer, values)


def decided(clock: Ticking, tracer: Tracer, values) -> str:
    """Return what a trace says of a decision that a verifier notes."""
    clock.compare(tracer, 0.0, 0.0)
    tracer.note(1, trace_events.DECIDED, clock(), *values)
    (event,) = trace_events.unpack(decode(encode(sent(tracer)[0])))
    return described(event | {"process": "v"}, {})


def test_chromes_format_has_steps_as_spans_with_their_phases(trace):
    found = json.loads(json.dumps(chrome(trace)))["traceEvents"]

    spans = [(one["name"], one["ts"], one["dur"]) for one in found if one["ph"] == "X"]
    assert spans == [
        ("round", 1000, 3070),
        ("wait", 1000, 10),
        ("plan", 1010, 20),
        ("forward", 1030, 3000),
        ("commit", 4030, 40),
    ]
    assert [one["args"]["name"] for one in found if one["ph"] == "M"] == ["broker", "v"]
    assert all({"ph", "pid", "tid", "name"} <= set(one) for one in found)
