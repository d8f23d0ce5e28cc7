"""A client of several brokers: where each message goes, when a job moves, a broker dies, or two of them answer."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from specq.client.brokers import LOOK_S, MOST_BROKERS, KnownBrokers
from specq.client.core import ClientCore
from specq.client.events import FoundJob, JobAccepted, JobDone, NewTokens, RequestFailed, TokenizerReady
from specq.client.inquiries import LISTING, STATUS, TRACE
from specq.client.pending import MOVE_S
from specq.client.sending import MAX_TRIES, MAX_UNANSWERED, MOST_HOPS
from specq.protocol import (
    Accepted,
    Cancel,
    Clock,
    Failed,
    FetchTokenizer,
    Follow,
    GetClock,
    GetStatus,
    GetTrace,
    ListJobs,
    Moved,
    Status,
    Submit,
    Trace,
    TraceEvents,
    trace_events,
)
from specq.testing.fake_broker import INFO, tokens
from tests.client.cores import TEXT, job_of, new_ids
from tests.client.test_core_questions import chunks, info
from tests.client.test_grammar_check import NEW, a_job
from tests.each import each

A, B, C, D = (f"tcp://{name}:1" for name in "abcd")
NONE = Failed(job_id=7, code="no_verifier", reason="none is registered")
STOPS = Failed(job_id=7, code="busy", reason="no new jobs at the moment: it stops")


def new_core(*addresses: str, timeout_s: float = 10.0) -> ClientCore:
    return ClientCore(",".join(addresses or (A, B)), timeout_s)


def sent(core: ClientCore) -> list:
    """Return (address, type, have) of each message that goes out."""
    return [(to, type(message), getattr(message, "have", None)) for to, message in core.take_addressed()]


def over_time(core: ClientCore, start: float, end: float, answer=lambda to, message, now: []) -> tuple[list, list]:
    """Let time pass in steps of 50 ms. `answer` returns what a broker sends. Return the messages sent, and the events.

    A message is (time, address, type, have).
    """
    out, events = [], []
    for step in range(1, round((end - start) / 0.05) + 1):
        now = start + step * 0.05
        events += core.tick(now)
        for to, message in core.take_addressed():
            out.append((round(now, 2), to, type(message), getattr(message, "have", None)))
            for reply in answer(to, message, now):
                events += core.receive(reply, now, to)
    return out, events


def running_at(holder: str, *, known: tuple[str, ...] = (A, B), timeout_s: float = 10.0) -> ClientCore:
    """Return a core whose job 7 runs at this broker, and that has three of its tokens, at time 0."""
    core = new_core(*known, timeout_s=timeout_s)
    core.submit(job_of(7), 0.0)
    if holder != known[0]:
        core.receive(Moved(job_id=7, address=holder), 0.0, known[0])
    core.receive(tokens(7, 0, TEXT[:3]), 0.0, holder)
    core.take_outbox()
    return core


# --- the current broker -------------------------------------------------------------------------------------------


def test_new_requests_go_to_the_current_broker():
    core = new_core()
    core.submit(job_of(7), 0.0)
    core.list_jobs(5, 0, 0.0)
    core.get_status(0.0)
    assert sent(core) == [(A, Submit, 0), (A, ListJobs, None), (A, GetStatus, None)]


def test_a_silent_broker_is_left_when_another_answers():
    """Its requests go to the next one, also the later ones; it may come back."""
    core = new_core()
    core.submit(job_of(7), 0.0)
    assert sent(core) == [(A, Submit, 0)]
    out, _ = over_time(core, 0.0, 0.95)
    assert out == []
    out, _ = over_time(core, 0.95, 1.2, lambda to, message, now: [Accepted(job_id=7)] if to == B else [])
    assert [(to, kind) for _, to, kind, _ in out] == [(B, Submit)]
    core.submit(job_of(8), 1.3)
    core.get_status(1.3)
    assert sent(core) == [(B, Submit, 0), (B, GetStatus, None)]
    assert core.receive(Status(report={}), 1.4, A) != []  # late, but an answer
    core.submit(job_of(9), 1.5)
    assert sent(core) == [(B, Submit, 0)]


def test_a_broker_is_not_silent_because_nothing_was_asked():
    core = running_at(A)
    core.receive(tokens(7, 3, TEXT[3:5]), 30.0, A)
    core.receive(Status(report={}), 31.0, B)
    core.submit(job_of(8), 31.0)
    assert sent(core) == [(A, Submit, 0)]


def test_no_broker_ever():
    """All are tried; the message names all."""
    core = new_core(A, B, C, timeout_s=6.0)
    core.submit(job_of(7), 0.0)
    core.take_outbox()
    out, (failed,) = over_time(core, 0.0, 6.0)
    assert [to for _, to, *_ in out][:3] == [B, C, A]
    assert len(out) <= 6
    assert (failed.error.code, f"no broker answered at {A}, {B}, {C} within 6 s" in str(failed.error)) == (
        "no_broker",
        True,
    )


def test_the_first_broker_is_waited_for():
    """Each gets the question once, however long it takes."""
    core = new_core()
    core.fetch_tokenizer("", 0.0, wait_s=60.0)
    first = sent(core)
    out, events = over_time(core, 0.0, 30.0)
    fetches = [to for to, kind, _ in first + [one[1:] for one in out] if kind is FetchTokenizer]
    assert fetches == [A, B]
    assert [event.what for event in events] == [f"a broker at {A}, {B}"]
    (ready,) = core.receive(chunks(b'{"a":"b"}')[0], 30.1, core.brokers.place("tokenizer"))
    assert isinstance(ready, TokenizerReady)


# --- a job that moves ---------------------------------------------------------------------------------------------


@each("address", [B, C])
def test_a_moved_job_is_followed(address):
    """The request is repeated there, with the tokens that the client has; so is all that follows for this job."""
    core = running_at(A)
    assert core.receive(Moved(job_id=7, address=address), 0.5, A) == []
    assert sent(core) == [(address, Submit, 3)]
    assert new_ids(core.receive(tokens(7, 3, TEXT[3:5]), 0.6, address)) == TEXT[3:5]
    core.cancel(7, 0.7)
    core.get_trace(7, 0.7)
    core.submit(job_of(8), 0.7)
    assert sent(core) == [(address, Cancel, None), (address, GetTrace, None), (A, Submit, 0)]
    core.receive(tokens(7, 5, TEXT[5:6]), 1.0, address)
    core.tick(2.0)
    assert (address, Submit, 6) in sent(core)


def test_a_looked_up_job_is_followed():
    core = new_core()
    core.find(7, 0.0, until_end=True)
    core.receive(Moved(job_id=7, address=B), 0.1, A)
    assert sent(core) == [(A, Follow, 0), (B, Follow, 0)]
    core.receive(info(ended=True), 0.2, B)
    *_, found = core.receive(tokens(7, 0, TEXT[:2], "stop"), 0.2, B)
    assert (type(found), found.transcript.token_ids) == (FoundJob, TEXT[:2])


def test_a_late_refusal_of_a_job_that_moved_does_not_count():
    core = new_core()
    core.find(7, 0.0, until_end=True)
    core.receive(Moved(job_id=7, address=B), 0.1, A)
    assert core.receive(Failed(job_id=7, code="unknown", reason="late"), 0.2, A) == []


def test_a_detached_job_is_followed():
    """The broker that holds it decides whether it is the same job."""
    core = new_core()
    core.submit_detached(job_of(7), 0.0)
    core.receive(Moved(job_id=7, address=C), 0.1, A)
    assert sent(core) == [(A, Submit, 0), (C, Submit, 0)]
    assert core.receive(Accepted(job_id=7), 0.2, C) == [JobAccepted(7)]
    assert core.idle


def test_a_trace_is_followed():
    """To where the job is, and to the others if a broker does not know it."""
    core = new_core(A, B, C)
    core.get_trace(7, 0.0)
    core.receive(Moved(job_id=7, address=C), 0.1, A)
    assert sent(core) == [(A, GetTrace, None), (C, GetTrace, None)]
    unknown = Trace(job_id=7, reason="it is not known")
    assert core.receive(unknown, 0.2, A) == []  # of a broker that is not asked any more
    assert core.receive(unknown, 0.2, C) == core.receive(unknown, 0.3, A) == []
    assert sent(core) == [(A, GetTrace, None), (B, GetTrace, None)]
    (failed,) = core.receive(unknown, 0.4, B)
    assert (failed.key, failed.error.code) == (TRACE, "unknown")


def until_taken(at: float, *, holder: str = B, taker: str = A):
    """Return the answers of a cluster whose `holder` is dead, and whose `taker` has job 7 from a time on."""

    def answer(to, message, now):
        if to == holder or isinstance(message, Cancel | GetStatus):
            return []
        if now < at:
            return [Moved(job_id=7, address=holder)]
        if to == taker:
            return [Accepted(job_id=7), tokens(7, message.have, TEXT[message.have : 10])]
        return [Moved(job_id=7, address=taker)]

    return answer


@each("at", [1.0, 2.2, 2.5, 3.3, 4.4, 9.0])
@pytest.mark.parametrize(("holder", "taker"), [(B, A), (A, B), (D, B)])
def test_a_job_of_a_dead_broker_is_found_at_the_next_holder(at, holder, taker):
    """The others still name the dead one. So the client asks again and again, and goes on soon after the move."""
    core = running_at(holder, known=(A, B, C))
    taken, events = [], []
    out, events = over_time(core, 0.0, at + 3.0, until_taken(at, holder=holder, taker=taker))
    assert new_ids(events) == TEXT[3:10]
    assert not any(isinstance(event, RequestFailed) for event in events)
    taken = [now for now, to, *_ in out if to == taker and now >= at]
    assert taken[0] <= max(at, 2.0) + 0.6
    assert all(have == 3 for now, *_, have in out if now < at)
    assert len(out) <= 6 * (at + 3) + 4


@each("known", [(A, B), (A, B, C)])
def test_a_broker_that_cannot_say_where_a_job_is_is_not_silent(known):
    """The dead broker's lease has run out, and none has taken the job: no broker answers for it for a while."""
    core = running_at(A, known=known)

    def answer(to, message, now):
        if to == A or 3.0 <= now < 4.5:
            return []
        if now < 3.0:
            return [Moved(job_id=7, address=A)]
        return [tokens(7, message.have, TEXT[message.have : 5])] if to == B else [Moved(job_id=7, address=B)]

    over_time(core, 0.0, 4.45, answer)
    core.submit(job_of(8), 4.45)
    assert sent(core) == [(B, Submit, 0)]
    assert B not in core.brokers.silent(4.45)
    _, events = over_time(core, 4.45, 5.6, answer)
    assert new_ids(events) == TEXT[3:5]


