"""Which message answers which request, how many jobs are unanswered at a time, and jobs that are stopped, given up or
traced."""

from dataclasses import replace

import numpy as np

from specq.client.core import ClientCore
from specq.client.events import RequestFailed
from specq.client.inquiries import STATUS, TOKENIZER
from specq.client.sending import MAX_TRIES, MAX_UNANSWERED
from specq.protocol import Accepted, Cancel, Clock, Failed, GetClock, Submit, TraceEvents, trace_events
from specq.testing.fake_broker import tokens
from tests.client.cores import TEXT, cancels, job_of, make_core
from tests.each import each


def submit_jobs(core: ClientCore, count: int) -> None:
    for job_id in range(1, count + 1):
        core.submit(job_of(job_id), 0.0)


def test_other_traffic_does_not_answer_for_a_job():
    """An unanswered Submit is given up in time, despite messages about other jobs. An accepted one keeps waiting."""
    core, _ = make_core(timeout_s=3.0)
    core.submit(job_of(8), 0.0)
    failed = []
    for tenth in range(1, 100):
        core.receive(Accepted(job_id=8), tenth / 10)
        failed += [(tenth / 10, event) for event in core.tick(tenth / 10)]
    ((when, event),) = failed
    assert (when, event.key, event.error.code) == (3.0, 7, "lost")
    assert "is there, but has not answered this for 3 s" in str(event.error)


@each("ask", [ClientCore.get_status, lambda core, now: core.fetch_tokenizer("", now)])
def test_other_traffic_does_not_answer_for_a_question(ask):
    """Neither for the state nor for the tokenizer."""
    core, _ = make_core(timeout_s=3.0)
    ask(core, 0.0)
    events = []
    for tenth in range(1, 40):
        core.receive(Accepted(job_id=7), tenth / 10)
        events += core.tick(tenth / 10)
    assert [(event.key in (STATUS, TOKENIZER), event.error.code) for event in events] == [(True, "lost")]


def test_jobs_wait_their_turn():
    """The number of unanswered jobs is limited. The others are not given up meanwhile."""
    core, count = ClientCore("", 3.0), 3 * MAX_UNANSWERED
    submit_jobs(core, count)
    sent, now = [message.job_id for message in core.take_outbox()], 0.0
    assert sent == list(range(1, MAX_UNANSWERED + 1))
    for job_id in range(1, count + 1):
        now += 0.01
        assert core.receive(Accepted(job_id=job_id), now) == core.tick(now) == []
        new = {message.job_id for message in core.take_outbox() if isinstance(message, Submit)} - set(sent)
        sent += sorted(new)
        assert len(new) <= 1
    assert sent == list(range(1, count + 1))
    assert now > 2 * core.timeout_s


@each("heard", [None, 0.5])
def test_all_jobs_learn_of_a_silent_broker_at_once(heard):
    """Those that wait for their turn, too; none of them twice."""
    core, count = ClientCore("tcp://somewhere:1", 3.0), 5 * MAX_UNANSWERED
    submit_jobs(core, count)
    if heard is not None:
        core.receive(Accepted(job_id=1), heard)
    assert core.tick(2.9) == []
    events = core.tick(3.6)
    assert sorted(event.key for event in events) == list(range(1, count + 1))
    assert {event.error.code for event in events} == {"lost" if heard else "no_broker"}
    assert core.idle


def test_a_broker_that_answers_others_ends_only_what_it_does_not_answer():
    core, count = ClientCore("tcp://somewhere:1", 3.0), MAX_UNANSWERED + 5
    submit_jobs(core, count)
    core.get_status(2.0)
    core.receive(Accepted(job_id=1), 2.5)
    events = core.tick(3.5)
    assert sorted(event.key for event in events) == list(range(2, MAX_UNANSWERED + 1))
    assert not core.idle


def test_a_job_that_waits_its_turn_can_be_stopped():
    """Given up it was never sent; cancelled it is sent and stopped, so that its end is known."""
    core = ClientCore("", 3.0)
    submit_jobs(core, MAX_UNANSWERED + 2)
    core.take_outbox()
    core.abandon(MAX_UNANSWERED + 1, 0.1)
    assert core.take_outbox() == []
    core.cancel(MAX_UNANSWERED + 2, 0.1)
    assert [type(message) for message in core.take_outbox()] == [Submit, Cancel]


