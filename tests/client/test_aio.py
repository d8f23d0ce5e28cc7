"""What only the client for asyncio does, against a small broker over real TCP; it offers what the blocking one does."""

import asyncio
import inspect

import pytest

import specq
from specq.client import AsyncJob, Client, Job
from specq.protocol.messages import Cancel, FetchTokenizer, Submit
from specq.testing.fake_broker import ANSWER_IDS, answer
from tests.client.asking import run_async
from tests.each import each


def test_tasks_fetch_the_tokenizer_once(broker, tmp_path):
    """The first of them, whichever it is; in another loop, too. One that is cancelled leaves it to the next."""
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


def test_a_cancelled_await_stops_the_job(broker, tmp_path):
    """At the broker."""
    broker.reply = lambda m: [] if isinstance(m, Submit) else answer(m)

    async def scenario():
        async with specq.AsyncClient(broker.address, cache_dir=tmp_path) as client:
            task = asyncio.create_task(client.generate("a"))
            await asyncio.to_thread(broker.wait_for, Submit)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            (cancel, *_) = await asyncio.to_thread(broker.wait_for, Cancel)
            return cancel.job_id

    assert run_async(scenario()) == broker.wait_for(Submit)[0].job_id


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