def test_many_jobs_of_a_dead_broker_learn_of_it_from_one():
    """Also those that would be asked for again only later."""
    core = new_core(A, B)
    for job_id in range(1, 11):
        core.submit(job_of(job_id), 0.0)
        core.receive(Accepted(job_id=job_id), 0.1, A)
    over_time(core, 0.1, 10.5, lambda to, message, now: [Accepted(job_id=message.job_id)])
    core.submit(job_of(11), 10.5)
    core.take_outbox()
    out, _ = over_time(core, 10.5, 11.7, lambda to, message, now: [Accepted(job_id=message.job_id)] if to == B else [])
    assert sum(to == B for _, to, *_ in out) == 11


def test_jobs_at_a_dead_broker_do_not_hold_up_others():
    """A job that moves leaves its place among the unanswered ones."""
    core = new_core()
    for job_id in range(1, MAX_UNANSWERED + 6):
        core.submit(job_of(job_id), 0.0)
    core.take_outbox()
    for job_id in range(1, MAX_UNANSWERED + 1):
        core.receive(Moved(job_id=job_id, address=B), 0.1, A)
    assert sent(core).count((A, Submit, 0)) == 5


def test_a_job_that_stays_at_a_silent_broker_is_given_up():
    """The others answer all the time, but nobody reaches the one that they name. The error names it, too."""
    core = running_at(B, timeout_s=4.0)
    out, events = over_time(core, 0.0, 30.0, lambda to, message, now: [] if to == B else [Moved(job_id=7, address=B)])
    (failed,) = events
    assert (failed.error.code, str(failed.error)) == ("lost", f"the broker at {B} has been silent for 4 s")
    last = max(now for now, *_ in out)
    assert MOVE_S <= last + 1.0 < MOVE_S + 4.0