def test_cancel():
    """The client asks the broker to cancel. The job ends with its tokens so far. So for another client's job."""
    core, job = make_core()
    core.cancel(8, 0.2)
    core.cancel(7, 0.2)
    assert core.take_outbox() == [job, Cancel(job_id=8), Cancel(job_id=7)]
    *_, done = core.receive(tokens(7, 0, TEXT[:2], "cancelled"), 0.3)
    assert (done.transcript.finish, done.transcript.token_ids) == ("cancelled", TEXT[:2])


def test_abandon():
    """An abandoned job is cancelled and forgotten."""
    core, job = make_core()
    core.abandon(7, 0.2)
    assert core.take_outbox() == [job, Cancel(job_id=7)]
    assert core.receive(tokens(7, 0, TEXT[:2], "cancelled"), 0.3) == []
    assert core.idle


def test_cancel_is_repeated_until_the_end():
    """A Cancel that is lost is sent again, ever more rarely, as long as somebody waits; then no more."""
    core, _ = make_core(timeout_s=100.0)
    core.receive(Accepted(job_id=7), 0.1)
    core.cancel(7, 0.2)
    core.take_outbox()
    gaps = np.diff([0.2, *cancels(core, 0.2, 40.0)])
    assert len(gaps) > MAX_TRIES
    assert list(gaps.round(3)) == sorted(gaps.round(3))
    core.receive(Failed(job_id=7, code="no_verifier", reason="a restarted broker"), 40.1)
    assert cancels(core, 40.1, 50.0)
    (done,) = core.receive(tokens(7, 0, [], "cancelled"), 50.1)
    assert done.transcript.finish == "cancelled"
    assert core.idle
    assert cancels(core, 50.1, 60.0) == []


def test_cancel_of_an_abandoned_job_is_repeated_for_a_while():
    """The end may never come, and no caller waits for it. When it comes, no more messages are sent."""
    core, _ = make_core()
    core.abandon(7, 0.2)
    core.take_outbox()
    assert not core.idle
    assert len(cancels(core, 0.2, 30.0)) == MAX_TRIES - 1
    assert core.idle
    core, _ = make_core()
    core.abandon(7, 0.2)
    assert core.receive(tokens(7, 0, TEXT[:2], "cancelled"), 0.3) == []
    core.take_outbox()
    assert cancels(core, 0.3, 30.0) == []


def test_a_job_that_is_wanted_again_is_not_stopped():
    """Who abandoned it submits it again under its id: its Cancel may have been lost, and is not repeated."""
    core, job = make_core(timeout_s=100.0)
    core.abandon(7, 0.2)
    core.submit(job, 0.3)
    core.take_outbox()
    assert cancels(core, 0.3, 20.0) == []


def traced(*, keep_running: bool = False) -> ClientCore:
    """Return a core whose job 7 is traced and taken, with a broker that has sent its time."""
    core, job = make_core()
    core.abandon(7, 0.0)
    core.take_outbox()
    core.submit(replace(job, trace=True), 0.0, keep_running=keep_running)
    for asked in core.take_outbox():
        if isinstance(asked, GetClock):
            core.receive(Clock(echo_us=asked.sent_us, clock_us=asked.sent_us), 0.1)
    core.receive(Accepted(job_id=7), 0.1)
    return core


def noted(core: ClientCore) -> list[int]:
    """Return the kinds of events that go out for job 7."""
    return [kind for one in core.take_outbox() if isinstance(one, TraceEvents) for kind in one.kinds.tolist()]


@each("keep_running", [False, True])
def test_an_abandoned_job_is_dropped(keep_running):
    """Also one that the broker goes on with."""
    core = traced(keep_running=keep_running)
    core.abandon(7, 1.0)
    assert noted(core)[-1] == trace_events.ENDED.number
    assert not core.tracing.tracer.is_on


def test_a_job_whose_broker_is_silent():
    core = traced()
    (failed,) = [event for tick in range(1, 200) for event in core.tick(tick / 10)]
    assert isinstance(failed, RequestFailed)
    assert noted(core)[-1] == trace_events.ENDED.number
    assert not core.tracing.tracer.is_on
