"""Both clients against a small broker over real TCP."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import specq
from specq.client.base import count_ready
from specq.protocol import DRAFT_WORKER, PLAIN, Accepted, Cancel, FetchTokenizer, JobError, Submit
from specq.testing.fake_broker import ANSWER, ANSWER_IDS, CODEC, STATS, FakeBroker, answer, completion, tokens
from tests.client.asking import CHAT
from tests.each import each


def test_generate(client):
    """A prompt becomes a result with all the fields of a result line."""
    result = client.generate("two eggs", max_tokens=100, id="x")
    assert (result.id, result.prompt, result.text, result.token_ids) == ("x", "two eggs", ANSWER, ANSWER_IDS)
    assert (result.finish_reason, result.error) == ("stop", None)
    assert result.usage == {
        "prompt_tokens": len(CODEC.encode("two eggs")),
        "completion_tokens": len(ANSWER_IDS),
        "cached_tokens": 2,
    }
    stats = result.stats
    assert stats["tokens_per_second"] > 0
    assert stats["time_to_first_token_ms"] > 0
    assert (stats["acceptance_rate"], stats["mean_accepted_length"]) == (0.75, 2.5)
    assert {**stats, **result.internal, **result.usage}.items() >= STATS.items()
    assert not set(stats) & set(result.internal)
    names = ["id", "prompt", "text", "token_ids", "finish_reason", "usage", "stats", "error"]
    assert list(result.to_dict()) == names


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
        thread.join(60)
    assert (broker.num_heard(FetchTokenizer), broker.num_heard(Submit)) == (1, 8)


def test_stop_strings(client):
    """The text ends before the stop string; the tokens are all that the verifier sent."""
    result = client.generate("a", stop=("END",), max_tokens=100)
    assert result.text == "A wörld of eggs.\n"
    assert result.token_ids == ANSWER_IDS


@each("stop", [(), ("END",)])
def test_stream(client, stop):
    """Pieces join to the text of the result, flags to all tokens; no piece shows part of a stop string."""
    pieces = list(client.stream("a", stop=stop, max_tokens=100))
    result = pieces[-1].result
    assert [piece.result for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert "".join(piece.text for piece in pieces) == result.text
    assert [i for piece in pieces for i in piece.token_ids] == result.token_ids
    assert all("E" not in piece.text for piece in pieces) or not stop
    assert all("".join(text for text, _ in piece.spans) == piece.text for piece in pieces)
    assert pieces[0].origins == (DRAFT_WORKER, DRAFT_WORKER, PLAIN)
    assert pieces[-1].token_ids == tuple(ANSWER_IDS[-(len(ANSWER_IDS) % 3 or 3) :])  # they came with the end


def test_the_last_piece_has_the_log_probabilities_of_its_tokens(client, broker):
    """As all others have; with places in the text, as a stream from the middle and the result have them, too."""

    def with_logprobs(message):
        replies = answer(message)
        if not isinstance(message, Submit):
            return replies
        accepted, *rounds = replies
        return [accepted, *(replace(one, logprobs=-np.ones(len(one.token_ids), np.float32)) for one in rounds)]

    broker.reply = with_logprobs
    for known in (0, 4):
        pieces = list(client.stream("a", logprobs=0, max_tokens=100, resume_from=[known]))
        entries = [entry for piece in pieces for entry in piece.logprobs]
        assert [len(piece.logprobs) for piece in pieces] == [len(piece.token_ids) for piece in pieces]
        assert pieces[-1].logprobs
        assert entries == pieces[-1].result.logprobs[known:]
    texts = [ANSWER[: entry["offset"]] for entry in pieces[-1].result.logprobs]
    assert texts == [CODEC.decode(ANSWER_IDS[:i]).rstrip("\ufffd") for i in range(len(ANSWER_IDS))]


def begin(message):
    """Answer a job with three tokens and no more, until it is cancelled."""
    if isinstance(message, Submit):
        return [tokens(message.job_id, 0, ANSWER_IDS[:3])]
    if isinstance(message, Cancel):
        return [tokens(message.job_id, 3, [], "cancelled")]
    return answer(message)


def test_abandoned_streams_leave_no_state(client, broker):
    """Who stops reading stops the job; however many they are, the client forgets them, and stops asking for their
    end."""
    broker.reply = begin
    for _ in range(100):
        pieces = client.stream("a")
        next(pieces)
        pieces.close()
    jobs = {message.job_id for message in broker.wait_for(Submit, 100)}
    assert {message.job_id for message in broker.wait_for(Cancel, 100)} == jobs
    client.status()
    assert client._connection.link.num_awaited == 0


def test_a_lost_cancel_is_sent_again(client, broker):
    """Also where the client closes at once."""
    lost = set()

    def reply(message):
        if isinstance(message, Cancel) and message.job_id not in lost:
            lost.add(message.job_id)
            return []
        return begin(message)

    broker.reply = reply
    job = client.submit("a")
    broker.wait_for(Submit)
    job.cancel()
    assert job.result(60).finish_reason == "cancelled"
    client.submit("a")
    broker.wait_for(Submit, 2)
    client.close()
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


def test_a_job_that_is_never_answered_fails_in_time(connect, broker):
    """Though the broker answers others all the while."""

    def reply(message):
        lost = isinstance(message, Submit) and message.params.max_tokens == 7
        return [] if lost else answer(message)

    broker.reply = reply
    client = connect(broker.address, timeout_s=2.0)
    job = client.submit("a", max_tokens=7)
    deadline = time.monotonic() + 20
    while not job.done and time.monotonic() < deadline:
        client.generate("b")
    with pytest.raises(JobError, match="is there, but has not answered") as caught:
        job.result(0)
    assert caught.value.code == "lost"


def test_submit_and_cancel(client, broker):
    """A job runs by itself; cancelled, it ends with what it has."""
    broker.reply = begin
    job = client.submit("a")
    broker.wait_for(Submit)
    with pytest.raises(TimeoutError):
        job.result(0.01)
    assert not job.done
    job.cancel()
    assert job.result(60).finish_reason == "cancelled"
    assert job.result(0).token_ids == ANSWER_IDS[:3]
    assert job.done


def test_many_at_once(client):
    """Jobs in flight together do not get in each other's way."""
    jobs = [client.submit("a", max_tokens=n) for n in range(1, 40)]
    assert [job.result(60).token_ids for job in jobs] == [ANSWER_IDS[:n] for n in range(1, 40)]