def test_a_timeout_shorter_than_a_move():
    """A job that moves has the time that a move takes."""
    core = running_at(B, timeout_s=2.0)
    _, events = over_time(core, 0.0, 7.0, until_taken(5.0))
    assert new_ids(events) == TEXT[3:10]
    assert not any(isinstance(event, RequestFailed) for event in events)


def test_brokers_that_name_each_other_are_not_asked_without_end():
    core = running_at(A)
    core.receive(Moved(job_id=7, address=B), 0.5, A)
    for number in range(20):
        to, address = (B, A) if number % 2 == 0 else (A, B)
        core.receive(Moved(job_id=7, address=address), 0.5, to)
    assert len(core.take_outbox()) == MOST_HOPS
    out, events = over_time(core, 0.5, 8.0, lambda to, message, now: [Moved(job_id=7, address=A if to == B else B)])
    assert len(out) <= 8 * (MOST_HOPS + 1)
    out, (failed,) = over_time(core, 8.0, 20.0, lambda to, message, now: [Moved(job_id=7, address=A if to == B else B)])
    assert (events, failed.error.code) == ([], "lost")


# --- two brokers answer -------------------------------------------------------------------------------------------


def test_a_former_holder_that_answers_late_does_no_harm():
    """Each token counts once. Its refusals do not count, the tokens that it has may come first."""
    core = running_at(A)
    core.receive(Moved(job_id=7, address=B), 0.5, A)
    events = core.receive(tokens(7, 2, TEXT[2:6]), 0.6, A)
    events += core.receive(tokens(7, 3, TEXT[3:8]), 0.7, B)
    events += core.receive(tokens(7, 3, TEXT[3:8]), 0.7, B)
    for code in ("busy", "unknown", "engine"):
        events += core.receive(Failed(job_id=7, code=code, reason="late"), 0.8, A)
    events += core.receive(tokens(7, 8, [], "length"), 0.9, B)
    events += core.receive(tokens(7, 8, [], "length"), 0.9, A)
    assert new_ids(events) == TEXT[3:8]
    assert [type(event) for event in events if not isinstance(event, NewTokens)] == [JobDone]


