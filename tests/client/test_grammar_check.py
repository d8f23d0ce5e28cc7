"""Jobs with a grammar wait until the broker is known to pass it on. The broker is asked once, and only for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specq.client import Client
from specq.client.core import ClientCore
from specq.client.events import JobDone, RequestFailed, StatusReport
from specq.client.grammar_check import CAPABILITIES, RECHECK_S
from specq.client.inquiries import STATUS
from specq.protocol import (
    BROKER_CAPABILITIES,
    Accepted,
    Cancel,
    Failed,
    GetStatus,
    JobError,
    Message,
    SamplingParams,
    Status,
    Submit,
)
from specq.protocol import CAPABILITIES as OF_WORKERS
from specq.protocol.grammars import grammar_text
from specq.testing.fake_broker import FakeBroker, answer, tokens
from tests.each import each

OLDER: list[dict[str, Any]] = [{}, {"capabilities": list(OF_WORKERS)}, {"capabilities": "all"}, {"capabilities": [1]}]
NEW = {"capabilities": list(BROKER_CAPABILITIES)}


def a_job(job_id: int, grammar: Any = None) -> Submit:
    params = SamplingParams(max_tokens=20, grammar=grammar_text(grammar or {"regex": "[0-9]+"}))
    return Submit(job_id=job_id, params=params, prompt_ids=np.array([1, 2], np.int32))


def plain_job(job_id: int) -> Submit:
    return Submit(job_id=job_id, params=SamplingParams(), prompt_ids=np.array([1, 2], np.int32))


def sent(core: ClientCore) -> list[int | str]:
    """Return what is sent now: the ids of jobs, and "?" for the question."""
    return [
        message.job_id if isinstance(message, Submit) else "?" if isinstance(message, GetStatus) else message.TYPE
        for message in core.take_outbox()
    ]


def new_core(timeout_s: float = 10.0) -> ClientCore:
    return ClientCore("tcp://somewhere:1", timeout_s)


def test_the_broker_is_asked_once_before_the_first_grammar() -> None:
    """Jobs without a grammar go at once, and cause no question."""
    core = new_core()
    core.submit(plain_job(1), 0.0)
    assert sent(core) == [1]
    for job_id in (2, 3):
        assert core.submit(a_job(job_id), 0.0) == []
    assert core.submit_detached(a_job(4), 0.0) == []
    assert sent(core) == ["?"]
    assert core.receive(Status(report=NEW), 0.1) == []
    assert sent(core) == [2, 3, 4]
    core.submit(a_job(5), 0.2)
    assert sent(core) == [5]
    assert [type(event) for event in core.receive(tokens(5, 0, [9], "stop"), 0.3)][-1] is JobDone


@each("report", OLDER)
def test_a_job_goes_to_no_broker_that_is_too_old(report: dict[str, Any]) -> None:
    """It fails with the field and the reason. Other jobs are not affected."""
    core = new_core()
    core.submit(a_job(1), 0.0)
    core.submit(plain_job(2), 0.0)
    (failed,) = core.receive(Status(report=report), 0.1)
    assert isinstance(failed, RequestFailed)
    assert (failed.key, failed.error.code, failed.error.field) == (1, "invalid", "grammar")
    assert "the broker at tcp://somewhere:1 is too old for a grammar of the kind regex" in str(failed.error)
    assert sent(core) == ["?", 2]
    again = [*core.submit(a_job(1), 0.2), *core.submit_detached(a_job(1), 0.2)]
    assert [str(one.error) for one in again] == 2 * [str(failed.error)]
    core.receive(tokens(2, 0, [9], "stop"), 0.3)
    assert core.idle


def test_a_broker_may_know_some_kinds_only() -> None:
    core = new_core()
    core.submit(a_job(1), 0.0)
    core.submit(a_job(2, {"lark": 'start: "a"'}), 0.0)
    (failed,) = core.receive(Status(report={"capabilities": ["grammar/3/regex", "grammar/3/later"]}), 0.1)
    assert "of the kind lark; it knows regex." in str(failed.error)
    assert sent(core) == ["?", 1]


def test_a_broker_that_was_upgraded_is_asked_again() -> None:
    """Some seconds later, not for each job."""
    core = new_core()
    core.submit(a_job(1), 0.0)
    core.receive(Status(report={}), 0.0)
    sent(core)
    core.submit(a_job(2), RECHECK_S - 1)
    assert sent(core) == []
    core.submit(a_job(3), RECHECK_S)
    assert sent(core) == ["?"]
    core.receive(Status(report=NEW), RECHECK_S)
    assert sent(core) == [3]


def test_a_lost_question_is_repeated_and_an_unanswered_one_fails_the_jobs() -> None:
    """The reason is that of any request; the broker answers others meanwhile, or nothing."""
    for answers_others in (True, False):
        core, failed, asked = new_core(timeout_s=3.0), list[Any](), 0
        core.submit(a_job(1), 0.0)
        core.submit_detached(a_job(2), 0.0)
        core.submit(plain_job(3), 0.0)
        for tenth in range(1, 40):
            if answers_others:
                core.receive(Accepted(job_id=3), tenth / 10)
            failed += core.tick(tenth / 10)
            asked += sent(core).count("?")
        code = "lost" if answers_others else "no_broker"
        assert {one.key: one.error.code for one in failed if one.key != 3} == {1: code, 2: code, CAPABILITIES: code}
        assert asked > 2


def test_a_job_that_waits_for_the_answer_can_be_joined_cancelled_and_abandoned() -> None:
    core = new_core()
    for job_id in (1, 2, 3):
        core.submit(a_job(job_id), 0.0)
    assert core.submit(a_job(1), 0.0) == []
    core.cancel(2, 0.0)
    core.abandon(3, 0.0)
    assert sent(core) == ["?", "cancel"]
    core.receive(Status(report=NEW), 0.1)
    assert sent(core) == [1, 2]
    core.tick(1.0)
    assert Cancel(job_id=2) in core.take_outbox()
    (end,) = core.receive(tokens(2, 0, [], "cancelled"), 1.1)
    assert isinstance(end, JobDone)


def test_the_question_answers_for_no_report_of_sessions() -> None:
    """A caller who asked for the busiest sessions gets the report that has them."""
    core = new_core()
    core.get_status(0.0, 5)
    core.submit(a_job(1), 0.0)
    assert core.receive(Status(report=NEW), 0.1) == []
    (report,) = core.receive(Status(report=NEW | {"sessions": {}}), 0.2)
    assert isinstance(report, StatusReport)
    assert report.key == STATUS
    assert sent(core) == ["?", "?", 1]


def test_a_broker_that_was_replaced_by_an_older_one() -> None:
    """It refuses the job as a whole, and the client says why."""
    core = new_core()
    core.submit(a_job(1), 0.0)
    core.receive(Status(report=NEW), 0.0)
    reason = "the broker cannot read this submit: submit.params: unknown sampling parameter 'grammar'; known: seed"
    (failed,) = core.receive(Failed(job_id=1, code="invalid", reason=reason), 0.1)
    assert str(failed.error) == f"the broker at tcp://somewhere:1 is older than grammar: {reason}"


# --- over sockets -----------------------------------------------------------------------------------------------------


def test_a_client_asks_once_and_submits(own_cache: None) -> None:
    """The grammar is an object, or its JSON text. The order of its keys is kept."""
    with FakeBroker() as broker, Client(broker.address) as client:
        for grammar in ({"json_schema": {"b": {}, "a": {}}}, '{"json_schema": {"b": {}, "a": {}}}'):
            assert client.generate("hello", grammar=grammar).finish_reason == "stop"
        jobs, questions = broker.wait_for(Submit, 2), broker.num_heard(GetStatus)
    assert questions == 1
    assert {job.params.grammar for job in jobs} == {'{"json_schema":{"b":{},"a":{}}}'}


def test_an_older_broker_over_sockets(own_cache: None) -> None:
    """It never receives the job. A wrong grammar is refused before anything is asked."""

    def before(message: Message) -> Any:
        return [Status(report={"models": ["fake"]})] if isinstance(message, GetStatus) else answer(message)

    with FakeBroker(before) as broker, Client(broker.address) as client:
        with pytest.raises(JobError, match="grammar has 'schema', but must have exactly one of json_object"):
            client.generate("hello", grammar={"schema": {}})
        assert broker.num_heard(GetStatus) == 0
        with pytest.raises(JobError, match="too old for a grammar of the kind json_object") as caught:
            client.generate("hello", grammar={"json_object": True})
        assert caught.value.field == "grammar"
        assert client.generate("hello").text
        assert [job.params.grammar for job in broker.wait_for(Submit)] == [""]
