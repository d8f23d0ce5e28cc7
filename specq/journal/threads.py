"""Two threads that keep disk access out of the broker's loop: a writer, a reader.

The writer journals all waiting records as one group. It begins at most one group in two milliseconds, and at most as
many as the journal can write at a time. So with more load the groups grow, and each record costs less. `durable` is the
progress. Both threads call `wake` after a change.

The writer also renews the broker's lease, and takes the jobs of lost brokers. If its own renewal was late, the journal
may have been away for all. So it gives the others the time of a lease before it takes their jobs. What it finds are
events, in order. The broker counts the handled ones. Rule: records of a job that was taken count only if the broker
made them after it learned of the taking. Earlier ones describe a text that others may have continued.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import structlog

from specq.journal.interface import HELD_S, LEASE_S, NOTE_S, Journal, JournalReader, Noted, read_machine
from specq.journal.records import Record, StoredJob, num_bytes
from specq.protocol import JournalBusyError, JournalLostError

log = structlog.get_logger(__name__)

RENEW_S = 0.5  # longest time between two renewals of the broker's lease
EXPIRE_S = 10.0
RETRY_S = 0.25
GROUP_S = 0.002  # least time between the starts of two groups
TAKE_S = RENEW_S / 8  # time between two takings of jobs, so that several brokers share those of a lost one
MOST_RECORDS = 8192  # in one group
IN_A_ROW = 8  # groups between two steps of other work
MOST_BYTES = 4 << 20  # in one group, unless a single record is larger

Wake = Callable[[], None]
Question = Callable[[JournalReader], Any]


class _Group(NamedTuple):
    """Records, and the sequence number that is reached once they are journaled."""

    records: Sequence[Record]
    sequence: int


class JobsLost(NamedTuple):
    """Jobs that this broker does not hold: it lost them, or another broker was faster to take them."""

    job_ids: frozenset[int]


class JobsGained(NamedTuple):
    """Unfinished jobs that this broker holds now, of brokers that are gone."""

    jobs: list[StoredJob]


class BrokersListed(NamedTuple):
    """The addresses of all live brokers of the journal."""

    addresses: tuple[str, ...]


JournalEvent = JobsLost | JobsGained | BrokersListed


@dataclass(frozen=True, slots=True)
class Keep:
    """The limits of a journal: the age of results, in seconds of the journal's time, and the size in bytes."""

    seconds: float = 7 * 86400.0
    num_bytes: int = 1 << 30


class TakingRule:
    """When a broker may take the jobs of lost ones, by its own renewals. Times are of one clock, in seconds.

    If a renewal was late, the journal may have been away for all. Then the others get the time of a lease.
    """

    def __init__(self, now: float) -> None:
        self._renewed, self._takes_from = now, now

    def may_take(self, now: float) -> bool:
        """Note a renewal, and return whether the broker may take jobs with it."""
        if now > self._renewed + LEASE_S:
            self._takes_from = now + LEASE_S
        self._renewed = now
        return now >= self._takes_from


