"""Several prompts in one call: a list in, a list of results out, in order, from both clients."""

import numpy as np
import pytest

import specq
from specq.client import Client
from specq.client.completions import is_batch, split_batch
from specq.protocol import Accepted, Cancel, Failed, JobError, Submit
from specq.testing.fake_broker import CODEC, FakeBroker, answer, tokens
from specq.verification.noise import derived_seed
from tests.each import each

CHATS = [[{"role": "user", "content": text}] for text in ("Hi", "Why?")]
PROMPTS = ["two eggs", "a", "b"]


def echo(message):
    """Answer a job with its own prompt; of one that begins with "fail", that it failed."""
    if isinstance(message, Submit):
        ids = message.prompt_ids.tolist()
        if CODEC.decode(ids).startswith("fail"):
            return [Failed(job_id=message.job_id, code="engine", reason="it broke")]
        return [tokens(message.job_id, 0, ids, "stop")]
    return answer(message)


@pytest.fixture
def generate(client):
    return client.generate


@pytest.fixture
def broker():
    with FakeBroker(echo) as fake:
        yield fake


@each(
    ("arguments", "prompt_ids"),
    [
        ({"prompt": PROMPTS}, [CODEC.encode(prompt) for prompt in PROMPTS]),
        ({"prompt": tuple(PROMPTS)}, [CODEC.encode(prompt) for prompt in PROMPTS]),
        ({"prompt": ["a"]}, [CODEC.encode("a")]),
        ({"messages": CHATS}, [CODEC.encode_chat(chat) for chat in CHATS]),
        ({"token_ids": [[5, 6], (7,)]}, [[5, 6], [7]]),
        ({"token_ids": np.array([[5, 6], [7, 8]])}, [[5, 6], [7, 8]]),
        ({"prompt": []}, []),
    ],
)
def test_a_list_gives_a_list(generate, broker, arguments, prompt_ids):
    """Results keep the order of the prompts, for results of any kind."""
    before = broker.num_heard(Submit)
    results = generate(max_tokens=9, **arguments)
    assert [result.token_ids for result in results] == prompt_ids
    assert {result.index for result in results} <= {None}
    assert broker.num_heard(Submit) == before + len(prompt_ids)


@each("arguments", [{"prompt": "a"}, {"messages": CHATS[0]}, {"token_ids": [5]}])
def test_a_single_prompt_is_not_a_list(generate, broker, arguments):
    assert isinstance(generate(**arguments), specq.client.Result)


def test_all_are_submitted_at_once(generate, broker):
    """None is answered before all are there; then the last one first."""
    submits = []

    def reply(message):
        if not isinstance(message, Submit):
            return answer(message)
        submits.append(message)
        if len(submits) < len(PROMPTS):
            return [Accepted(job_id=message.job_id)]
        return [tokens(job.job_id, 0, job.prompt_ids.tolist(), "stop") for job in reversed(submits)]

    broker.reply = reply
    results = generate(prompt=PROMPTS)
    assert [result.text for result in results] == [CODEC.decode(CODEC.encode(prompt)) for prompt in PROMPTS]


def test_several_completions_of_each(generate, broker):
    """A list of them for each prompt; each prompt with the seeds that it has alone."""
    results = generate(prompt=PROMPTS, n=2, temperature=0.5, seed=7)
    assert [[result.prompt for result in own] for own in results] == [[prompt] * 2 for prompt in PROMPTS]
    assert [[result.index for result in own] for own in results] == [[0, 1]] * 3
    seeds = [derived_seed(7, index) for index in range(2)]
    assert [[result.stats["seed"] for result in own] for own in results] == [seeds] * 3


def test_seeds_that_are_drawn_differ(generate, broker):
    results = generate(prompt=["a"] * 5, temperature=0.5)
    assert len({result.stats["seed"] for result in results}) == 5


def test_ids_are_a_list_too(generate, broker):
    assert [result.id for result in generate(prompt=PROMPTS, id=["x", 1, "y"])] == ["x", 1, "y"]
    for wrong in ("x", ["x"]):
        with pytest.raises(JobError, match="for 3 prompts it must be a list of 3 ids"):
            generate(prompt=PROMPTS, id=wrong)


def test_one_that_fails_has_an_error(generate, broker):
    """In its result; the others are whole."""
    results = generate(prompt=["a", "fail", "b"])
    assert [result.error for result in results] == [None, "it broke", None]
    assert [result.text for result in results][::2] == ["a", "b"]


@each(
    ("arguments", "reason"),
    [
        ({"prompt": ["a", "", "b"]}, "prompt 1: the prompt is empty"),
        ({"prompt": ["a", 3]}, "prompt 1: prompt is 3, but must be a string"),
        ({"token_ids": [[5], [10**9]]}, "prompt 1: token id 1000000000"),
        ({"prompt": ["a", "b"], "temperature": -1}, "^temperature is -1"),
        ({"prompt": ["a"], "min_tokens": 100, "max_tokens": 100}, "^min_tokens is 100; fake has room"),
        ({"prompt": ["a"], "token_ids": [[5]]}, "give exactly one of"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(generate, broker, arguments, reason):
    with pytest.raises(JobError, match=reason):
        generate(**arguments)
    assert broker.num_heard(Submit) == 0


def never_all(message):
    """Answer jobs with the prompt "b" alone; none of them ends by itself."""
    if isinstance(message, Submit):
        return [Accepted(job_id=message.job_id)] if CODEC.decode(message.prompt_ids.tolist()) == "b" else []
    return [tokens(message.job_id, 0, [], "cancelled")] if isinstance(message, Cancel) else answer(message)


def test_all_are_stopped_if_the_broker_is_gone(connect, broker):
    """The error is raised. Running jobs are cancelled without a wait, though the client stays open."""
    broker.reply = never_all
    client = connect(broker.address, timeout_s=2.0)
    with pytest.raises(JobError, match="not answered") as caught:
        client.generate(["a", "b"])
    submits = broker.wait_for(Submit, 2)
    (taken,) = {message.job_id for message in submits if message.prompt_ids.tolist() == CODEC.encode("b")}
    assert taken in {message.job_id for message in broker.wait_for(Cancel)}
    client.status()
    assert client._connection.link.num_awaited == 0
    assert caught.value.code == "lost"


def test_submit_takes_one(tmp_path, broker):
    with (
        Client(broker.address, cache_dir=tmp_path) as client,
        pytest.raises(JobError, match=r"prompt is \['a'\], but must be a string"),
    ):
        client.submit(["a"])


def test_a_stream_of_several_says_whose_a_piece_is(tmp_path, broker):
    with Client(broker.address, cache_dir=tmp_path) as client:
        pieces = list(client.stream(["a", "b"], n=2, temperature=1.0, seed=1, max_tokens=100))
    texts = {}
    for piece in pieces:
        at = (piece.place, piece.index)
        texts[at] = texts.get(at, "") + piece.text
    assert texts == {(place, index): prompt for place, prompt in enumerate("ab") for index in (0, 1)}
    assert sorted(piece.result.prompt for piece in pieces if piece.result) == ["a", "a", "b", "b"]


def test_jobs_of_a_batch_have_keys_of_their_own():
    """So that prompts that are alike are not one job."""
    keys = [own["job_key"] for own in split_batch({"prompt": ["a", "a"], "job_key": "run"})]
    assert len(set(keys)) == 2
    assert not is_batch({"messages": [], "token_ids": None, "prompt": None})