def test_two_brokers_that_tell_two_stories():
    core = running_at(A)
    core.receive(Moved(job_id=7, address=B), 0.5, A)
    (failed,) = core.receive(tokens(7, 1, [99, 98]), 0.6, B)
    assert failed.error.code == "lost"


def test_a_job_is_where_its_tokens_come_from():
    core = running_at(A)
    core.receive(tokens(7, 3, TEXT[3:5]), 0.5, B)
    core.cancel(7, 0.6)
    assert sent(core) == [(B, Cancel, None)]


# --- cancelled ----------------------------------------------------------------------------------------------------


def test_cancel_follows_a_job_that_nobody_waits_for():
    """Once a try, and not where it was sent already."""
    core = running_at(A)
    core.abandon(7, 1.0)
    assert sent(core) == [(A, Cancel, None)]
    for number in range(6):
        core.receive(Moved(job_id=7, address=(B, A)[number % 2]), 1.1, (A, B)[number % 2])
    assert sent(core) == [(B, Cancel, None)]
    core.receive(tokens(7, 3, [], "cancelled"), 1.2, B)
    assert core.idle


@each("dead", [A, B])
def test_cancel_of_a_job_whose_broker_died(dead):
    """It reaches the next holder."""
    taker = B if dead == A else A
    core = running_at(dead)
    core.abandon(7, 0.0)
    core.take_outbox()

    def answer(to, message, now):
        if to == dead:
            return []
        return [Moved(job_id=7, address=dead)] if now < 3.5 else [tokens(7, 3, [], "cancelled")]

    out, _ = over_time(core, 0.0, 12.0, answer)
    assert [to for now, to, *_ in out if now >= 3.5][-1] == taker
    assert len(out) <= 3 * MAX_TRIES
    assert core.idle