class JournalWriter:
    """Journals groups of records in its own thread.

    - `durable`: the sequence number up to which all records are journaled, except those of lost jobs.
    - `events`: what happened to jobs and brokers. Those of records up to `durable` are in it already.
    - `held_until`: until when, by the monotonic clock, all jobs that other brokers have taken are in `events`.
    - `trouble`: why the journal cannot be written now, or "". The writer tries again.
    - `lost`: why the journal can never be written again, or "". The broker must stop.
    - `full`: why the journal accepts no new jobs, or "". The unfinished jobs alone take more than the allowed space.
    - `num_groups`, `write_s`: number of journaled groups, and the seconds spent.
    """

    def __init__(self, journal: Journal, wake: Wake, keep: Keep | None = None) -> None:
        self.durable, self.trouble, self.lost, self.full = 0, "", "", ""
        self.events: deque[JournalEvent] = deque()
        self.held_until = 0.0
        self._taking = TakingRule(time.monotonic())
        self.num_groups, self.write_s = 0, 0.0
        self._journal, self._wake, self._keep = journal, wake, keep or Keep()
        self._queue: SimpleQueue[tuple[int, Sequence[Record], int]] = SimpleQueue()
        self._waiting, self._given = deque[_Group](), deque[_Group]()  # given to the journal, and not written yet
        self._closing = threading.Event()
        self._next_group = self._next_renewal = self._next_expiry = self._next_note = 0.0
        self._addresses: tuple[str, ...] = ()
        self._renewed = time.monotonic()
        self._num_events = 0
        self._gained: deque[tuple[int, frozenset[int]]] = deque()  # number of the event, ids: not handled by the broker
        self._thread = threading.Thread(target=self._run, name="specq-journal", daemon=True)
        self._thread.start()

    def put(self, sequence: int, records: Sequence[Record], num_handled: int = 0) -> None:
        """Hand over records, made after the first `num_handled` events. `durable` will reach `sequence`."""
        self._queue.put((sequence, records, num_handled))

    def close(self, timeout_s: float = 5.0) -> None:
        """Journal the remaining records and the time, within `timeout_s` seconds, and close the journal."""
        self._closing.set()
        self._queue.put((0, (), 0))  # ends its wait
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._journal.close()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._try(self._renew)
            while not self._closing.is_set() or not self._queue.empty():
                self._turn()
            self._try(self._note_time)
        except JournalLostError as error:
            self.lost = str(error)
        except BaseException as error:  # the broker must notice it and stop
            self.lost = f"the journal's thread died: {error!r}"
            raise
        finally:
            self._wake()

    def _turn(self) -> None:
        """Wait for records, and journal them; then do what else is due."""
        is_idle = not self._gather(max(self._next_renewal - time.monotonic(), 0.0))
        while (self._waiting or self._given) and not self._try(self._write):
            if self._closing.wait(RETRY_S):
                return
        now = time.monotonic()
        if now >= self._next_renewal:
            self._try(self._renew)
        if now >= self._next_note and not self.trouble:
            self._next_note = now + NOTE_S
            self._try(self._note_time)
        self._tidy(idle=is_idle)

    def _gather(self, wait_s: float) -> bool:
        """Make groups of all waiting records; return False if there are none within `wait_s`, at most RENEW_S."""
        try:
            sequence, first, num_handled = self._queue.get(timeout=min(wait_s, RENEW_S))
        except Empty:
            return False
        time.sleep(max(0.0, self._next_group - time.monotonic()))
        self._next_group = time.monotonic() + GROUP_S
        records = list(self._current(first, num_handled))
        while len(records) < MOST_RECORDS and not self._queue.empty():
            newer, more, num_handled = self._queue.get()
            sequence = max(sequence, newer)
            records.extend(self._current(more, num_handled))
        for start, end in pairwise([0, *_ends(records)]):
            self._waiting.append(_Group(records[start:end], sequence if end == len(records) else 0))
        if not records and (before := self._waiting or self._given):
            before[-1] = before[-1]._replace(sequence=max(before[-1].sequence, sequence))
        elif not records:
            self._reach(sequence)
        return bool(records)

    def _write(self) -> None:
        """Journal all waiting groups, and what comes meanwhile."""
        started = time.monotonic()
        try:
            for lost in self._journal.write_all(self._next_groups()):
                self._report_trouble("")
                group = self._given.popleft()
                if lost:
                    self._add(JobsLost(lost))
                self.num_groups += 1
                self._reach(group.sequence)
        finally:
            self.write_s += time.monotonic() - started

    def _next_groups(self) -> Iterator[Sequence[Record]]:
        """Yield the groups to write: first what was given before, and is not written."""
        for group in [*self._given]:
            yield group.records
        for _ in range(IN_A_ROW):
            if not self._waiting and (time.monotonic() < self._next_group or not self._gather(0.0)):
                return
            self._given.append(self._waiting.popleft())
            yield self._given[-1].records

    def _reach(self, sequence: int) -> None:
        if sequence > self.durable:
            self.durable = sequence
            self._wake()

    def _current(self, records: Sequence[Record], num_handled: int) -> Sequence[Record]:
        """Leave out the records of jobs that were taken, if the broker did not know that yet."""
        while self._gained and self._gained[0][0] < num_handled:
            self._gained.popleft()
        gained = frozenset[int]().union(*(job_ids for _, job_ids in self._gained))
        return [record for record in records if record.job_id not in gained] if gained else records

    def _renew(self) -> None:
        """Renew the lease, and take jobs of lost brokers."""
        sent = time.monotonic()
        self._next_renewal = sent + RENEW_S
        addresses = self._journal.renew()
        if lost := self._journal.lost():
            self._add(JobsLost(lost))
        self.held_until = sent + HELD_S
        may_take = self._taking.may_take(sent)
        if addresses != self._addresses:
            self._addresses = addresses
            self._add(BrokersListed(addresses))
        while may_take and (jobs := self._journal.take()):
            log.warning("jobs_taken", jobs=len(jobs))
            self._gained.append((self._num_events, frozenset(job.submit.job_id for job in jobs)))
            self._add(JobsGained(jobs))
            if len(addresses) > 1:
                self._next_renewal = time.monotonic() + TAKE_S
                break
        if addresses:
            self._wake()

    def _add(self, event: JournalEvent) -> None:
        self._num_events += 1
        self.events.append(event)
        self._wake()

    def _note_time(self) -> None:
        self._journal.note_time(Noted(time.monotonic() + self._journal.offset, read_machine()))

    def _try(self, action: Callable[[], None]) -> bool:
        """Run an action on the journal. Return False if the journal is busy."""
        try:
            action()
        except JournalBusyError as error:
            self._report_trouble(str(error))
            return False
        self._report_trouble("")
        return True

    def _report_trouble(self, trouble: str) -> None:
        if trouble != self.trouble:
            log.warning("journal_write_failed", reason=trouble) if trouble else log.info("journal_recovered")
            self.trouble = trouble
            self._wake()

    def _tidy(self, *, idle: bool) -> None:
        """Do one step towards the limits. If idle, do all steps. A busy journal is handled later."""
        with suppress(JournalBusyError):
            while self._step(idle=idle) and idle and self._queue.empty():
                pass

    def _step(self, *, idle: bool) -> bool:
        """Forget some old or surplus results, and return some free space. False: there was no work."""
        now, most = time.monotonic(), self._keep.num_bytes
        is_due = now >= self._next_expiry
        kept = self._journal.keep_to(most, now + self._journal.offset - self._keep.seconds if is_due else 0.0)
        if is_due and not kept.num_forgotten:
            self._next_expiry = now + EXPIRE_S
        self._report_full(f"the jobs that have not ended take up all {most >> 20} MB of the journal" * kept.is_full)
        return self._journal.give_back(most, idle=idle) or kept.num_forgotten > 0

    def _report_full(self, full: str) -> None:
        if full != self.full:
            log.warning("journal_space_exhausted", reason=full) if full else log.info("journal_space_recovered")
            self.full = full
            self._wake()


