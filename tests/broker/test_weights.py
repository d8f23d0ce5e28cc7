"""Jobs whose weights no verifier serves fail after a while with the reason. Jobs of older journals find theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specq.broker import Broker, Effect, Send, Write
from specq.broker.state.job import BrokerJob, Requirements
from specq.journal import JobBound, JobEnded, JobTaken, Opening, TokensAdded, open_journal
from specq.protocol.messages import Hello, Open, Submit
from specq.protocol.params import SamplingParams
from specq.protocol.wire import decode, encode
from specq.testing.toy import toy_info
from tests.broker.desk import Desk, desk_with

WAIT_S = 600.0
OLD = "of the tensors alone"


def wait(desk: Desk, seconds: float) -> None:
    """Let time pass, while the verifiers that there are beat."""
    for _ in range(int(seconds)):
        desk.now += 1.0
        for worker in desk.broker.state.workers.all():
            desk.beat(worker.identity)
        desk.take(desk.broker.tick(desk.now))


def begun(**options: object) -> tuple[Desk, BrokerJob]:
    """Return a broker whose only verifier has left in the midst of a text."""
    desk = desk_with(1, **options)
    desk.verdict(1, 7)
    desk.leave()
    return desk, desk.job(1)


def test_a_job_whose_weights_are_gone_fails() -> None:
    """After the stated time, though its model is served; the reason names what is missing and what there is."""
    desk, job = begun()
    desk.hello(b"other", fingerprint="0123456789abcdef")
    wait(desk, WAIT_S - 2)
    assert not job.transcript.finish
    wait(desk, 4)
    assert (job.transcript.finish, job.transcript.failure.code, job.transcript.token_ids) == ("error", "engine", [7])
    assert "of the model toy with the weights toy int" in job.transcript.failure.reason
    assert "served: toy with 0123456789ab int" in job.transcript.failure.reason


def test_a_job_whose_model_is_gone_fails() -> None:
    """Also one that has no token yet."""
    desk = desk_with(1)
    job = desk.job(1)
    desk.leave()
    wait(desk, WAIT_S + 2)
    assert (
        job.transcript.failure.reason
        == "no verifier of the model toy was available for 600 s (weights_wait_seconds); none is served"
    )


def test_weights_that_come_back_in_time_go_on() -> None:
    """The time begins anew when they go again."""
    desk, job = begun()
    for name in (b"second", b"third"):
        wait(desk, WAIT_S - 5)
        desk.hello(name)
        wait(desk, 3)
        assert job.session.verifier == name
        desk.leave(name)
    assert not job.transcript.finish


def test_a_job_that_waits_for_room_is_patient() -> None:
    """Its weights are there, if busy."""
    desk = Desk(max_sessions=1)
    desk.submit(1, max_tokens=500)
    desk.submit(2)
    wait(desk, 2 * WAIT_S)
    assert [bool(job.transcript.finish) for job in desk.broker.state.jobs.active.values()] == [False, False]


@pytest.mark.parametrize(("seconds", "finish"), [(0.0, ""), (30.0, "error")])
def test_the_time_is_an_option(seconds: float, finish: str) -> None:
    """0: for ever."""
    desk, job = begun(weights_wait_s=seconds)
    wait(desk, 100)
    assert job.transcript.finish == finish
    wait(desk, WAIT_S * (not finish))
    assert job.transcript.finish == finish


# --- journals from before the fingerprint covered more than the tensors -----------------------------------------------


def hello(broker: Broker, identity: bytes, **model: object) -> list[Effect]:
    info = replace(toy_info(), **model)
    message = Hello(role="target", name="v", incarnation=1, model=info, endpoint="x", max_sessions=8)
    return broker.from_front(identity, encode(message), 0.0)


def opened(effects: list[Effect]) -> list[Open]:
    messages = [decode(effect.frames) for effect in effects if isinstance(effect, Send)]
    return [message for message in messages if isinstance(message, Open)]


def test_a_stored_job_with_a_former_fingerprint_goes_on(tmp_path: Path) -> None:
    """On the verifier whose former one it is, and on no other; from then on it is bound to all that its text depends
    on."""
    journal = open_journal(str(tmp_path / "journal"), Opening())
    submit = Submit(job_id=1, model="toy", params=SamplingParams(max_tokens=9), prompt_ids=np.array([5], np.int32))
    tokens = np.array([7, 8], "<i4").tobytes()
    journal.write(
        [JobTaken(submit, "", 1.0, 0.0), JobBound(1, f"{OLD} int"), TokensAdded(1, 0, tokens, b"\0\0", b"", 0)]
    )
    broker = Broker(incarnation=1, has_journal=True)
    broker.restore(journal.unfinished(), 0.0)
    assert opened(hello(broker, b"another", fingerprint="new 1", former_fingerprint="other tensors")) == []
    assert opened(hello(broker, b"format", fingerprint="new 2", former_fingerprint=OLD, dtype="half")) == []
    effects = hello(broker, b"same", fingerprint="new 3", former_fingerprint=OLD)
    assert [message.token_ids.tolist() for message in opened(effects)] == [[5, 7, 8]]
    records = [effect.record for effect in effects if isinstance(effect, Write)]
    assert records == [JobBound(1, "new 3 int", placed=1)]
    journal.write(records)
    (stored,) = journal.unfinished()
    assert (stored.weights, stored.num_tokens) == ("new 3 int", 2)
    journal.write([JobEnded(1, "stop", "", "", {}, 2.0, tokens, b"\0\0", b"")])
    journal.close()


def test_a_model_without_a_former_fingerprint_has_no_former_jobs() -> None:
    """An empty one matches nothing."""
    desk = Desk()
    (worker,) = desk.broker.state.workers.all()
    assert [worker.serves(Requirements("toy", weights)) for weights in ("", "toy int", " int", "int")] == [
        True,
        True,
        False,
        False,
    ]


def test_a_text_that_began_under_other_ends_keeps_its_binding() -> None:
    """Each verifier that takes it is asked to leave out the new ends."""
    desk, ends = Desk(), {"former_fingerprint": "toy", "added_eos_ids": (5,)}
    desk.submit(1)
    desk.verdict(1, 7)
    desk.leave()
    job = desk.job(1)
    for number, name in enumerate((b"first", b"second")):
        effects = hello(desk.broker, name, fingerprint=f"new {number}", **ends)
        assert [(message.former_ends, message.token_ids.tolist()[-1]) for message in opened(effects)] == [(True, 7)]
        assert (job.session.verifier, job.session.weights) == (name, "toy int")
        desk.leave(name)
    (fresh,) = opened(hello(desk.broker, b"own", fingerprint="toy", added_eos_ids=(5,)))
    assert not fresh.former_ends, "the same weights have the same ends"


# --- kernels ----------------------------------------------------------------------------------------------------------


def test_a_text_goes_on_only_where_the_same_kernels_compute() -> None:
    """Others round differently, which may decide a near-tie."""
    desk, job = begun()
    desk.hello(b"compiled", arithmetic="native cpu")
    desk.submit(2)
    desk.leave(b"compiled")
    assert job.session.weights == "toy int native cpu", "weights from before kernels counted are those of any"
    desk.hello(b"portable", arithmetic="torch cpu")
    assert not job.session.verifier
    desk.hello(b"again", arithmetic="native cpu")
    assert job.session.verifier == b"again"
    desk.leave(b"again")
    wait(desk, WAIT_S + 2)
    reason = job.transcript.failure.reason
    assert "with the weights toy int native cpu" in reason
    assert "toy with toy int torch cpu" in reason


def test_a_text_from_before_kernels_counted_is_not_continued_in_integers() -> None:
    """No version computed in integers then. It waits for a verifier that has its arithmetic."""
    desk, job = begun()
    desk.hello(b"integers", arithmetic="integer cpu")
    assert not job.session.verifier
    desk.hello(b"compiled", arithmetic="native cpu")
    assert job.session.verifier == b"compiled"
