"""Several completions of one prompt, and jobs that end with their client, over real TCP."""

import asyncio
import signal
import sys
from itertools import islice

import pytest

import specq
from specq.protocol import Accepted, Cancel, Failed, JobError, Message, Submit
from specq.testing.fake_broker import CODEC, FakeBroker, answer, tokens
from specq.testing.waiting import wait_until
from specq.verification.noise import derived_seed
from tests.client.asking import run_async
from tests.each import each

SEED, N = 7, 3
SEEDS = [derived_seed(SEED, index) for index in range(N)]
ASKED = {"n": N, "seed": SEED, "temperature": 0.8}


def said(seed: int) -> list[int]:
    """Return what the brokers of these tests complete with a seed."""
    return CODEC.encode_part(f"The seed was {seed}, it was.")


class Reversed:
    """Waits for all completions of a prompt, then sends them two tokens at a time, the last one first."""

    def __init__(self, failing: int | None = None) -> None:
        self.submits: list[Submit] = []
        self.failing = None if failing is None else SEEDS[failing]

    def __call__(self, message):
        if not isinstance(message, Submit):
            return answer(message)
        self.submits.append(message)
        if len(self.submits) < N:
            return [Accepted(job_id=message.job_id)]
        rounds = [self.rounds(job) for job in reversed(self.submits)]
        return [told for step in range(max(map(len, rounds))) for told in [r[step] for r in rounds if step < len(r)]]

    def rounds(self, job: Submit):
        ids = said(job.params.seed)
        if job.params.seed == self.failing:
            return [tokens(job.job_id, 0, ids[:2]), Failed(job_id=job.job_id, code="engine", reason="it broke")]
        starts = range(0, len(ids), 2)
        return [tokens(job.job_id, s, ids[s : s + 2], "stop" if s + 2 >= len(ids) else "") for s in starts]


def begin(message):
    """Answer a job with one token and no more, until it is cancelled."""
    if isinstance(message, Submit):
        return [tokens(message.job_id, 0, said(message.params.seed)[:1])]
    return [tokens(message.job_id, 1, [], "cancelled")] if isinstance(message, Cancel) else answer(message)


def ids_of(broker: FakeBroker, kind: type[Message]) -> set[int]:
    """Return the jobs for which a broker received messages of a kind."""
    return {message.job_id for message in list(broker.heard) if isinstance(message, kind)}


def cancelled(broker: FakeBroker, count: int) -> bool:
    """Wait until so many jobs were submitted and all of them cancelled."""
    broker.wait_for(Submit, count)
    broker.wait_for(Cancel, count)
    return ids_of(broker, Submit) == ids_of(broker, Cancel)


# --- n ------------------------------------------------------------------------------------------------------------


def check(results) -> None:
    """All completions are there, in order, each with its own text, seed and index."""
    assert [result.token_ids for result in results] == [said(seed) for seed in SEEDS]
    assert [result.text for result in results] == [f"The seed was {seed}, it was." for seed in SEEDS]
    assert [result.stats["seed"] for result in results] == SEEDS
    assert [result.index for result in results] == list(range(N))
    assert {(result.id, result.error) for result in results} == {("x", None)}


def test_completions_in_order(client, broker):
    """Results keep the order of the prompts, in any order of completion."""
    broker.reply = Reversed()
    check(client.generate("Once", id="x", **ASKED))
    sent = broker.wait_for(Submit, N)
    assert len({message.job_id for message in sent}) == N
    assert {tuple(message.prompt_ids.tolist()) for message in sent} == {tuple(CODEC.encode("Once"))}


def test_one_is_a_list_only_if_a_number_was_given(client, broker):
    """`n` decides the type, not its value; a single completion has the seed that was asked for and no index."""
    alone, (listed,) = client.generate("a", seed=5), client.generate("a", seed=5, n=1)
    assert [message.params.seed for message in broker.wait_for(Submit, 2)] == [5, 5]
    assert alone.token_ids == listed.token_ids
    assert alone.index is listed.index is None
    assert "index" not in listed.to_dict()


def test_pieces_bear_the_index(client, broker):
    """Pieces of all completions come as they arrive; those of each join to its text, the last has its result."""
    broker.reply = Reversed()
    pieces = list(client.stream("Once", id="x", **ASKED))
    own = [[piece for piece in pieces if piece.index == index] for index in range(N)]
    assert [piece.index for piece in pieces[:N]] == list(reversed(range(N)))
    assert ["".join(piece.text for piece in mine) for mine in own] == [mine[-1].result.text for mine in own]
    assert all(piece.result is None for mine in own for piece in mine[:-1])
    check([mine[-1].result for mine in own])


