"""What a gateway needs of a client: jobs that several wait for, that run on, and whose text goes on from a position."""

import asyncio
from dataclasses import replace

import pytest

import specq
from specq.client.core import ClientCore
from specq.client.events import NewTokens, RequestFailed
from specq.protocol import Accepted, Cancel, JobError, Submit
from specq.testing.fake_broker import ANSWER, ANSWER_IDS, FakeBroker, answer, tokens
from tests.client.asking import CHAT, run_async
from tests.client.cores import TEXT, make_core, new_ids
from tests.each import each


def kept_core() -> tuple[ClientCore, Submit]:
    core, job = make_core()
    core.abandon(7, 0.0)
    core.take_outbox()
    core.submit(job, 0.0, keep_running=True)
    core.take_outbox()
    return core, job


def test_who_submits_a_job_that_runs_here_joins_it():
    """It gets the missed tokens at once, and no message is sent."""
    core, job = make_core()
    core.receive(tokens(7, 0, TEXT[:3]), 0.1)
    core.take_outbox()

    assert new_ids(core.submit(job, 0.2)) == TEXT[:3]
    assert core.take_outbox() == []


def test_a_job_of_other_content_is_not_joined():
    core, job = make_core()

    (failed,) = core.submit(replace(job, label="other"), 0.1)

    assert isinstance(failed, RequestFailed)
    assert failed.error.code == "conflict"
    assert new_ids(core.receive(tokens(7, 0, TEXT[:3]), 0.1)) == TEXT[:3]


def test_a_job_with_a_digest_is_what_that_says():
    """Its prompt may have another date; under another digest, or a label that is none, it is another job."""
    digest = f'"http {"a" * 64}"'
    for label, later, is_same in ((digest, digest, True), (digest, digest.replace("a", "b"), False), ("a", "a", False)):
        core, job = make_core()
        core.abandon(7, 0.0)
        core.submit(replace(job, label=label), 0.0)
        core.receive(tokens(7, 0, TEXT[:3]), 0.1)
        found = core.submit(replace(job, label=later, prompt_ids=job.prompt_ids[:1]), 0.2)
        assert (new_ids(found) == TEXT[:3]) == is_same
        assert any(isinstance(event, RequestFailed) for event in found) != is_same


def test_a_job_that_shall_keep_running_is_not_stopped():
    core, _ = kept_core()
    core.receive(Accepted(job_id=7), 0.1)

    core.abandon(7, 0.2)

    assert core.take_outbox() == []
    assert core.idle


def test_a_job_that_shall_keep_running_is_sent_until_the_broker_has_it():
    """Also if its caller left before the first answer of the broker."""
    core, job = kept_core()

    core.abandon_all(0.1)
    core.tick(3.0)

    assert core.take_outbox() == [job]
    core.receive(Accepted(job_id=7), 3.1)
    assert core.idle


def test_a_job_that_was_left_is_taken_up_again():
    core, job = kept_core()
    core.abandon(7, 0.1)

    assert core.submit(job, 0.2, keep_running=True) == []
    assert core.take_outbox() == [job]
    assert new_ids(core.receive(tokens(7, 0, TEXT[:3]), 0.3)) == TEXT[:3]


def test_logprobs_come_with_the_tokens():
    core, job = make_core()
    asking = replace(job, job_id=8, params=replace(job.params, logprobs=1))
    core.submit(asking, 0.0)
    message = tokens(8, 0, [5, 6])
    import numpy as np

    arrays = {"logprobs": [-1.0, -2.0], "top_logprobs": [-0.5, -2.0]}
    values = {name: np.array(value, np.float32) for name, value in arrays.items()}
    events = core.receive(replace(message, top_ids=np.array([9, 6], np.int32), **values), 0.1)
    events += core.receive(replace(message, base_len=2, top_ids=np.array([9, 6], np.int32), **values), 0.1)

    entries = [entry for event in events if isinstance(event, NewTokens) for entry in event.logprobs]
    one = [
        {"token_id": 5, "logprob": -1.0, "top": [[9, -0.5]]},
        {"token_id": 6, "logprob": -2.0, "top": [[6, -2.0]]},
    ]
    assert entries == [*one, *one]


# --- over sockets -----------------------------------------------------------------------------------------------------


@each("known", range(len(ANSWER_IDS) + 1))
def test_a_stream_goes_on_from_any_position(client, known):
    """The text of the first tokens and the text of a stream that goes on after them make the whole."""
    texts, count = [], 0
    for piece in client.stream("a", max_tokens=100):
        texts += [(count + len(piece.token_ids), piece.text)]
        count += len(piece.token_ids)
    at = {end: "".join(text for upto, text in texts[: i + 1]) for i, (end, _) in enumerate(texts[:-1])}
    rest = list(client.stream("a", max_tokens=100, resume_from=[known]))

    text = "".join(piece.text for piece in rest)
    assert ANSWER.endswith(text)
    assert rest[-1].result.text == ANSWER
    assert sum(len(piece.token_ids) for piece in rest) == len(ANSWER_IDS) - known
    if known in at:
        assert at[known] + text == ANSWER


def test_closing_a_stream_leaves_a_job_that_shall_keep_running(tmp_path):
    """And another one under the same key, of the same client, gets all of it."""

    def slow(message):
        return list(answer(message))[:2] if isinstance(message, Submit) else answer(message)

    async def scenario(broker):
        async with specq.AsyncClient(broker.address, cache_dir=tmp_path) as client:
            options = {"job_key": "k", "keep_running": True, "max_tokens": 100}
            stream, other = client.stream("a", **options), client.stream("a", **options)
            first = [await anext(stream), await anext(other)]
            await stream.aclose()
            broker.reply = answer
            rest = [piece async for piece in other]
            return first, rest

    with FakeBroker(slow) as broker:
        (first, joined), rest = run_async(scenario(broker))
        assert broker.num_heard(Cancel) == 0
    assert first.text == joined.text
    assert first.text + "".join(piece.text for piece in rest) == ANSWER


def test_a_cancelled_await_leaves_a_job_that_shall_keep_running(tmp_path):
    async def scenario(broker):
        async with specq.AsyncClient(broker.address, cache_dir=tmp_path) as client:
            task = asyncio.create_task(client.generate("a", job_key="k", keep_running=True))
            await asyncio.to_thread(broker.wait_for, Submit)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with FakeBroker(lambda m: [Accepted(job_id=m.job_id)] if isinstance(m, Submit) else answer(m)) as broker:
        run_async(scenario(broker))
        assert broker.num_heard(Cancel) == 0


def test_variables_reach_the_chat_template(client):
    opened = client.generate(messages=CHAT, max_tokens=1).prompt
    closed = client.generate(messages=CHAT, max_tokens=1, chat_template_kwargs={"add_generation_prompt": False}).prompt

    assert opened.startswith(closed)
    assert opened != closed


@each(
    ("arguments", "said"),
    [
        ({"prompt": "a", "chat_template_kwargs": {"a": 1}}, "without messages"),
        ({"messages": CHAT, "chat_template_kwargs": [1]}, "must be an object"),
        ({"messages": CHAT, "chat_template_kwargs": {"messages": []}}, "give them as messages"),
        ({"prompt": "a", "tenant": "x" * 65}, "at most 64 characters"),
    ],
)
def test_wrong_arguments_are_named(client, arguments, said):
    with pytest.raises(JobError, match=said):
        client.generate(**arguments)
