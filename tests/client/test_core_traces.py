"""What a client notes of a traced job ends with the job, in whatever way that ends."""

from dataclasses import replace

from specq.client.core import ClientCore
from specq.client.events import RequestFailed
from specq.protocol import Accepted, Clock, GetClock, TraceEvents, trace_events
from tests.client.cores import make_core
from tests.each import each


def traced(*, keep_running: bool = False) -> ClientCore:
    """Return a core whose job 7 is traced and taken, with a broker that has told its time."""
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
def test_a_job_that_nobody_waits_for_any_more(keep_running):
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