@each("failing", range(N))
def test_a_completion_that_fails_harms_no_other(client, broker, failing):
    """Its result says why; the others are whole."""
    broker.reply = Reversed(failing)
    results = client.generate("Once", **ASKED)
    assert [result.error for result in results] == ["it broke" if i == failing else None for i in range(N)]
    assert [result.index for result in results] == list(range(N))
    assert [r.token_ids for r in results] == [[] if i == failing else said(s) for i, s in enumerate(SEEDS)]
    assert results[failing].finish_reason == "error"


def test_a_failing_piece(client, broker):
    """A stream reports a completion that failed, and goes on with the others."""
    broker.reply = Reversed(failing=2)
    results = {piece.index: piece.result for piece in client.stream("Once", **ASKED) if piece.result}
    assert {index: result.error for index, result in results.items()} == {0: None, 1: None, 2: "it broke"}


def test_a_single_completion_that_fails_raises(client, broker):
    """Where no list was asked for."""

    def refuse(message):
        if isinstance(message, Submit):
            return [Failed(job_id=message.job_id, code="engine", reason="it broke")]
        return answer(message)

    broker.reply = refuse
    with pytest.raises(JobError, match="it broke"):
        client.submit("a").result(60)
    with pytest.raises(JobError, match="it broke"):
        list(client.stream("a"))
    assert [result.error for result in client.submit("a", n=2).results(10)] == ["it broke"] * 2


# --- the end of the client ------------------------------------------------------------------------------------------


def test_cancelling_stops_all(client, broker):
    """Each completion ends with what it has."""
    broker.reply = begin
    job = client.submit("a", **ASKED)
    broker.wait_for(Submit, N)
    job.cancel()
    results = job.results(10)
    assert cancelled(broker, N)
    assert [result.finish_reason for result in results] == ["cancelled"] * N
    assert [result.token_ids for result in results] == [said(seed)[:1] for seed in SEEDS]


def test_leaving_a_stream_stops_all(client, broker):
    """Who stops reading stops every completion."""
    broker.reply = begin
    pieces = client.stream("a", **ASKED)
    list(islice(pieces, 1))
    pieces.close()
    assert cancelled(broker, N)


def test_closing_stops_the_jobs_that_run(client, broker):
    """A closed client leaves no running job whose result cannot be fetched. Ended jobs are left alone."""
    client.generate("a")
    done = broker.wait_for(Submit)[0].job_id
    broker.reply = begin
    client.submit("a", **ASKED)
    client.submit("a")
    broker.wait_for(Submit, N + 2)
    client.close()
    broker.wait_for(Cancel, N + 1)
    assert done not in ids_of(broker, Cancel)


@each("call", ["generate", "submit", "batch"])
def test_cancelling_who_waits_stops_the_jobs(tmp_path, call):
    """While the client stays open; its other jobs run on, and a shield keeps a job from it."""

    async def wait(client):
        if call == "generate":
            return await client.generate("a", **ASKED)
        if call == "batch":
            return await client.generate(["a"] * N)
        return await (await client.submit("a", **ASKED)).results()

    async def scenario(broker):
        async with specq.AsyncClient(broker.address, cache_dir=tmp_path) as client:
            other = await client.submit("b", n=1)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(other.results()), 0.01)
            task = asyncio.create_task(wait(client))
            submits = await asyncio.to_thread(broker.wait_for, Submit, N + 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            wanted = {message.job_id for message in submits[1:]}
            await asyncio.to_thread(wait_until, lambda: wanted == ids_of(broker, Cancel))
            assert not other.done

    with FakeBroker(begin) as broker:
        run_async(scenario(broker))


def test_all_who_wait_get_the_result(tmp_path):
    """However many wait for one job."""

    async def scenario(broker):
        async with specq.AsyncClient(broker.address, cache_dir=tmp_path) as client:
            job = await client.submit("Once", **ASKED)
            return await asyncio.gather(job.results(), job.results(), job.result())

    with FakeBroker(Reversed()) as broker:
        first, second, alone = run_async(scenario(broker))
    assert first == second
    assert alone == first[0]


BODY = """
import asyncio, pathlib, signal, sys
import specq

signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background of a shell ignores it

async def read(client):
    async for piece in client.stream("a", n=2):
        await asyncio.sleep(1000)  # cancelled here, the stream does not notice

async def main():
    async with specq.AsyncClient(sys.argv[1], cache_dir=pathlib.Path(sys.argv[2])) as client:
        job = await client.submit("a")
        await asyncio.gather(client.generate("a", n=2), job.result(), read(client))

asyncio.run(main())
"""


def test_an_interrupted_program_stops_its_jobs(tmp_path, spawn):
    """Ctrl-C under asyncio: those of generate, submit and stream, wherever it arrives."""
    with FakeBroker(begin) as broker:
        process = spawn(broker.address, str(tmp_path), program=(sys.executable, "-c", BODY))
        broker.wait_for(Submit, 5, timeout_s=30)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
        assert cancelled(broker, 5)
