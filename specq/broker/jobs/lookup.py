"""Jobs that are not in memory: the journal knows whether they have ended, run at another broker, or never existed.

Rule: requests about one job wait for one answer of the journal. Their order stays.

Rule: a broker whose lease may have run out shows no client a running job. Another broker may have continued it. The
journal is asked for its holder.

Rule: a read of a job shows its end if any broker has shown it before. The others read it in the journal, perhaps before
this broker knows that it is there. So a client that asks for such a job waits until this broker knows.

A journal for several brokers may know a job of another broker. The client then receives its address (`Moved`). If that
broker is gone, the client receives no answer. It asks again, and by then a broker will have taken the job. A job that
this broker lost is dropped here. What it did after the loss was never journaled, so no client has seen it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import structlog

from specq.broker.state.job import BrokerJob, JobEvent
from specq.broker.state.ledger import restored
from specq.broker.state.memory import BrokerState, Find, clipped
from specq.broker.state.transcript import JobReader
from specq.broker.workers.placement import Placement
from specq.journal import StoredJob
from specq.protocol import Cancel, Failed, Follow, JournalBusyError, Moved, Submit

log = structlog.get_logger(__name__)

MAX_ASKING = 64  # messages about one job that wait for the journal's answer
MAX_LOOKUPS = 10_000  # jobs that the journal is asked for at a time
Ask = Callable[[bytes, Any, BrokerJob | None], None]
_Request = tuple[Ask, bytes, Any]


class JobLookup:
    """Finds jobs for requests, in memory or in the journal."""

    def __init__(self, state: BrokerState, placement: Placement) -> None:
        self.state, self._placement = state, placement
        self._asked: dict[int, list[_Request]] = {}  # job id -> requests waiting for the journal's answer
        self._ending: dict[int, list[_Request]] = {}  # job id -> requests waiting until its end is in the journal

    def with_job(self, act: Ask, client: bytes, message: Submit | Follow | Cancel) -> None:
        """Act on the job that a message names. If it is not in memory, ask the journal first."""
        job_id = message.job_id
        job = self.state.jobs.get(job_id)
        is_sure = job is not None and not (isinstance(message, Follow) and self._may_be_lost(job))
        if is_sure or not self.state.ledger.has_journal:
            self._act(act, client, message)
        elif len(self._asked) >= MAX_LOOKUPS:
            refuse(self.state, client, job_id, "busy", "too many clients wait for the journal")
        else:
            if job_id not in self._asked:
                self.state.outbox.add(Find(job_id))
            waiting = self._asked.setdefault(job_id, [])
            if len(waiting) < MAX_ASKING:  # else the client asks again
                waiting.append((act, client, message))

    def _act(self, act: Ask, client: bytes, message: Submit | Follow | Cancel) -> None:
        """Act on the job that a message names, if there is no reason to wait for its end."""
        job = self.state.jobs.get(message.job_id)
        if job is None or isinstance(message, Cancel) or not self._is_ending(job):
            act(client, message, job)
            return
        waiting = self._ending.setdefault(message.job_id, [])
        if len(waiting) < MAX_ASKING:  # else the client asks again
            waiting.append((act, client, message))

    def is_asking(self, job_id: int) -> bool:
        """Return whether the journal is being asked for a job."""
        return job_id in self._asked

    def found(self, job_id: int, stored: StoredJob | JournalBusyError | None) -> None:
        """Take the journal's answer on a job, and handle the requests that waited for it."""
        waiting = self._asked.pop(job_id, [])
        if isinstance(stored, JournalBusyError):
            for _, client, _ in waiting:
                refuse(self.state, client, job_id, "busy", str(stored))
            return
        known = self.state.jobs.get(job_id)
        if stored is not None and known is None and stored.finish:
            job = restored(stored)
            job.note(JobEvent.READ_ENDED)
            self.state.jobs.keep(job)
        elif stored is not None and self.state.brokers and (known is None or self._may_be_lost(known)):
            waiting = [one for one in waiting if not self._sent_away(one[1], stored)]
        for act, client, message in waiting:
            if self.state.roles.is_client(client):
                self._act(act, client, message)

    def settled(self, jobs: Iterable[BrokerJob]) -> None:
        """Handle the requests that waited for the end of these jobs, if it is in the journal."""
        for job in jobs if self._ending else ():
            if job.durable.has_ended:
                self._repeat(self._ending.pop(job.job_id, []))

    def _repeat(self, requests: Iterable[_Request]) -> None:
        for act, client, message in requests:
            if self.state.roles.is_client(client):
                self.with_job(act, client, message)

    def _is_ending(self, job: BrokerJob) -> bool:
        """Return whether other brokers may know the end of a job before this one knows that they do."""
        is_shared = bool(self.state.brokers) and not self.state.ledger.trouble
        return is_shared and bool(job.transcript.finish) and not job.durable.has_ended

    def _may_be_lost(self, job: BrokerJob) -> bool:
        """Return whether another broker may have taken a job that this one has in memory."""
        is_late = bool(self.state.brokers) and self.state.clock.now >= self.state.ledger.held_until
        return is_late and not job.durable.has_ended

    def _sent_away(self, client: bytes, stored: StoredJob) -> bool:
        """Tell a client that may know a job of another broker where it is. False: the client may not know it."""
        if not self.state.roles.owns(client, stored.owner):
            return False
        if stored.holder not in ("", self.state.address):
            moved = Moved(job_id=stored.submit.job_id, address=stored.holder)
            self.state.outbox.send_front(client, moved)
        return True

    def drop(self, job: BrokerJob) -> dict[bytes, JobReader]:
        """Forget a job that the journal does not hold for this broker, and return its readers."""
        self._placement.release(job)
        self.state.jobs.drop(job)
        self.state.end_trace(job)
        readers, job.readers.by_client = job.readers.by_client, {}
        self._repeat(self._ending.pop(job.job_id, []))
        return readers

    def lose(self, job_ids: Iterable[int], follow: Ask) -> None:
        """Drop the jobs that this broker does not hold, and find out for their readers where they are.

        `follow` attaches a reader to a job that is here.
        """
        for job_id in job_ids:
            job = self.state.jobs.get(job_id)
            if job is None:
                continue
            log.warning("job_lost", job=job_id, tokens=job.durable.num_tokens)
            self.state.counts["jobs_lost"] += 1
            for client, reader in self.drop(job).items():
                self.with_job(follow, client, Follow(job_id=job_id, have=reader.sent))


def refuse(state: BrokerState, client: bytes, job_id: int, code: str, reason: str) -> None:
    """Tell a client why its request about a job is refused."""
    state.outbox.send_front(client, Failed(job_id=job_id, code=code, reason=clipped(reason)))
