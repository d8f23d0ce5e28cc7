"""Lists of jobs, for `specq jobs`: those that wait and run from memory, those that ended from the journal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import orjson

from specq.broker.effects import FindFinished
from specq.broker.jobs.job import BrokerJob
from specq.broker.state import BrokerState
from specq.journal import JobSummary
from specq.protocol import JobList, JournalBusyError, ListJobs

MOST_LINES = 10_000
_ENDED = {"stop": "finished", "length": "finished", "cancelled": "cancelled", "error": "failed"}


class ListedJob(NamedTuple):
    """A job: `state` is waiting, running, finished, failed or cancelled; age_s: since it was submitted."""

    job_id: int
    label: str
    state: str
    tokens: int
    age_s: float
    priority: int
    model: str
    owner: str


class Listing:
    """Handlers of requests for the list of jobs."""

    def __init__(self, state: BrokerState) -> None:
        self.state = state
        self._asked: set[bytes] = set()  # clients for which the journal is asked

    def _may_see(self, client: bytes, job: BrokerJob) -> bool:
        return self.state.roles.owns(client, job.request.owner)

    def ask(self, client: bytes, message: ListJobs) -> None:
        """Answer with a list; if there is a journal, after it has answered."""
        limit, skip = min(max(message.limit, 0), MOST_LINES), max(message.skip, 0)
        if self.state.ledger.has_journal:
            if client not in self._asked:  # else it is being answered
                self._asked.add(client)
                self.state.outbox.add(FindFinished(client, limit, skip, self.state.roles.owner(client)))
            return
        finished = [job for job in reversed(self.state.jobs.finished.values()) if self._may_see(client, job)]
        self._answer(client, skip, [summary_of(job) for job in finished[skip : skip + limit]])

    def answer(self, client: bytes, skip: int, found: list[JobSummary] | JournalBusyError) -> None:
        """Answer with what the journal found; if it cannot be read, with what is in memory."""
        self._asked.discard(client)
        if not self.state.roles.is_client(client):
            return
        self._answer(client, skip, [] if isinstance(found, JournalBusyError) else found)

    def _answer(self, client: bytes, skip: int, finished: Iterable[JobSummary]) -> None:
        active = [] if skip else [job for job in self.state.jobs.active.values() if self._may_see(client, job)]
        lines = [self._line(summary_of(job), "running" if job.session.verifier else "waiting") for job in active]
        lines += [self._line(one, _ENDED.get(one.finish, one.finish)) for one in finished]
        data = orjson.dumps([line._asdict() for line in lines])
        self.state.outbox.send_front(client, JobList(skip=skip, data=np.frombuffer(data, np.uint8)))

    def _line(self, job: JobSummary, state: str) -> ListedJob:
        age_s = round(max(0.0, self.state.clock.journal_time - job.submitted), 1)
        return ListedJob(job.job_id, job.label, state, job.num_tokens, age_s, job.priority, job.model, job.owner)


def summary_of(job: BrokerJob) -> JobSummary:
    """Return the summary of a job in memory, as the journal gives it of the others."""
    request, transcript = job.request, job.transcript
    return JobSummary(
        job.job_id,
        request.submit.label,
        request.model,
        request.owner,
        request.priority,
        transcript.finish,
        transcript.num_tokens,
        request.submitted,
        transcript.ended_at,
    )