def _ends(records: Sequence[Record]) -> Iterator[int]:
    """Cut records into groups of at most MOST_BYTES, and yield the end of each."""
    size = 0
    for place, record in enumerate(records):
        added = num_bytes(record)
        if size and size + added > MOST_BYTES:
            yield place
            size = 0
        size += added
    if records:
        yield len(records)


class JournalLookup:
    """Answers questions about the journal in its own thread. `answers` has (key, answer or JournalBusyError)."""

    def __init__(self, reader: JournalReader, wake: Wake) -> None:
        self.answers: deque[tuple[Any, Any]] = deque()
        self._reader, self._wake = reader, wake
        self._queue: SimpleQueue[tuple[Any, Question] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="specq-lookup", daemon=True)
        self._thread.start()

    def ask(self, key: Any, question: Question) -> None:
        """Ask a question. Its answer comes with the key."""
        self._queue.put((key, question))

    def close(self) -> None:
        """Stop. Open questions are not answered."""
        self._queue.put(None)
        self._thread.join()
        self._reader.close()

    def _run(self) -> None:
        while (asked := self._queue.get()) is not None:
            key, question = asked
            self.answers.append((key, self._answer(question)))
            self._wake()

    def _answer(self, question: Question) -> Any:
        try:
            return question(self._reader)
        except JournalBusyError as error:
            return error
        except Exception as error:  # noqa: BLE001 - every question needs an answer
            return JournalBusyError(f"the journal cannot be read: {error}")
