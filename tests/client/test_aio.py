"""The client for asyncio against a small broker over real TCP; it offers what the blocking one does."""

import asyncio
import inspect

import pytest

import specq
from specq.client import Client
from specq.client.aio import AsyncJob
from specq.client.sync import Job
from specq.protocol.errors import JobError
from specq.protocol.messages import Cancel, FetchTokenizer, Submit
from specq.testing.fake_broker import ANSWER, ANSWER_IDS, FakeBroker, answer
from tests.client.asking import CHAT, run_async
from tests.each import each


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


def test_tasks_fetch_the_tokenizer_once(tmp_path):
    """The first of them, whichever it is; in another loop, too. One that is cancelled leaves it to the next."""
    with FakeBroker(answer) as broker:
        client = specq.AsyncClient(broker.address, cache_dir=tmp_path)

        async def scenario():
            first = asyncio.create_task(client.generate("a", max_tokens=2))
            others = [asyncio.create_task(client.generate("a", max_tokens=2)) for _ in range(40)]
            await asyncio.sleep(0)
            first.cancel()
            return await asyncio.gather(*others)

        for _ in range(2):
            assert {tuple(result.token_ids) for result in run_async(scenario())} == {tuple(ANSWER_IDS[:2])}
        run_async(client.close())
        assert 1 <= broker.num_heard(FetchTokenizer) <= 2


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


@each(("one", "other"), [(Client, specq.AsyncClient), (Job, AsyncJob)])
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
