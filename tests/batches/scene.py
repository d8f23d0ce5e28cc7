"""A store with short leases, batches in it, and runners that answer lines from a pure function."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import orjson

from specq.batches import BatchRunner, BatchStore, LineAnswer, LineRetryError, NewBatch, StoreLimits

URL = "/v1/completions"
PATIENCE_S = 60.0
LIMITS = StoreLimits(num_bytes=1 << 20, owner_bytes=1 << 19, file_bytes=1 << 18, keep_s=1000)
REPORT = {"models": ["tiny"], "loads": {}}


class Killed(BaseException):
    """The process dies here."""


def line(number: int, prompt: object = "a") -> bytes:
    body = {"model": "tiny", "prompt": prompt}
    return orjson.dumps({"custom_id": f"id-{number}", "method": "POST", "url": URL, "body": body}) + b"\n"


def new(owner="alice", **changes) -> NewBatch:
    return NewBatch(
        **{
            "owner": owner,
            "max_priority": 0,
            "endpoint": URL,
            "input_id": "file-1",
            "window": "1h",
            "window_s": 3600,
            "keep_s": 500,
        }
        | changes
    )


async def upload(store: BatchStore, data: bytes, owner="alice", size=64):
    number = await store.write(lambda tables: tables.new_file(owner, "", 60))
    for place, start in enumerate(range(0, len(data), size)):
        await store.write(lambda tables: tables.append(number, place, data[start : start + size]))  # noqa: B023
    return await store.write(lambda tables: tables.finish_file(number, "in.jsonl", 500))


async def begin(store: BatchStore, lines: int | list[bytes], **changes):
    """Upload lines and create a batch of them."""
    data = b"".join(lines if isinstance(lines, list) else [line(number) for number in range(1, lines + 1)])
    file = await upload(store, data)
    return await store.write(lambda tables: tables.new_batch(new(**changes), file))


async def content(store: BatchStore, file_id: str, owner="alice") -> list:
    """Return the lines of a file; [] for no id."""
    if not file_id:
        return []
    file = await store.read(lambda tables: tables.find_file(owner, file_id))
    data = b"".join([chunk async for chunk in store.chunks(file.number)])
    assert len(data) == file.num_bytes
    return [orjson.loads(one) for one in data.splitlines()]


async def until_ended(store: BatchStore, batch):
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = await store.read(lambda tables: tables.find_batch(batch.asked.owner, batch.id))
            if found.has_ended:
                return found
            await asyncio.sleep(0.002)


class Answers:
    """Answers lines; counts how often each was asked. The prompt "bad" has an error, "late" is retried once."""

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.asked: list[int] = []
        self.stopped: list[int] = []
        self.priorities: list[int] = []
        self._gate = gate

    async def __call__(self, run) -> LineAnswer:
        self.asked.append(run.line.number)
        self.priorities.append(run.priority)
        try:
            if self._gate is not None:
                await self._gate.wait()
        except asyncio.CancelledError:
            if run.is_over():
                self.stopped.append(run.line.number)
            raise
        prompt = run.line.body["prompt"]
        if prompt == "late" and self.asked.count(run.line.number) == 1:
            raise LineRetryError("busy")
        status = 400 if prompt == "bad" else 200
        return LineAnswer(status, {"text": f"{prompt} {run.line.number}"}, f"req_{run.line.number}")

    async def stop(self, run) -> None:
        self.stopped.append(run.line.number)


@asynccontextmanager
async def running(store: BatchStore, answers, report=lambda: REPORT):
    async def get_report():
        return report()

    runner = BatchRunner(store, answers, get_report, 1000)
    task = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class DyingStore(BatchStore):
    """A store whose process dies at its write number `at`: before or after it is on disk."""

    def __init__(self, path, limits, at: int, *, after: bool) -> None:
        super().__init__(path, limits)
        self.left, self.after, self.dead = at, after, asyncio.Event()

    async def write(self, action):
        if self.dead.is_set():
            raise Killed
        self.left -= 1
        if self.left > 0:
            return await super().write(action)
        self.dead.set()
        if self.after:
            await super().write(action)
        raise Killed