def test_the_end_of_a_job_ends_its_cancel():
    """A refusal is no end."""
    core = running_at(A)
    core.cancel(7, 0.5)
    core.receive(STOPS, 0.6, A)
    core.take_outbox()
    out, _ = over_time(core, 0.6, 1.0)
    assert Cancel in [kind for _, _, kind, _ in out]
    (failed,) = core.receive(Failed(job_id=7, code="deadline", reason="too late"), 1.1, core.brokers.place(7))
    assert (failed.error.code, core.idle) == ("deadline", True)


def test_a_refusal_elsewhere_does_not_end_a_cancel():
    core = running_at(A)
    core.cancel(7, 0.5)
    core.take_outbox()
    core.receive(STOPS, 0.6, B)
    core.receive(replace(STOPS, code="unknown"), 0.6, B)
    out, _ = over_time(core, 0.6, 2.0)
    assert (A, Cancel) in [(to, kind) for _, to, kind, _ in out]


# --- refused ------------------------------------------------------------------------------------------------------


@each("refusal", [NONE, STOPS])
@pytest.mark.parametrize("detached", [False, True])
def test_what_one_broker_refuses_is_asked_of_the_next(refusal, detached):
    """And later jobs go there at once."""
    core = new_core(A, B, C)
    if detached:
        core.submit_detached(job_of(7), 0.0)
    else:
        core.submit(job_of(7), 0.0)
    assert core.receive(refusal, 0.1, A) == core.receive(refusal, 0.2, B) == []
    assert sent(core) == [(A, Submit, 0), (B, Submit, 0), (C, Submit, 0)]
    core.receive(Accepted(job_id=7), 0.3, C)
    core.submit(job_of(8), 0.4)
    assert sent(core) == [(C, Submit, 0)]


@each("refusal", [NONE, STOPS])
def test_what_all_brokers_refuse_fails(refusal):
    """Each is asked once. Other refusals count at once."""
    core = new_core()
    core.submit(job_of(7), 0.0)
    assert core.receive(refusal, 0.1, A) == []
    (failed,) = core.receive(refusal, 0.2, B)
    assert (failed.error.code, str(failed.error)) == (refusal.code, refusal.reason)
    assert len(core.take_outbox()) == 2
    core.submit(job_of(7), 1.0)
    (failed,) = core.receive(replace(refusal, code="conflict"), 1.1, core.brokers.place(7))
    assert failed.error.code == "conflict"


def test_a_running_job_outlives_refusals():
    """Another broker cannot look it up while the journal is away: the job goes on all the same."""
    core = running_at(A)
    busy = replace(STOPS, reason="the journal is busy")
    out, events = over_time(core, 0.0, 40.0, lambda to, message, now: [busy] if to == B else [])
    assert events == []
    assert len(out) <= 120
    assert new_ids(core.receive(tokens(7, 3, TEXT[3:5]), 40.1, B)) == TEXT[3:5]


@each("away_until", [4.0, 100.0])
def test_a_first_look_at_a_job_outlasts_a_journal_that_is_away(away_until):
    """It is repeated for the client's time limit. Then it fails with the broker's reason."""
    core = new_core(timeout_s=10.0)
    core.find(7, 0.0, until_end=True)
    busy = replace(STOPS, reason="the journal is busy")

    def answer(to, message, now):
        return [busy] if now < away_until else [info(ended=True), tokens(7, 0, TEXT, "stop")]

    _, events = over_time(core, 0.0, 8.0, answer)
    if away_until < 8:
        assert [event.transcript.token_ids for event in events if isinstance(event, FoundJob)] == [TEXT]
        return
    assert events == []
    _, (found,) = over_time(core, 8.0, 15.0, answer)
    assert str(found.error) == "the journal is busy"


