"""Runs the batches of a store: lines become jobs as there is room, and their results are written as they come.

    tick      claim batches, adapt the room, tidy; start a task for each batch that has none
    a task    validate ─▶ feed lines ─▶ end; from the state that the store has, so that it can begin anywhere

A line's job has an id that follows from batch and line (`AnswerLine`). So lines that ran when a gateway was killed find
their jobs again, and none is doubled. A batch ends in the store after the last result was written there.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from specq.batches.interface import LEASE_S, BatchStoreError
from specq.batches.lines import BatchLine, FileCheck, LineReason, LineSplitter, RawLine, read_line
from specq.batches.results import LineAnswer, answered, unrun
from specq.batches.room import MOST, LineRoom
from specq.batches.threads import Action, BatchStore, T
from specq.batches.values import LineResult, Status, StoredBatch
from specq.batches.window import priority_of
from specq.runtime import traced

log = structlog.get_logger(__name__)

TICK_S = 0.5
TIDY_S = 5.0
RETRY_S, MOST_RETRY_S = 0.25, 10.0  # of what cannot be done now: at first, and at most
MOST_WRITTEN = 256  # results in one transaction
REASONS: Mapping[Status, str] = {
    "expired": "the completion window of the batch ended before this line did",
    "cancelled": "the batch was cancelled before this line ended",
}


@dataclass(eq=False, slots=True)
class LineRun:
    """A line that runs.

    seconds   until the batch's window ends.
    is_over   whether its batch has ended: then its jobs are stopped. Otherwise they go on without this gateway.
    """

    batch: StoredBatch
    line: BatchLine
    priority: int
    seconds: float
    is_over: Callable[[], bool]


class LineRetryError(Exception):
    """A line cannot be answered now. It must be tried again later."""


class AnswerLine(Protocol):
    """Answers a line. It has the same jobs each time. Raises LineRetryError."""

    async def __call__(self, run: LineRun, /) -> LineAnswer: ...

    async def stop(self, run: LineRun, /) -> None:
        """Stop the jobs of a line, if any run."""


@dataclass(eq=False, slots=True)
class _Held:
    """A batch that this gateway runs.

    stopping  set when the batch is being cancelled.
    is_over   whether its window has ended, or it is being cancelled.
    ends      when its window ends, by the monotonic clock.
    results   not written yet.
    """

    batch: StoredBatch
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False
    ends: float = 0.0
    results: list[LineResult] = field(default_factory=list)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    task: asyncio.Task[None] | None = None

    @property
    def left_s(self) -> float:
        return max(self.ends - time.monotonic(), 0.0)

    def priority(self) -> int:
        """Return the priority of a line that begins now."""
        return priority_of(self.left_s, self.batch.asked.window_s, self.batch.asked.max_priority)


class BatchRunner:
    """Runs batches until it is stopped.

    get_report  returns the broker's report.
    line_bytes  most bytes of a line.
    """

    def __init__(
        self,
        store: BatchStore,
        answer: AnswerLine,
        get_report: Callable[[], Awaitable[Mapping[str, Any]]],
        line_bytes: int,
    ) -> None:
        self._store, self._answer, self._get_report, self._line_bytes = store, answer, get_report, line_bytes
        self._holder = secrets.token_hex(8)
        self._held: dict[int, _Held] = {}
        self._room, self._woken, self._validating = LineRoom(), asyncio.Event(), asyncio.Lock()
        self._next_tidy = 0.0

    def wake(self) -> None:
        """Look at the store at once: a batch is new, or is to be cancelled."""
        self._woken.set()

    async def run(self) -> None:
        """Run batches until the task is cancelled. Then the jobs go on, and another gateway may continue at once."""
        try:
            while True:
                self._woken.clear()
                pause_s = TICK_S if await self._try_tick() else MOST_RETRY_S
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._woken.wait()
        finally:
            tasks = [held.task for held in self._held.values() if held.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(BatchStoreError):
                await self._store.write(lambda tables: tables.release(self._holder)) if tasks else None

    async def _try_tick(self) -> bool:
        """Look at the store once; return False if that failed."""
        try:
            if self._store.exists:
                await self._tick()
        except BatchStoreError as error:
            log.warning("batch_store_failed", reason=str(error))
            return False
        except Exception as error:  # noqa: BLE001 - batches that run go on, and the next look may succeed
            log.error("batch_run_failed", batch="", **traced(error))  # noqa: TRY400 - may quote a user
            return False
        return True

    async def _tick(self) -> None:
        found = await self._store.write(lambda tables: tables.claim(self._holder))
        is_full = await self._store.read(lambda tables: tables.is_full())
        if time.monotonic() >= self._next_tidy:
            has_more = await self._store.write(lambda tables: tables.tidy())
            self._next_tidy = 0.0 if has_more else time.monotonic() + TIDY_S
        self._drop_lost({batch.number for batch in found})
        for batch in found:
            held = self._held.setdefault(batch.number, _Held(batch))
            if batch.status == "cancelling":
                held.stopping.set()
            if held.task is None:
                held.task = asyncio.create_task(self._hold(held))
                held.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        await self._look_for_room(is_full=is_full)

    def _drop_lost(self, numbers: set[int]) -> None:
        """Leave the batches that have ended, or that another gateway runs now."""
        for number in self._held.keys() - numbers:
            held = self._held.pop(number)
            if held.task is not None:
                held.task.cancel()

    async def _look_for_room(self, *, is_full: bool) -> None:
        if not self._held:
            return
        is_open = False
        try:
            async with asyncio.timeout(LEASE_S / 3):
                self._room.take_report(await self._get_report())
        except Exception as error:  # noqa: BLE001 - without the broker no line can run
            log.debug("batch_lines_paused", reason=type(error).__name__)
        else:
            is_open = not is_full
        self._room.open(is_open=is_open)

    # --- one batch --------------------------------------------------------------------------------------------------

    async def _hold(self, held: _Held) -> None:
        """Run a batch to its end, unless another gateway takes it over."""
        try:
            await self._run(held)
        except BatchStoreError as error:
            log.warning("batch_released", batch=held.batch.id, reason=str(error))
        except Exception as error:  # noqa: BLE001 - one batch's fault is nobody else's; the next tick tries again
            log.error("batch_run_failed", batch=held.batch.id, **traced(error))  # noqa: TRY400 - may quote a user
            await asyncio.sleep(MOST_RETRY_S)
        finally:
            if self._held.get(held.batch.number) is held:
                del self._held[held.batch.number]

    async def _run(self, held: _Held) -> None:
        number = held.batch.number
        held.ends = time.monotonic() + held.batch.deadline - await self._store.read(lambda tables: tables.now())
        if held.batch.status == "validating":
            async with self._validating:  # one at a time, so that requests find a free thread
                await self._validate(held)
        if held.batch.has_ended:
            return
        outcome = await self._outcome(held)
        if outcome != "completed" and held.batch.output:
            await self._note_unrun(held, outcome)
        held.batch = await self._write(lambda tables: tables.end_batch(number, self._holder, outcome))
        log.info("batch_ended", batch=held.batch.id, status=outcome, lines=held.batch.total)

    async def _outcome(self, held: _Held) -> Status:
        """Run the lines, and return how the batch ends. Then all their results are written."""
        if held.batch.status == "cancelling" and held.batch.output:  # another gateway has begun it
            await self._stop_lines(held)
        if held.batch.status == "in_progress":
            outcome = await self._feed_until_over(held)
            await self._write_results(held)
            if outcome != "completed":
                return outcome
            held.batch = await self._write(lambda tables: tables.finalize(held.batch.number, self._holder))
        return "cancelled" if held.batch.status == "cancelling" else "completed"

    async def _stop_lines(self, held: _Held) -> None:
        """Stop what a former gateway may have left running: lines begin in order."""
        num_stopped = 0
        async for line in self._lines(held.batch):
            if num_stopped == MOST:
                break
            if isinstance(line, BatchLine):
                await self._answer.stop(LineRun(held.batch, line, held.priority(), held.left_s, lambda: True))
                num_stopped += 1

    async def _validate(self, held: _Held) -> None:
        """Check all lines; begin the batch, or end it as failed."""
        check = FileCheck(held.batch.asked.endpoint)
        async for lines in self._raw_lines(held.batch):
            await asyncio.to_thread(_check_all, check, lines)
            if check.is_over or held.stopping.is_set():
                break
        number, reasons = held.batch.number, check.result()
        if reasons and not held.stopping.is_set():
            held.batch = await self._write(lambda tables: tables.fail_batch(number, self._holder, reasons))
        else:
            held.batch = await self._write(lambda tables: tables.begin_batch(number, self._holder, check.total))

    async def _raw_lines(self, batch: StoredBatch) -> AsyncIterator[list[RawLine]]:
        splitter = LineSplitter(self._line_bytes)
        async for chunk in self._store.chunks(batch.input_file):
            yield list(splitter.feed(chunk))
        yield list(splitter.end())

    async def _lines(self, batch: StoredBatch) -> AsyncIterator[BatchLine | LineReason]:
        """Yield the lines without a result, in order."""
        done, endpoint = await self._store.read(lambda tables: tables.done_lines(batch)), batch.asked.endpoint
        async for raw_lines in self._raw_lines(batch):
            new = [raw for raw in raw_lines if raw.number not in done]
            for line in await asyncio.to_thread(lambda: [read_line(raw, endpoint) for raw in new]):  # noqa: B023
                yield line

    async def _feed_until_over(self, held: _Held) -> Status:
        """Run the lines until all have a result, the window ends, or the batch is cancelled."""
        feeding, stopping = asyncio.create_task(self._feed(held)), asyncio.create_task(held.stopping.wait())
        try:
            await asyncio.wait({feeding, stopping}, timeout=held.left_s, return_when=asyncio.FIRST_COMPLETED)
            if feeding.done():
                feeding.result()
                return "completed"
            held.is_over = True
            return "cancelled" if held.stopping.is_set() else "expired"
        finally:
            for task in (feeding, stopping):
                task.cancel()
            await asyncio.gather(feeding, stopping, return_exceptions=True)

    async def _feed(self, held: _Held) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                async for line in self._lines(held.batch):
                    if isinstance(line, LineReason):  # valid at first, but the limits are other ones now
                        held.results.append(unrun(held.batch, line.line or 0, None, line.code, line.message))
                        continue
                    model, owner = str(line.body.get("model") or ""), held.batch.asked.owner
                    give_back = await self._room.take(owner, model, held.priority)
                    task = group.create_task(self._run_line(held, line))
                    task.add_done_callback(give_back)  # also of a task that is cancelled before it begins
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run_line(self, held: _Held, line: BatchLine) -> None:
        held.results.append(answered(held.batch, line, await self._get_answer(held, line)))
        await self._write_results(held)

    async def _get_answer(self, held: _Held, line: BatchLine) -> LineAnswer:
        pause_s = RETRY_S
        while True:
            try:
                return await self._answer(LineRun(held.batch, line, held.priority(), held.left_s, lambda: held.is_over))
            except LineRetryError as error:
                log.debug("batch_line_postponed", batch=held.batch.id, line=line.number, reason=str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_RETRY_S)

    async def _write_results(self, held: _Held) -> None:
        """Write all results that wait. What comes while others are written is one group."""
        async with held.writing:
            while part := held.results[:MOST_WRITTEN]:
                await self._write_part(held, part)
                del held.results[: len(part)]

    async def _write_part(self, held: _Held, part: Sequence[LineResult]) -> None:
        await self._write(lambda tables: tables.add_results(held.batch.number, self._holder, part))

    async def _note_unrun(self, held: _Held, outcome: Status) -> None:
        """Write why lines have no answer."""
        async for line in self._lines(held.batch):
            number = line.number if isinstance(line, BatchLine) else line.line or 0
            custom_id = line.custom_id if isinstance(line, BatchLine) else None
            held.results.append(unrun(held.batch, number, custom_id, f"batch_{outcome}", REASONS[outcome]))
            if len(held.results) >= MOST_WRITTEN:
                await self._write_results(held)
        await self._write_results(held)

    async def _write(self, action: Action[T]) -> T:
        """Write to the store. While it is busy, try again."""
        pause_s = RETRY_S
        while True:
            try:
                return await self._store.write(action)
            except BatchStoreError as error:
                if error.code != "busy":
                    raise
                log.warning("batch_store_failed", reason=str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_RETRY_S)


def _check_all(check: FileCheck, lines: Sequence[RawLine]) -> None:
    for raw in lines:
        check.take(raw)
