"""What fails, and who is waited for, at both clients against a small broker over real TCP."""

import gc
import threading
import time

import pytest

import specq
from specq.client import Client
from specq.protocol.errors import ConfigError, JobError
from specq.protocol.messages import Cancel, Failed, FetchTokenizer, Submit
from specq.testing.fake_broker import ANSWER, FakeBroker, answer
from tests.client.asking import run_async


def test_no_broker(tmp_path):
    """Nobody at the address: an error with the address and what to start, in time."""
    with FakeBroker() as gone:
        address = gone.address
    with Client(address, cache_dir=tmp_path, timeout_s=0.3) as client:
        with pytest.raises(JobError, match=f"no broker answered at {address}.*make broker") as caught:
            client.generate("a")
        assert caught.value.code == "no_broker"


def test_no_verifier(tmp_path):
    """A broker without verifier: its reason reaches the caller."""

    def reply(message):
        return [Failed(job_id=0, code="no_verifier", reason="no verifier is registered")]

    with FakeBroker(reply) as broker, Client(broker.address, cache_dir=tmp_path, wait_s=0) as client:
        with pytest.raises(JobError, match="no verifier") as caught:
            client.generate("a")
        assert caught.value.code == "no_verifier"


def wait_twice(message, questions):
    """Answer that there is no verifier, twice."""
    if isinstance(message, FetchTokenizer) and len(questions) < 2:
        questions.append(message)
        return [Failed(job_id=0, code="no_verifier", reason="no verifier is registered")]
    return answer(message)


def test_a_verifier_is_waited_for(tmp_path):
    """`on_wait` is called once with what is waited for; in asyncio alike."""
    waits = []

    async def scenario(address):
        async with specq.AsyncClient(address, cache_dir=tmp_path, timeout_s=0.4, on_wait=waits.append) as client:
            return (await client.generate("a", max_tokens=100)).text

    for run in (lambda: sync_text(broker.address, tmp_path, waits), lambda: run_async(scenario(broker.address))):
        questions = []
        with FakeBroker(lambda message, questions=questions: wait_twice(message, questions)) as broker:
            assert run() == ANSWER
        assert waits.pop().startswith("a verifier to register with the broker at ")
        assert not waits


def sync_text(address, cache_dir, waits):
    with Client(address, cache_dir=cache_dir, timeout_s=0.4, on_wait=waits.append) as client:
        return client.generate("a", max_tokens=100).text


def test_a_broker_is_waited_for_if_asked(tmp_path):
    """For longer than any other silence."""
    with FakeBroker() as gone:
        address = gone.address
    began = time.monotonic()
    client = Client(address, cache_dir=tmp_path, timeout_s=0.1, wait_s=0.5)
    with client, pytest.raises(JobError, match="no broker") as caught:
        client.generate("a")
    assert (caught.value.code, time.monotonic() - began >= 0.5) == ("no_broker", True)


def test_bad_address():
    """A malformed address is a ConfigError, and leaves nothing behind."""
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


def test_invalid_requests_send_nothing(client, broker):
    """What is wrong at the edge never reaches the broker."""
    with pytest.raises(JobError, match="temperature"):
        client.generate("a", temperature=float("nan"))
    with pytest.raises(JobError, match="empty"):
        list(client.stream(""))
    assert broker.num_heard(Submit) == 0


def test_closing_fails_those_who_wait(tmp_path):
    """A closed client answers everybody: those who wait and those who come later."""
    silent = FakeBroker(lambda m: [] if isinstance(m, Submit) else answer(m))
    with silent as broker, Client(broker.address, cache_dir=tmp_path) as client:
        job = client.submit("a")
        broker.wait_for(Submit)
        client.close()
        with pytest.raises(JobError, match="closed"):
            job.result(5)
        with pytest.raises(JobError, match="closed"):
            client.generate("a")


def test_leaving_stops_no_job(broker, tmp_path):
    """A client that leaves sends no Cancel; one that closes does."""
    broker.reply = lambda m: [] if isinstance(m, Submit | Cancel) else answer(m)
    left, closed = (Client(broker.address, cache_dir=tmp_path) for _ in range(2))
    jobs = [client.submit("a") for client in (left, closed)]
    broker.wait_for(Submit, 2)
    left.leave()
    closed.close()
    assert {message.job_id for message in broker.wait_for(Cancel)} == {jobs[1].id}
    with pytest.raises(JobError, match="closed"):
        jobs[0].result(5)


def test_a_forgotten_client_closes(broker, tmp_path):
    """A client that nobody holds ends its thread."""
    before = threading.active_count()
    assert Client(broker.address, cache_dir=tmp_path).generate("a").text
    gc.collect()
    assert threading.active_count() == before