def test_a_tokenizer_comes_from_a_broker_with_a_verifier():
    """Pieces of two brokers are not mixed."""
    core = new_core()
    core.fetch_tokenizer("", 0.0)
    assert core.receive(replace(NONE, job_id=0), 0.1, A) == []
    first, second = chunks(b'{"a"', b':"b"}')
    assert core.receive(second, 0.2, A) == core.receive(first, 0.2, B) == []
    (ready,) = core.receive(second, 0.3, B)
    assert (ready.files, ready.model) == ({"a": "b"}, INFO)
    core.submit(job_of(7), 0.4)
    assert sent(core)[-1] == (B, Submit, 0)


def test_slow_brokers_answer_all_the_same():
    """Each takes longer than the client waits before it asks the next one. The first answer counts, and the reason."""
    core = new_core()
    core.fetch_tokenizer("", 0.0)
    core.submit(job_of(7), 0.0)
    core.submit(job_of(8), 0.0)
    core.take_outbox()
    over_time(core, 0.0, 1.2)  # B is asked
    first, second = chunks(b'{"a"', b':"b"}')
    other_first, other_second = chunks(b'{"c"', b':"d"}')
    assert core.receive(first, 1.3, A) == core.receive(other_second, 1.4, B) == []
    (ready,) = core.receive(second, 1.5, A)
    assert ready.files == {"a": "b"}
    assert core.receive(other_first, 1.5, B) == []
    (failed,) = core.receive(Failed(job_id=7, code="invalid", reason="no such model"), 1.6, A)
    assert (failed.key, failed.error.code) == (7, "invalid")
    core.take_outbox()
    assert core.receive(replace(STOPS, job_id=8), 1.6, A) == core.take_outbox() == []
    core.receive(Accepted(job_id=8), 1.7, B)
    assert core.receive(Failed(job_id=8, code="invalid", reason="late"), 1.8, A) == []


def test_a_list_that_was_refused_is_not_doubled():
    core = new_core()
    core.list_jobs(5, 0, 0.0)
    (failed,) = core.receive(Failed(job_id=0, code="forbidden", reason="no"), 0.1, A)
    assert (failed.key, core.receive(Failed(job_id=0, code="forbidden", reason="no"), 0.2, B)) == (LISTING, [])


# --- what only one of them can do, or knows ------------------------------------------------------------------------


def test_each_current_broker_is_asked_about_grammars():
    """The report of another one says nothing about it."""
    new, old, grammar = Status(report=NEW), Status(report={}), a_job(7)
    core = new_core()
    core.submit(grammar, 0.0)
    assert core.receive(new, 0.1, B) == []
    assert core.receive(Moved(job_id=7, address=B), 0.1, A) == []
    assert sent(core) == [(A, GetStatus, None)]
    core.receive(new, 0.2, A)
    assert sent(core) == [(A, Submit, 0)]
    assert core.receive(old, 0.3, B) == []
    core.submit(a_job(8), 0.4)
    assert sent(core) == [(A, Submit, 0)]
    core.receive(old, 2.0, B)  # A has been silent, so B is the current one
    core.submit(a_job(9), 2.1)
    assert sent(core) == [(B, GetStatus, None)]
    (failed,) = core.receive(old, 2.2, B)
    assert f"the broker at {B} is too old for a grammar" in str(failed.error)