def test_lost_messages_over_the_wire(connect, broker):
    """The broker swallows the first submission and then the middle of the tokens; the client asks until it has all."""
    heard = []

    def lossy(message):
        if not isinstance(message, Submit):
            return answer(message)
        heard.append(message.have)
        whole = completion(message)
        return {1: [], 2: [Accepted(job_id=message.job_id), whole[0], *whole[2:]]}.get(len(heard), whole)

    broker.reply = lossy
    client = connect(broker.address, timeout_s=2.0)
    assert client.generate("a", max_tokens=100).token_ids == ANSWER_IDS
    assert heard == [0, 0, 3]


def test_broker_restart(connect):
    """A broker that dies in the middle and comes back at its address without memory: the same text."""

    with FakeBroker(begin) as first:
        client = connect(first.address, timeout_s=5.0)
        job = client.submit("a", max_tokens=100)
        first.wait_for(Submit)
    with FakeBroker(endpoint=first.address):
        assert job.result(60).token_ids == ANSWER_IDS


def test_garbage_is_survived(client, broker):
    """Frames that are no message are dropped; the job goes on."""
    send = broker._socket.send_multipart
    broker._socket.send_multipart = lambda frames: (send([frames[0], b"x", b"{", b"\0"]), send(frames))
    assert client.generate("a", max_tokens=5).token_ids == ANSWER_IDS[:5]
    del broker._socket.send_multipart


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
