"""Both clients against a small broker over real TCP."""

import asyncio
import gc
import inspect
import threading
import time
from itertools import islice

import pytest

import specq
from specq.client import Client
from specq.client.aio import AsyncJob
from specq.client.base import count_ready
from specq.client.sync import Job
from specq.protocol.errors import ConfigError, JobError
from specq.protocol.messages import Accepted, Cancel, Failed, FetchTokenizer, Submit
from specq.testing.fake_broker import ANSWER, ANSWER_IDS, CODEC, STATS, FakeBroker, answer, completion, tokens

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(broker, tmp_path):
    with specq.Client(broker.address, cache_dir=tmp_path) as client:
        yield client


def test_generate(client):
    """A prompt becomes a result with all the fields of a result line."""
    result = client.generate("two eggs", max_tokens=100, id="x")
    assert (result.id, result.prompt, result.text, result.token_ids) == ("x", "two eggs", ANSWER, ANSWER_IDS)
    assert (result.finish_reason, result.error) == ("stop", None)
    assert result.usage == {"prompt_tokens": len(CODEC.encode("two eggs")), "completion_tokens": len(ANSWER_IDS)}
    stats = result.stats
    assert stats["tokens_per_second"] > 0
    assert stats["time_to_first_token_ms"] > 0
    assert (stats["acceptance_rate"], stats["mean_accepted_length"]) == (0.75, 2.5)
    assert {**stats, **result.internal}.items() >= STATS.items()
    assert not set(stats) & set(result.internal)
    assert list(result.to_dict()) == [
        "id",
        "prompt",
        "text",
        "token_ids",
        "finish_reason",
        "usage",
        "stats",
        "error",
    ]


def test_generate_from_chat_and_ids(client, broker):
    """A chat goes through the template, ids go as they are; what is sent is what was asked for."""
    client.generate(messages=CHAT, temperature=0.5, seed=3, stop="END")
    client.generate(token_ids=[5, 6])
    chat, raw = broker.wait_for(Submit, 2)
    assert chat.prompt_ids.tolist() == CODEC.encode_chat(CHAT)
    assert (chat.params.temperature, chat.params.seed, chat.params.stop) == (0.5, 3, ("END",))
    assert raw.prompt_ids.tolist() == [5, 6]


