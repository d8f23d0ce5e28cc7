"""Which message answers which request, and how many jobs are unanswered at a time."""

import numpy as np

from specq.client.core import STATUS, TOKENIZER, ClientCore
from specq.client.pending import MAX_UNANSWERED
from specq.protocol.messages import Accepted, Cancel, Submit
from specq.protocol.params import SamplingParams
from tests.client.cores import make_core
from tests.each import each


def submit_job(core: ClientCore, job_id: int, now: float) -> None:
    core.submit(Submit(job_id=job_id, params=SamplingParams(), prompt_ids=np.array([1], np.int32)), now)


def test_other_traffic_does_not_answer_for_a_job():
    """A Submit that is never answered is given up in time, whatever the broker says of others; one it took waits on."""
    core, _ = make_core(timeout_s=3.0)
    submit_job(core, 8, 0.0)
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
    """Only so many are unanswered at a time, and none of the others is given up meanwhile."""
    core, count = ClientCore("", 3.0), 3 * MAX_UNANSWERED
    for job_id in range(1, count + 1):
        submit_job(core, job_id, 0.0)
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
def test_a_silent_broker_is_told_of_to_all_at_once(heard):
    """Those that wait for their turn, too; none of them twice."""
    core, count = ClientCore("tcp://somewhere:1", 3.0), 5 * MAX_UNANSWERED
    for job_id in range(1, count + 1):
        submit_job(core, job_id, 0.0)
    if heard is not None:
        core.receive(Accepted(job_id=1), heard)
    assert core.tick(2.9) == []
    events = core.tick(3.6)
    assert sorted(event.key for event in events) == list(range(1, count + 1))
    assert {event.error.code for event in events} == {"lost" if heard else "no_broker"}
    assert core.idle


def test_a_broker_that_answers_others_ends_only_what_it_does_not_answer():
    core, count = ClientCore("tcp://somewhere:1", 3.0), MAX_UNANSWERED + 5
    for job_id in range(1, count + 1):
        submit_job(core, job_id, 0.0)
    core.get_status(2.0)
    core.receive(Accepted(job_id=1), 2.5)
    events = core.tick(3.5)
    assert sorted(event.key for event in events) == list(range(2, MAX_UNANSWERED + 1))
    assert not core.idle


def test_a_job_that_waits_its_turn_can_be_stopped():
    """Given up it was never sent; cancelled it is sent and stopped, so that its end is known."""
    core = ClientCore("", 3.0)
    for job_id in range(1, MAX_UNANSWERED + 3):
        submit_job(core, job_id, 0.0)
    core.take_outbox()
    core.abandon(MAX_UNANSWERED + 1, 0.1)
    assert core.take_outbox() == []
    core.cancel(MAX_UNANSWERED + 2, 0.1)
    assert [type(message) for message in core.take_outbox()] == [Submit, Cancel]
