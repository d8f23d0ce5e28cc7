"""Batches run to their ends: each line once, whatever breaks."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specq.batches import BatchStore
from specq.batches.window import FIRST_PRIORITY
from tests.batches.scene import LIMITS, REPORT, Answers, DyingStore, begin, content, line, running, until_ended


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("specq.batches.runner.TICK_S", 0.01)
    monkeypatch.setattr("specq.batches.runner.RETRY_S", 0.001)
    monkeypatch.setattr("specq.batches.store.LEASE_S", 0.1)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.cluster)])
def path(tmp_path, request):
    """Return where the store is: a file, or a database's address."""
    if request.param == "sqlite":
        return tmp_path / "b.batches"
    from tests.journal.cluster import running  # imports psycopg

    return running().new_database().address


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - another thread changes it
            await asyncio.sleep(0.002)


def held(store, batch) -> set[int]:
    """Return the lines that have a result."""
    found = store._reader.find_batch("alice", batch.id)
    return store._reader.done_lines(found)


def scene(path, play):
    """Run a coroutine function with a store."""

    async def run():
        store = BatchStore(path, LIMITS)
        try:
            await asyncio.wait_for(play(store), 60)
        finally:
            store.close()

    asyncio.run(run())


def test_a_batch(path):
    async def play(store):
        answers = Answers()
        batch = await begin(store, [line(1), b"\n", line(3, "bad"), line(4, "late"), line(5)])
        async with running(store, answers):
            ended = await until_ended(store, batch)
        assert (ended.status, ended.total, ended.completed, ended.failed) == ("completed", 4, 3, 1)
        assert sorted(answers.asked) == [1, 3, 4, 4, 5]
        output = await content(store, ended.output_id)
        assert [one["custom_id"] for one in output] == ["id-1", "id-4", "id-5"]
        assert output[0]["response"] == {"status_code": 200, "request_id": "req_1", "body": {"text": "a 1"}}
        assert output[0]["error"] is None
        (error,) = await content(store, ended.error_id)
        assert (error["custom_id"], error["response"]["status_code"]) == ("id-3", 400)
        assert set(ended.times) >= {"created_at", "in_progress_at", "finalizing_at", "completed_at", "expires_at"}
        assert set(answers.priorities) == {FIRST_PRIORITY}

    scene(path, play)


def test_a_file_that_cannot_be_used(path):
    async def play(store):
        answers = Answers()
        batch = await begin(store, [line(1), b"{\n", line(1)])
        async with running(store, answers):
            ended = await until_ended(store, batch)
        assert ended.status == "failed"
        assert [(one["line"], one["code"]) for one in ended.reasons] == [
            (2, "invalid_json_line"),
            (3, "duplicate_custom_id"),
        ]
        assert answers.asked == []
        assert (ended.output_id, ended.error_id) == ("", "")

    scene(path, play)


def test_cancelled(path):
    """What has ended stays, and the rest has its reason. Its jobs are stopped."""

    async def play(store):
        gate = asyncio.Event()
        answers = Answers(gate)
        batch = await begin(store, 40)
        async with running(store, answers) as runner:
            await until(lambda: len(answers.asked) >= 10)
            asked = await store.write(lambda tables: tables.cancel_batch("alice", batch.id))
            assert asked.status == "cancelling"
            runner.wake()
            ended = await until_ended(store, batch)
            assert runner._room.num_under_way == 0
        assert ended.status == "cancelled"
        assert sorted(answers.stopped) == sorted(answers.asked)
        errors = await content(store, ended.error_id)
        assert [one["custom_id"] for one in errors] == [f"id-{number}" for number in range(1, 41)]
        assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
        assert {"cancelling_at", "cancelled_at"} <= set(ended.times)

    scene(path, play)


def test_cancelled_before_it_begins(path):
    async def play(store):
        batch = await begin(store, 3)
        await store.write(lambda tables: tables.cancel_batch("alice", batch.id))
        async with running(store, Answers()):
            ended = await until_ended(store, batch)
        assert (ended.status, ended.output_id, ended.error_id) == ("cancelled", "", "")

    scene(path, play)


def test_expired(path):
    """Lines that were answered in time stay."""

    class Some(Answers):
        async def __call__(self, run):
            if run.line.number > 3:
                await asyncio.Event().wait()
            return await super().__call__(run)

    async def play(store):
        batch = await begin(store, 8)
        async with running(store, Some()):
            await until(lambda: len(held(store, batch)) == 3)
        store._tables._clock._offset += 3601
        async with running(store, Some()):
            ended = await until_ended(store, batch)
        assert (ended.status, ended.completed, ended.failed) == ("expired", 3, 0)
        assert [one["custom_id"] for one in await content(store, ended.output_id)] == ["id-1", "id-2", "id-3"]
        errors = await content(store, ended.error_id)
        assert [one["custom_id"] for one in errors] == [f"id-{number}" for number in range(4, 9)]
        assert {one["error"]["code"] for one in errors} == {"batch_expired"}

    scene(path, play)