def test_the_events_of_a_traced_job_go_to_its_broker():
    """With the times of that broker's clock; also those of the time before the job moved there."""
    core = new_core()
    core.submit(replace(job_of(7), trace=True), 0.0)
    core.submit(replace(job_of(8), trace=True), 0.0)
    core.take_outbox()
    core.receive(Moved(job_id=8, address=B), 0.2, A)
    found = []

    def answer(to, message, now):
        if isinstance(message, TraceEvents):
            found.append((to, message.job_id, *message.kinds.tolist()))
        if isinstance(message, GetClock):
            return [Clock(echo_us=message.sent_us, clock_us=message.sent_us + (10**9 if to == B else 0))]
        return [Accepted(job_id=message.job_id)] if isinstance(message, Submit) else []

    over_time(core, 0.2, 3.0, answer)
    core.abandon_all(3.0)
    over_time(core, 3.0, 5.0, answer)
    kinds = [kind.number for kind in (trace_events.SUBMITTED, trace_events.ACCEPTED)]
    assert {(A, 7, *kinds), (B, 8, *kinds)} <= {one[:4] for one in found}
    assert {(to, job_id) for to, job_id, *_ in found} == {(A, 7), (B, 8)}
    offsets = core.tracing.tracer.offsets
    assert offsets[B].offset_us - offsets[A].offset_us > 10**8
    assert not core.tracing.tracer.is_on


# --- addresses ----------------------------------------------------------------------------------------------------


@each("address", ["", "nonsense", "tcp://h", "tcp://*:5750", "tcp://h:*", "http://h:1", "tcp://h:1 x", "inproc://x"])
def test_an_address_that_is_none_is_ignored_and_counted(address):
    core = running_at(A)
    core.receive(Moved(job_id=7, address=address), 0.5, A)
    assert (sent(core), core.brokers.num_bad_addresses) == ([], 1)
    assert address not in core.brokers


def test_only_addresses_of_own_jobs_are_learnt():
    core = running_at(A)
    core.receive(Moved(job_id=99, address=C), 0.5, A)
    assert C not in core.brokers
    assert sent(core) == []


def test_a_forgotten_broker_gets_nothing():
    known = KnownBrokers((A, B), 1.0)
    known.put(7, C)
    known.note_heard(C, 1.0)
    assert (known.place(7), known.heard, known.heard_from(C)) == (A, 1.0, None)


def test_the_number_of_brokers_is_bounded():
    """The caller's own stay, and so does the current one."""
    known = KnownBrokers((A, B), 1.0)
    for number in range(3 * MOST_BROKERS):
        assert known.learn(f"tcp://host:{number + 1}")
        known.put(7, f"tcp://host:{number + 1}")
        known.note_asked(known.place(7), float(number))
        known.note_heard(known.place(7), float(number))
    assert sum(f"tcp://host:{number + 1}" in known for number in range(3 * MOST_BROKERS)) == MOST_BROKERS - 2
    assert {A, B, known.current, f"tcp://host:{3 * MOST_BROKERS}"} <= set(known.silent(1e9)) | {A, B, known.place(7)}


# --- a bad network ------------------------------------------------------------------------------------------------


