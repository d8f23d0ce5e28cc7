"""The broker's side towards clients: jobs come in, tokens go out.

Rules: submitting twice is harmless. The same id with the same content attaches to the job, and what the client lacks is
sent again; the same id with other content is refused. What a client hears of a job is in the journal before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import structlog

from specq.broker.admission.limits import clipped
from specq.broker.admission.overload import overload
from specq.broker.jobs.job import Job, Reader
from specq.broker.state import Find, State
from specq.broker.workers.placement import Placement
from specq.broker.workers.status import status_report
from specq.broker.workers.tokenizers import no_verifier
from specq.journal import JobDropped, StoredJob
from specq.protocol import (
    Accepted,
    Cancel,
    Failed,
    Follow,
    GetStatus,
    JournalBusyError,
    ModelInfo,
    Status,
    Submit,
    too_large,
)
from specq.verification import reason_against

log = structlog.get_logger(__name__)

MAX_ASKING = 64  # messages about one job that wait for the journal's word of it
MAX_MISSED = 40  # ticks in a row at which a reader takes nothing, before the job is no longer sent to it

Ask = Callable[..., None]


class Intake:
    """Handlers of client messages, and what tells clients of their jobs."""

    def __init__(self, state: State, placement: Placement) -> None:
        self.state, self.placement = state, placement
        self._asked: dict[int, list[tuple[Ask, bytes, Any]]] = {}  # job -> what waits for the journal's word of it

    # --- jobs come in -----------------------------------------------------------------------------------------------

    def submit(self, client: bytes, message: Submit, now: float) -> None:
        """Take a job, or attach the client to the one that it is."""
        self._with_job(self._submit, client, message)

    def _submit(self, client: bytes, message: Submit, known: Job | None) -> None:
        code, reason = self._refusal(client, message, known)
        if code == "no_verifier" and self.state.in_grace:
            return
        if reason:
            self._refuse(client, message.job_id, code, reason)
            return
        job = known or self._take(client, message)
        job.attach(client, message.have, self.state.roles.shown(client))
        self.tell(job)
        if known is None:
            self.placement.place_waiting()

    def _take(self, client: bytes, message: Submit) -> Job:
        """Make a job of a message."""
        self.state.counts["jobs"] += 1
        deadline = self.state.wall + message.deadline_ms / 1000 if message.deadline_ms else 0.0
        job = Job(message, self.state.roles.peer(client), self.state.wall, deadline)
        job.model = message.model or self.state.roster.verifiers()[0].model.name
        self.state.jobs.add(job)
        self.state.record(job.taken(), job)
        return job

    def _refusal(self, client: bytes, message: Submit, known: Job | None) -> tuple[str, str]:
        """Return (code, reason) against a job; the reason is "" if there is none."""
        if known is not None and not self._owns(client, known):
            return "forbidden", f"job {message.job_id} is another client's; take another id"
        if known is not None:
            return "invalid", "" if known.same_content(message) else f"job {message.job_id} exists with other content"
        verifiers = self.state.roster.verifiers(message.model)
        if not verifiers:
            return "no_verifier", no_verifier(message.model)
        if self.state.closing or self.state.trouble:
            return "busy", f"no new jobs now: {self.state.closing or self.state.trouble}"
        if reason := overload(self.state, self.state.roles.owner(client)):
            return "busy", reason
        refused = self.state.roles.refused_priority(client, message.priority)
        return "invalid", too_large(message) or misfit(message, verifiers[0].model) or refused

    def _refuse(self, client: bytes, job_id: int, code: str, reason: str) -> None:
        self.state.send_front(client, Failed(job_id=job_id, code=code, reason=clipped(reason)))

    def follow(self, client: bytes, message: Follow, now: float) -> None:
        """Attach a client to a job that it knows by its id only."""
        self._with_job(self._follow, client, message)

    def _follow(self, client: bytes, message: Follow, job: Job | None) -> None:
        if job is None or not self._owns(client, job):
            reason = f"there is no job {message.job_id}: it was never submitted here, or its result has expired"
            self._refuse(client, message.job_id, "unknown", reason)
            return
        job.attach(client, message.have, self.state.roles.shown(client), info=True)
        self.tell(job)

    def cancel(self, client: bytes, message: Cancel, now: float) -> None:
        """Stop a job; what is committed stays."""
        if message.job_id in self._asked:
            if len(self._asked[message.job_id]) < MAX_ASKING:
                self._asked[message.job_id].append((self._cancel, client, message))
        else:
            self._cancel(client, message, self.state.jobs.get(message.job_id))

    def _cancel(self, client: bytes, message: Cancel, job: Job | None) -> None:
        if job is not None and self._owns(client, job) and not job.finish:
            job.finish = "cancelled"
            self.finish(job)

    def _owns(self, client: bytes, job: Job) -> bool:
        return self.state.roles.owns(client, job.owner)

    # --- what only the journal knows ----------------------------------------------------------------------------------

    def _with_job(self, act: Ask, client: bytes, message: Submit | Follow) -> None:
        """Act on the job that a message names; the journal is asked for one that is not in memory."""
        job_id = message.job_id
        job = self.state.jobs.get(job_id)
        if job is not None or not self.state.ledger.has_journal:
            act(client, message, job)
        elif len(self._asked) >= self.state.max_jobs:
            self._refuse(client, job_id, "busy", "too many clients wait for the journal")
        else:
            if job_id not in self._asked:
                self.state.emit(Find(job_id))
            waiting = self._asked.setdefault(job_id, [])
            if len(waiting) < MAX_ASKING:  # else it asks again
                waiting.append((act, client, message))

    def found(self, job_id: int, stored: StoredJob | JournalBusyError | None) -> None:
        """Learn what the journal knows of a job, and act on what waited for that."""
        waiting = self._asked.pop(job_id, [])
        if isinstance(stored, JournalBusyError):
            for _, client, _ in waiting:
                self._refuse(client, job_id, "busy", str(stored))
            return
        if stored is not None and stored.finish and self.state.jobs.get(job_id) is None:
            self.state.jobs.keep(Job.restored(stored))
        for act, client, message in waiting:
            if self.state.roles.stands(self.state.roles.shown(client), "client"):
                act(client, message, self.state.jobs.get(job_id))

    # --- the end of a job ---------------------------------------------------------------------------------------------

    def finish(self, job: Job) -> None:
        """Free the job's workers, keep its result, tell its clients."""
        self.state.counts["finished_" + job.finish] += 1
        job.ended = self.state.wall
        self.placement.release(job)
        self.state.jobs.retire(job)
        self.state.record(job.end_record(), job, ended=True)
        if job.sealed:
            self.tell(job)
        self.placement.place_waiting()

    def fail(self, job: Job, code: str, reason: str) -> None:
        """End a job with a stated failure."""
        reason = clipped(reason)
        log.warning("job_failed", job=job.job_id, code=code, reason=reason)
        job.finish, job.failure = "error", Failed(job_id=job.job_id, code=code, reason=reason)
        self.finish(job)

    def end_overdue(self) -> None:
        """Fail the jobs whose deadline has passed."""
        wall = self.state.wall
        for job in [job for job in self.state.jobs.active.values() if job.deadline and job.deadline <= wall]:
            done = f"{len(job.token_ids)} of at most {job.params.max_tokens} tokens"
            self.fail(job, "deadline", f"the deadline passed with {done} generated")

    def drop_unregistered(self, reason: str) -> None:
        """Refuse after all the jobs that the journal cannot take."""
        for job in [job for job in self.state.jobs.active.values() if not job.registered]:
            self.placement.release(job)
            self.state.jobs.drop(job)
            self.state.record(JobDropped(job.job_id), job)
            for client in job.readers:
                self._refuse(client, job.job_id, "busy", reason)
            job.readers.clear()

    # --- tokens go out ------------------------------------------------------------------------------------------------

    def tell(self, job: Job) -> None:
        """Send to all who follow a job what the journal has and they lack."""
        if job.registered:
            for client, reader in job.readers.items():
                if not reader.missed:
                    self._tell(job, client, reader)

    def _tell(self, job: Job, client: bytes, reader: Reader) -> None:
        """Bring one client up to date; of a failed job the tokens come first, then why it failed."""
        if not reader.greeted:
            self.state.send_front(client, job.info(self.state.wall) if reader.info else Accepted(job_id=job.job_id))
            reader.greeted = True
        if job.journaled > reader.sent or (job.sealed and not job.failure):
            self.state.send_front(client, job.delta(reader.sent))
            reader.sent = max(reader.sent, job.journaled)
        if job.sealed and job.failure:
            self.state.send_front(client, job.failure)

    def undelivered_tokens(self, job: Job, client: bytes, base_len: int) -> None:
        """Learn that a client did not take tokens: they are sent again at the next tick, from the same position on."""
        reader = job.readers.get(client)
        if reader is not None:
            reader.sent, reader.missed = min(reader.sent, base_len), True

    def tell_again(self, job: Job) -> None:
        """Send what clients did not take before, but not for ever to one that is gone; it may attach again."""
        for client, reader in list(job.readers.items()):
            reader.num_missed = reader.num_missed + 1 if reader.missed else 0
            reader.missed = False
            if reader.num_missed > MAX_MISSED:
                del job.readers[client]
        self.tell(job)

    def get_status(self, client: bytes, message: GetStatus, now: float) -> None:
        """Answer with the broker's state."""
        self.state.send_front(client, Status(report=status_report(self.state, now)))


def misfit(message: Submit, model: ModelInfo) -> str:
    """Return why a job does not fit a model, or ""."""
    prompt = message.prompt_ids
    if reason := reason_against(message.params.strategy):
        return reason
    if not len(prompt):
        return "the prompt is empty"
    if np.any(prompt < 0) or np.any(prompt >= model.num_tokens):
        return f"the prompt has token ids outside the vocabulary of {model.name} (0 to {model.num_tokens - 1})"
    named = [token for token in message.params.token_ids_named() if token >= model.vocab_size]
    if named:
        return f"token id {named[0]} of a parameter is outside the vocabulary of {model.name} (0 to {model.vocab_size - 1})"
    if len(prompt) + message.params.max_tokens > model.max_length:
        return (
            f"a prompt of {len(prompt)} tokens and max_tokens {message.params.max_tokens} exceed the "
            f"{model.max_length} tokens that {model.name} takes"
        )
    return ""