def test_tokenizer_is_fetched_once(client, broker):
    """However many calls and threads, one fetch."""
    threads = [threading.Thread(target=client.generate, args=("a",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (broker.num_heard(FetchTokenizer), broker.num_heard(Submit)) == (1, 8)


def test_stop_strings(client):
    """The text ends before the stop string; the tokens are all that the verifier sent."""
    result = client.generate("a", stop=("END",), max_tokens=100)
    assert result.text == "A wörld of eggs.\n"
    assert result.token_ids == ANSWER_IDS


@pytest.mark.parametrize("stop", [(), ("END",)])
def test_stream(client, stop):
    """Pieces join to the text of the result, flags to all tokens; no piece shows part of a stop string."""
    pieces = list(client.stream("a", stop=stop, max_tokens=100))
    result = pieces[-1].result
    assert [piece.result for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert "".join(piece.text for piece in pieces) == result.text
    assert [i for piece in pieces for i in piece.token_ids] == result.token_ids
    assert all("E" not in piece.text for piece in pieces) or not stop
    assert all("".join(text for text, _ in piece.spans) == piece.text for piece in pieces)
    assert pieces[0].accepted == (True, True, False)


def test_stream_that_is_left_early(tmp_path):
    """Who stops reading stops the job."""

    def begin(message):
        return [tokens(message.job_id, 0, ANSWER_IDS[:3])] if isinstance(message, Submit) else answer(message)

    with FakeBroker(begin) as broker, Client(broker.address, cache_dir=tmp_path) as client:
        pieces = client.stream("a")
        list(islice(pieces, 1))
        pieces.close()
        assert broker.wait_for(Cancel)[0].job_id == broker.wait_for(Submit)[0].job_id


def begin(message):
    """Answer a job with three tokens and no more, until it is cancelled."""
    if isinstance(message, Submit):
        return [tokens(message.job_id, 0, ANSWER_IDS[:3])]
    if isinstance(message, Cancel):
        return [tokens(message.job_id, 3, [], "cancelled")]
    return answer(message)


def test_streams_that_are_left_leave_nothing(tmp_path):
    """However many: the client forgets who read them, and stops asking for their end."""
    with FakeBroker(begin) as broker, Client(broker.address, cache_dir=tmp_path) as client:
        for _ in range(100):
            pieces = client.stream("a")
            next(pieces)
            pieces.close()
        broker.wait_for(Cancel, 100)
        client.status()
        assert client._connection.link.num_awaited == 0


def test_a_lost_cancel_is_sent_again(tmp_path):
    """Also where the client closes at once."""
    lost = set()

    def reply(message):
        if isinstance(message, Cancel) and message.job_id not in lost:
            lost.add(message.job_id)
            return []
        return begin(message)

    with FakeBroker(reply) as broker:
        with Client(broker.address, cache_dir=tmp_path) as client:
            job = client.submit("a")
            broker.wait_for(Submit)
            job.cancel()
            assert job.result(10).finish_reason == "cancelled"
            client.submit("a")
            broker.wait_for(Submit, 2)
        assert [message.job_id for message in broker.heard if isinstance(message, Cancel)].count(job.id) == 2
        assert broker.num_heard(Cancel) == 4


def test_a_job_that_is_too_large_is_not_sent(client, broker):
    """What is too large, how large and how large it may be is said at once; the client can be used on."""
    with pytest.raises(
        JobError, match=r"takes 126\d\d\d bytes .* of them for bad_token_ids; at most 61\d\d\d"
    ) as caught:
        client.generate("a", bad_token_ids=[[100 + i % 100, 100, 200] for i in range(9000)])
    assert caught.value.code == "invalid"
    assert broker.num_heard(Submit) == 0
    assert client.generate("a").text


def test_a_job_that_is_never_answered_fails_in_time(tmp_path):
    """Though the broker answers others all the while."""

    def reply(message):
        lost = isinstance(message, Submit) and message.params.max_tokens == 7
        return [] if lost else answer(message)

    with FakeBroker(reply) as broker, Client(broker.address, cache_dir=tmp_path, timeout_s=0.5) as client:
        job = client.submit("a", max_tokens=7)
        deadline = time.monotonic() + 20
        while not job.done and time.monotonic() < deadline:
            client.generate("b")
        with pytest.raises(JobError, match="is there, but has not answered") as caught:
            job.result(0)
        assert caught.value.code == "lost"


def test_submit_and_cancel(tmp_path):
    """A job runs by itself; cancelled, it ends with what it has."""
    with FakeBroker(begin) as broker, Client(broker.address, cache_dir=tmp_path) as client:
        job = client.submit("a")
        broker.wait_for(Submit)
        with pytest.raises(TimeoutError):
            job.result(0.01)
        assert not job.done
        job.cancel()
        assert job.result(10).finish_reason == "cancelled"
        assert job.result(0).token_ids == ANSWER_IDS[:3]
        assert job.done


def test_many_at_once(client):
    """Jobs in flight together do not get in each other's way."""
    jobs = [client.submit("a", max_tokens=n) for n in range(1, 40)]
    assert [job.result(10).token_ids for job in jobs] == [ANSWER_IDS[:n] for n in range(1, 40)]


def test_lost_messages_over_the_wire(tmp_path):
    """The broker swallows the first submission and then the middle of the tokens; the client asks until it has all."""
    heard = []

    def lossy(message):
        if not isinstance(message, Submit):
            return answer(message)
        heard.append(message.have)
        whole = completion(message)
        return {1: [], 2: [Accepted(job_id=message.job_id), whole[0], *whole[2:]]}.get(len(heard), whole)

    with FakeBroker(lossy) as broker, Client(broker.address, cache_dir=tmp_path, timeout_s=2.0) as client:
        assert client.generate("a", max_tokens=100).token_ids == ANSWER_IDS
    assert heard == [0, 0, 3]


def test_broker_restart(tmp_path):
    """A broker that dies in the middle and comes back at its address without memory: the same text."""

    def begin(message):
        return [tokens(message.job_id, 0, ANSWER_IDS[:4])] if isinstance(message, Submit) else answer(message)

    with FakeBroker(begin) as first:
        client = Client(first.address, cache_dir=tmp_path, timeout_s=5.0)
        job = client.submit("a", max_tokens=100)
        first.wait_for(Submit)
    with FakeBroker(endpoint=first.address):
        assert job.result(10).token_ids == ANSWER_IDS
    client.close()


def test_garbage_is_survived(tmp_path):
    """Frames that are no message are dropped; the job goes on."""
    with FakeBroker() as broker, Client(broker.address, cache_dir=tmp_path) as client:
        send = broker._socket.send_multipart
        broker._socket.send_multipart = lambda frames: (send([frames[0], b"x", b"{", b"\0"]), send(frames))
        assert client.generate("a", max_tokens=5).token_ids == ANSWER_IDS[:5]
        del broker._socket.send_multipart


# --- failures -----------------------------------------------------------------------------------------------------


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


# --- the rest -----------------------------------------------------------------------------------------------------


def test_status_and_readiness(client):
    """The report comes through; readiness is read from it."""
    assert client.status()["models"] == ["fake"]
    client.wait_until_ready(num_targets=1)
    with pytest.raises(JobError, match="0 of 2 drafters"):
        client.wait_until_ready(num_drafters=2, timeout_s=0.0)
    report = {"workers": [{"role": "draft", "state": "ready"}, {"role": "target", "state": "loading"}]}
    assert count_ready(report) == (0, 1)


def test_model(client):
    """The model's limits are known to the user."""
    assert (client.model.name, client.model.max_length) == ("fake", 100)


def test_lazy_names():
    """The package offers its names without importing them first; others do not exist."""
    assert {"Client", "AsyncClient", "SamplingParams"} <= set(dir(specq))
    assert specq.SamplingParams().temperature == 0.0
    with pytest.raises(AttributeError, match="Clint"):
        _ = specq.Clint


# --- asyncio ------------------------------------------------------------------------------------------------------


def run_async(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 20))


def test_async_generate_and_status(broker, tmp_path):
    """Many awaited at once; the tokenizer and the state too."""

    async def scenario():
        async with specq.AsyncClient(broker.address, cache_dir=tmp_path) as client:
            results = await asyncio.gather(*(client.generate("a", max_tokens=n) for n in range(1, 20)))
            job = await client.submit(messages=CHAT)
            return results, await job.result(), await client.status()

    results, chat, status = run_async(scenario())
    assert [result.token_ids for result in results] == [ANSWER_IDS[:n] for n in range(1, 20)]
    assert (chat.text, status["models"]) == (ANSWER, ["fake"])


def test_async_stream(broker, tmp_path):
    """Pieces come one by one and join to the text."""

    async def scenario():
        async with specq.AsyncClient(broker.address, cache_dir=tmp_path) as client:
            return [piece async for piece in client.stream("a", max_tokens=100)]

    pieces = run_async(scenario())
    assert "".join(piece.text for piece in pieces) == ANSWER == pieces[-1].result.text


def test_async_cancellation(tmp_path):
    """A cancelled await stops the job at the broker; a cancelled job ends with what it has."""

    async def scenario(broker):
        async with specq.AsyncClient(broker.address, cache_dir=tmp_path) as client:
            task = asyncio.create_task(client.generate("a"))
            await asyncio.to_thread(broker.wait_for, Submit)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(broker.wait_for, Cancel)
            job = await client.submit("a")
            job.cancel()
            return await job.result()

    silent = FakeBroker(lambda m: [] if isinstance(m, Submit) else answer(m))
    with silent as broker:
        assert run_async(scenario(broker)).finish_reason == "cancelled"


def test_async_leaving_stops_no_job(broker, tmp_path):
    """As of the sync client."""
    broker.reply = lambda m: [] if isinstance(m, Submit | Cancel) else answer(m)

    async def scenario():
        left, closed = (specq.AsyncClient(broker.address, cache_dir=tmp_path) for _ in range(2))
        jobs = [await client.submit("a") for client in (left, closed)]
        await asyncio.to_thread(broker.wait_for, Submit, 2)
        await left.leave()
        await closed.close()
        with pytest.raises(JobError, match="closed"):
            await jobs[0].result()
        return jobs[1].id

    closed = run_async(scenario())
    assert {message.job_id for message in broker.wait_for(Cancel)} == {closed}


def test_async_readiness_and_model(broker, tmp_path):
    """As of the sync client."""

    async def scenario():
        async with specq.AsyncClient(broker.address, cache_dir=tmp_path) as client:
            await client.wait_until_ready(num_targets=1)
            with pytest.raises(JobError, match="0 of 2 drafters"):
                await client.wait_until_ready(num_drafters=2, timeout_s=0.0)
            return await client.model()

    assert run_async(scenario()).name == "fake"


@pytest.mark.parametrize(("one", "other"), [(Client, specq.AsyncClient), (Job, AsyncJob)])
def test_both_clients_offer_the_same(one, other):
    """The same names, and calls that take the same; in asyncio, who waits for a job limits the time outside."""
    assert public(one) == public(other)
    waits = {"result", "results"}
    for name in public(one) - waits:
        ours, theirs = getattr(one, name), getattr(other, name)
        assert not callable(ours) or inspect.signature(ours).parameters == inspect.signature(theirs).parameters, name


def test_both_clients_are_made_alike():
    assert inspect.signature(Client).parameters == inspect.signature(specq.AsyncClient).parameters


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def test_async_failures(tmp_path):
    """Errors arrive as in the sync client."""

    async def scenario(address):
        async with specq.AsyncClient(address, cache_dir=tmp_path, timeout_s=0.3) as client:
            with pytest.raises(JobError, match="no broker"):
                await client.generate("a")
            with pytest.raises(JobError, match="no broker"):
                await client.status()

    with FakeBroker() as gone:
        address = gone.address
    run_async(scenario(address))