class Cluster:
    """Brokers on one journal, behind a network that loses, doubles and delays. They die, freeze and come back.

    A frozen broker does not know that its job was taken, and goes on with the tokens that it had.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.up = dict.fromkeys((A, B, C, D), True)
        self.holder, self.lease, self.length = "", 0.0, 0
        self.readers: dict[str, int] = {}  # broker -> how many tokens it has sent to the client
        self.told: set[str] = set()  # brokers that have sent the end
        self.frozen: dict[str, int] = {}  # broker -> tokens that it had when it froze

    def live(self, now: float) -> None:
        chance = self.random.random()
        name = self.random.choice(list(self.up))
        if chance < 0.01 and sum(self.up.values()) > 1:
            self.up[name] = False
        elif chance < 0.03 and not self.up[name]:
            self.up[name] = True
            if self.random.random() < 0.5:
                self.readers.pop(name, None)
            else:
                self.frozen[name] = self.length
        if self.holder and self.up[self.holder]:
            self.lease = now + 3.0
            self.length = min(len(TEXT), self.length + (self.random.random() < 0.1))
        elif self.holder and now > self.lease + 1.0:
            self.holder = self.random.choice([one for one, is_up in self.up.items() if is_up])

    def take(self, to: str, message) -> None:
        if not self.up[to] or not isinstance(message, Submit) or self.random.random() < 0.3:
            return
        if not self.holder:
            self.holder, self.lease = to, self.now + 3.0
        if self.holder != to and to not in self.frozen:
            if self.now < self.lease:
                self.replies.append((to, Moved(job_id=7, address=self.holder)))
            return
        self.readers[to] = min(message.have, self.length)
        self.told.discard(to)
        self.replies.append((to, Accepted(job_id=7)))

    def step(self, sent: list, now: float) -> list:
        """Take the client's messages, and return (sender, message) for those that go to it."""
        self.replies: list = []
        self.now = now
        self.live(now)
        for to, message in sent:
            self.take(to, message)
        for name, start in list(self.readers.items()):
            end = self.frozen.get(name, self.length)
            is_end = end == len(TEXT) and name == self.holder
            is_new = start < end or (is_end and name not in self.told)
            if self.up[name] and (name == self.holder or name in self.frozen) and is_new:
                self.told |= {name} if is_end else set()
                self.replies.append((name, tokens(7, start, TEXT[start:end], "length" if is_end else "")))
                self.readers[name] = end
        if self.random.random() < 0.05:
            self.frozen.clear()
        return [reply for reply in self.replies for _ in range(self.random.choice([0, 1, 1, 2]))]


@each("seed", range(60))
def test_any_cluster_gives_the_same_text(seed):
    """Each token once, in order, and the end; with few messages."""
    core = new_core(*(A, B, C)[: 1 + seed % 3], timeout_s=1000.0)
    core.submit(job_of(7), 0.0)
    cluster, delayed, events, now, num_sent = Cluster(seed), [], [], 0.0, 0
    while not any(isinstance(event, JobDone) for event in events):
        now += 0.05
        assert now < 600, "the job never ended"
        events += core.tick(now)
        out = core.take_addressed()
        num_sent += len(out)
        delayed += cluster.step(out, now)
        if cluster.random.random() < 0.2:
            cluster.random.shuffle(delayed)
        while delayed and cluster.random.random() < 0.7:
            sender, message = delayed.pop(0)
            events += core.receive(message, now, sender)
    assert new_ids(events) == TEXT
    assert not any(isinstance(event, RequestFailed) for event in events)
    assert num_sent <= 5 * now + 10


def test_status_of_the_first_that_answers():
    core = new_core()
    core.get_status(0.0)
    out, events = over_time(core, 0.0, 1.5, lambda to, message, now: [Status(report={"at": to})] if to == B else [])
    assert [event.report for event in events if event.key == STATUS] == [{"at": B}]
    assert [to for _, to, *_ in out] == [A, B]


def test_it_returns_to_the_first_broker():
    """So clients are spread again after all brokers were restarted. New requests go there; jobs stay where they are."""
    core = running_at(A)
    status = [Status(report={})]
    over_time(core, 0.0, 30.0, lambda to, _message, _now: status if to == B else [])
    assert core.brokers.current == B
    core.submit(job_of(8), 30.0)
    core.receive(Accepted(job_id=8), 30.0, B)
    core.take_outbox()
    asked, _ = over_time(core, 30.0, 60.0, lambda to, _message, now: status if to == B or now > 50 else [])
    times = [now for now, to, kind, _ in asked if (to, kind) == (A, GetStatus)]
    assert [round(b - a) for a, b in pairwise(times)] == [LOOK_S] * (len(times) - 1)
    assert (core.brokers.current, core.brokers.place(8)) == (A, B)
    core.submit(job_of(9), 60.0)
    assert (A, Submit, 0) in sent(core)


def test_the_first_broker_is_not_asked_without_need():
    """Not while it is the current one."""
    core = running_at(A)
    asked, _ = over_time(core, 0.0, 60.0, lambda to, _message, _now: [Accepted(job_id=7)] if to == A else [])
    assert [kind for _, to, kind, _ in asked if kind == GetStatus] == []