def test_a_gateway_that_stops_and_another_one(path):
    """Jobs of the first are not stopped; the second goes on at once."""

    async def play(store):
        gate = asyncio.Event()
        first, second = Answers(gate), Answers()
        batch = await begin(store, 30)
        async with running(store, first):
            await until(lambda: first.asked)
        assert first.stopped == []
        async with running(store, second):
            ended = await until_ended(store, batch)
        assert (ended.status, ended.completed) == ("completed", 30)
        assert sorted(second.asked) == list(range(1, 31))

    scene(path, play)


def test_cancelled_while_its_gateway_is_dead(path, monkeypatch):
    """The next one stops what it may have left running: lines begin in order."""

    async def play(store):
        first, second = Answers(asyncio.Event()), Answers()
        batch = await begin(store, 12)
        async with running(store, first):
            await until(lambda: len(first.asked) > 5)
        await store.write(lambda tables: tables.cancel_batch("alice", batch.id))
        async with running(store, second):
            ended = await until_ended(store, batch)
        assert (ended.status, second.asked) == ("cancelled", [])
        assert second.stopped == list(range(1, 9))

    monkeypatch.setattr("specq.batches.runner.MOST", 8)
    scene(path, play)


def test_two_gateways_at_a_time(path):
    """Each line is asked for once, by the gateway that holds the batch."""

    async def play(store):
        other = BatchStore(path, LIMITS)
        answers = [Answers(), Answers()]
        batches = [await begin(store, 20) for _ in range(3)]
        async with running(store, answers[0]), running(other, answers[1]):
            for batch in batches:
                assert (await until_ended(store, batch)).completed == 20
        assert len(answers[0].asked) + len(answers[1].asked) == 60
        other.close()

    scene(path, play)


def test_a_full_store_begins_no_lines(path):
    async def play(store):
        batch = await begin(store, 3)
        answers, looks = Answers(), []
        store._tables.limits = replace(LIMITS, num_bytes=1)
        store._reader = store._tables.reader()
        async with running(store, answers, lambda: looks.append(1) or REPORT):
            await until(lambda: len(looks) > 3)
            assert answers.asked == []
            store._tables.limits = store._reader.limits = LIMITS
            assert (await until_ended(store, batch)).completed == 3

    scene(path, play)


def test_no_line_begins_without_a_broker(path):
    async def play(store):
        batch = await begin(store, 3)
        answers, looks = Answers(), []
        async with running(store, answers, lambda: REPORT if len(looks) > 3 else looks.append(1)):
            await until(lambda: len(looks) > 3)
            assert answers.asked == []
            assert (await until_ended(store, batch)).completed == 3

    scene(path, play)


NUM_LINES = 5


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_write(path, after, monkeypatch):
    """Nothing is lost or doubled, whichever write the process dies at; before it is on disk, or just after."""
    monkeypatch.setattr("specq.batches.store.LEASE_S", 0.02)
    lines = [
        line(number, "bad" if number == 2 else "late" if number == 4 else "a") for number in range(1, NUM_LINES + 1)
    ]

    async def die(at):
        store = BatchStore(path, LIMITS)
        batch = await begin(store, lines)
        store.close()
        dying = DyingStore(path, LIMITS, at, after=after)
        first, second = Answers(), Answers()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("specq.batches.runner.log.error", lambda *_, **__: None)
            async with running(dying, first):
                done = asyncio.create_task(until_ended(dying, batch))
                await asyncio.wait({done, asyncio.create_task(dying.dead.wait())}, return_when="FIRST_COMPLETED")
                await asyncio.sleep(0)
                done.cancel()
                await asyncio.gather(done, return_exceptions=True)
        is_over = dying.left > 0
        dying.close()
        store = BatchStore(path, LIMITS)
        async with running(store, second):
            ended = await until_ended(store, batch)
        assert (ended.status, ended.total, ended.completed, ended.failed) == ("completed", NUM_LINES, NUM_LINES - 1, 1)
        output, errors = await content(store, ended.output_id), await content(store, ended.error_id)
        assert [one["custom_id"] for one in output] == ["id-1", "id-3", "id-4", "id-5"]
        assert [one["custom_id"] for one in errors] == ["id-2"]
        files = await store.read(lambda tables: tables.list_files("alice", 1000, 0, "batch_output"))
        assert {file.id for file in files} >= {ended.output_id, ended.error_id}
        store.close()
        return is_over

    points = next(at for at in range(1, 40) if asyncio.run(asyncio.wait_for(die(at), 30)))
    assert points > 6
