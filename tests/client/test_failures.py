"""What fails, and who is waited for, at both clients against a small broker over real TCP."""

import gc
import threading
import time

import pytest

from specq.client import Client
from specq.protocol import Cancel, ConfigError, Failed, FetchTokenizer, JobError, Submit
from specq.testing.fake_broker import ANSWER, answer


def test_no_broker(connect, free_address):
    """Without a broker at the address, an error with the address and what to start comes in time."""
    client = connect(free_address, timeout_s=0.3)
    for ask in (lambda: client.generate("a"), client.status):
        with pytest.raises(JobError, match=f"no broker answered at {free_address}.*make broker") as caught:
            ask()
        assert caught.value.code == "no_broker"


NO_VERIFIER = Failed(job_id=0, code="no_verifier", reason="no verifier is registered")


def test_no_verifier(connect, broker):
    """A broker without verifier: its reason reaches the caller."""
    broker.reply = lambda _: [NO_VERIFIER]
    with pytest.raises(JobError, match="no verifier") as caught:
        connect(broker.address, wait_s=0).generate("a")
    assert caught.value.code == "no_verifier"


def test_a_verifier_is_waited_for(connect, broker):
    """`on_wait` is called once with what is waited for."""
    questions, waits = [], []

    def reply(message):
        questions.append(message)
        is_early = sum(isinstance(asked, FetchTokenizer) for asked in questions) <= 2
        return [NO_VERIFIER] if isinstance(message, FetchTokenizer) and is_early else answer(message)

    broker.reply = reply
    client = connect(broker.address, timeout_s=2.0, on_wait=waits.append)
    assert client.generate("a", max_tokens=100).text == ANSWER
    assert [what.partition(" at ")[0] for what in waits] == ["a verifier to register with the broker"]


def test_a_broker_is_waited_for_if_asked(connect, free_address):
    """For longer than any other silence."""
    began = time.monotonic()
    with pytest.raises(JobError, match="no broker") as caught:
        connect(free_address, timeout_s=0.1, wait_s=0.5).generate("a")
    assert (caught.value.code, time.monotonic() - began >= 0.5) == ("no_broker", True)


def test_bad_address():
    """A malformed address is a ConfigError, and leaves no socket or thread behind."""
    with pytest.raises(ConfigError, match="nonsense"):
        Client("nonsense")


def test_refused_by_the_broker(client, broker):
    """A job that fails raises the broker's reason; the client can be used on."""
    broker.reply = lambda m: (
        [Failed(job_id=m.job_id, code="engine", reason="it broke")] if type(m) is Submit else answer(m)
    )
    client.status()
    with pytest.raises(JobError, match="it broke"):
        client.generate("a")
    broker.reply = answer
    assert client.generate("a").text


def test_invalid_requests_send_no_message(client, broker):
    """What is wrong at the edge never reaches the broker."""
    with pytest.raises(JobError, match="temperature"):
        client.generate("a", temperature=float("nan"))
    with pytest.raises(JobError, match="empty"):
        list(client.stream(""))
    assert broker.num_heard(Submit) == 0


def test_closing_fails_those_who_wait(client, broker):
    """A closed client fails all waiting and later calls."""
    broker.reply = lambda m: [] if isinstance(m, Submit) else answer(m)
    job = client.submit("a")
    broker.wait_for(Submit)
    client.close()
    with pytest.raises(JobError, match="closed"):
        job.result(60)
    with pytest.raises(JobError, match="closed"):
        client.generate("a")


def test_leaving_stops_no_job(connect, broker):
    """A client that leaves sends no Cancel; one that closes does."""
    broker.reply = lambda m: [] if isinstance(m, Submit | Cancel) else answer(m)
    left, closed = (connect(broker.address) for _ in range(2))
    jobs = [client.submit("a") for client in (left, closed)]
    broker.wait_for(Submit, 2)
    left.leave()
    closed.close()
    assert {message.job_id for message in broker.wait_for(Cancel)} == {jobs[1].id}
    with pytest.raises(JobError, match="closed"):
        jobs[0].result(60)


def test_a_forgotten_client_closes(broker, tmp_path):
    """The thread of an unreferenced client ends."""
    before = threading.active_count()
    assert Client(broker.address, cache_dir=tmp_path).generate("a").text
    gc.collect()
    assert threading.active_count() == before
