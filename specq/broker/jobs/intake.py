"""The broker's side towards clients: how jobs enter and end, and what their readers receive.

Readers receive the acceptance of a job, its tokens, its end. Rules: a reader receives only what the journal holds, and
each token once. Tokens of a message not taken are sent again at the next tick. New tokens of several jobs of one client
go in one message.

Rules of jobs:
- Submitting twice is harmless. The same id with the same content attaches to the job. The client receives what it
  lacks. The same id with other content is refused.
- The journal holds a job's data before a client receives it.
- A key may hold at most as many jobs as there are free places. That is half of the queue for one key, a third each for
  two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import structlog

from specq.broker.jobs.lookup import JobLookup, refuse
from specq.broker.state.job import BrokerJob, JobRequest, bucket
from specq.broker.state.ledger import Ledger, ended_record, taken_record
from specq.broker.state.memory import BrokerState, Send, clipped
from specq.broker.state.registry import Worker, incapable
from specq.broker.state.transcript import JobReader
from specq.broker.workers.placement import Placement
from specq.broker.workers.tokenizers import no_verifier
from specq.journal import JobDropped
from specq.protocol import (
    Accepted,
    Cancel,
    Failed,
    Follow,
    JobTokens,
    ModelInfo,
    Submit,
    Tokens,
    decode,
    reason_against_prompt_rows,
    too_large,
    type_of,
)
from specq.verification import reason_against

Span = tuple[BrokerJob, int, int]  # a job, and the range of generated tokens that a client lacks: start, end


class Delivery:
    """Sends the readers of jobs the tokens that the journal holds and they lack."""

    def __init__(self, state: BrokerState) -> None:
        self.state = state
        self._changed: dict[int, BrokerJob] = {}  # since the last `flush`

    def note(self, job: BrokerJob) -> None:
        """Note that a job has more to send. `flush` sends it."""
        self._changed[job.job_id] = job

    def flush(self) -> None:
        """Send all readers of the noted jobs what they lack."""
        if self._changed:
            self.update(list(self._changed.values()))

    def update(self, jobs: Sequence[BrokerJob]) -> None:
        """Send all readers of the given jobs what they lack."""
        together: defaultdict[bytes, list[Span]] = defaultdict(list)
        for job in jobs:
            self._changed.pop(job.job_id, None)
            durable = job.durable
            if durable.is_registered:
                end, is_alone = durable.num_tokens, durable.has_ended or job.has_details
                for client, reader in job.readers.by_client.items():
                    if reader.missed:
                        continue
                    if is_alone or not reader.greeted:
                        self._update(job, client, reader)
                    elif end > reader.sent:
                        together[client].append((job, reader.sent, end))
                        reader.sent = end
            if durable.has_ended and job.explanation:
                job.explanation.clear()
        for client, spans in together.items():
            self._send(client, spans)

    def _send(self, client: bytes, spans: Sequence[Span]) -> None:
        """Send a client tokens of running jobs."""
        self.state.outbox.send_front(client, spans[0][0].delta(spans[0][1]) if len(spans) == 1 else tokens_of(spans))
        for job, _, _ in spans:
            if job.trace is not None:
                self._trace(job)

    def _update(self, job: BrokerJob, client: bytes, reader: JobReader) -> None:
        """Send one client what it lacks of one job. For a failed job: first its tokens, then the reason."""
        if not reader.greeted:
            self.state.outbox.send_front(
                client, job.info(self.state.clock.journal_time) if reader.info else Accepted(job_id=job.job_id)
            )
            reader.greeted = True
            if job.trace is not None:
                job.trace.note_once("journaled", self.state.clock.now)
        durable, failure = job.durable, job.transcript.failure
        if durable.num_tokens > reader.sent or (durable.has_ended and not failure):
            self.state.outbox.send_front(client, job.delta(reader.sent))
            reader.sent = max(reader.sent, durable.num_tokens)
            self._trace(job)
        if durable.has_ended and failure:
            self.state.outbox.send_front(client, failure)

    def _trace(self, job: BrokerJob) -> None:
        if (trace := job.trace) is not None and trace.in_all_processes:
            trace.add_often(self.state.clock.now, "delivered", job.durable.num_tokens)

    def update_again(self, jobs: Sequence[BrokerJob]) -> None:
        """Send again what clients did not take."""
        for job in jobs:
            job.readers.next_tick()
        self.update(jobs)

    def note_undelivered(self, effect: Send) -> None:
        """Note that a client did not take a message. Its tokens are sent again from their position."""
        if type_of(effect.frames) not in (Tokens, JobTokens):
            return
        message = decode(effect.frames)
        for tokens in message.each() if isinstance(message, JobTokens) else [message]:
            if isinstance(tokens, Tokens) and (job := self.state.jobs.get(tokens.job_id)) is not None:
                job.readers.note_undelivered(effect.to, tokens.base_len)


def tokens_of(spans: Sequence[Span]) -> JobTokens:
    """Return one message with the tokens of the spans."""
    tokens = chain.from_iterable([job.transcript.token_ids[start:end] for job, start, end in spans])
    origins = b"".join([job.transcript.origins[start:end] for job, start, end in spans])
    return JobTokens(
        job_ids=np.array([job.job_id for job, _, _ in spans], np.int64),
        base_lens=np.array([start for _, start, _ in spans], np.int32),
        num_tokens=np.array([end - start for _, start, end in spans], np.int32),
        token_ids=np.fromiter(tokens, np.int32),
        origins=np.frombuffer(origins, np.uint8),
    )


log = structlog.get_logger(__name__)

MAX_TOKENS = 32_000_000  # that all jobs together have or may generate
MAX_RECORDS = 100_000  # waiting for the journal, before new jobs are refused


class Intake:
    """Handles the messages of clients, and ends jobs."""

    def __init__(self, state: BrokerState, placement: Placement, delivery: Delivery) -> None:
        self.state, self.placement, self.delivery = state, placement, delivery
        self.lookup = JobLookup(state, placement)

    # --- jobs come in -----------------------------------------------------------------------------------------------

    def submit(self, client: bytes, message: Submit) -> None:
        """Take a job, or attach the client to the existing job of that id."""
        self.lookup.with_job(self._submit, client, message)

    def _submit(self, client: bytes, message: Submit, known: BrokerJob | None) -> None:
        code, reason = self._refusal(client, message, known)
        if code == "no_verifier" and self.state.clock.in_grace:
            return
        if reason:
            refuse(self.state, client, message.job_id, code, reason)
            return
        job = known or self._take(client, message)
        self._attach(job, client, message)
        if known is None:
            self.placement.place_waiting()

    def _take(self, client: bytes, message: Submit) -> BrokerJob:
        """Make a job from a message."""
        now = self.state.clock.journal_time
        self.state.counts["jobs"] += 1
        deadline = now + message.deadline_ms / 1000 if message.deadline_ms else 0.0
        submit = replace(message, model=message.model or self.state.workers.verifiers()[0].model.name)
        job = BrokerJob(JobRequest(submit, self.state.roles.peer(client), now, deadline))
        self.state.begin_trace(job)
        if job.trace is not None:
            job.trace.expect(client, "client", "client")
        self.state.jobs.add(job)
        self.state.record(taken_record(job), job)
        return job

    def _attach(self, job: BrokerJob, client: bytes, message: Submit | Follow) -> None:
        """Let a client follow a job, and send it what it lacks."""
        have = min(max(message.have, 0), job.transcript.num_tokens)
        job.readers.attach(client, have, self.state.roles.shown(client), info=isinstance(message, Follow))
        self.delivery.update([job])

    def _refusal(self, client: bytes, message: Submit, known: BrokerJob | None) -> tuple[str, str]:
        """Return (code, reason) against a job. The reason is "" if the job is accepted."""
        if known is not None and not self._owns(client, known):
            return "forbidden", f"job {message.job_id} belongs to another client; use another id"
        if known is not None:
            is_same = known.request.has_content(message)
            return "conflict", "" if is_same else f"job {message.job_id} exists with other content"
        verifiers = self.state.workers.verifiers(message.model)
        if reason := self._unserved(message, verifiers):
            return "no_verifier", reason
        if reason := self.state.roles.refused_tenant(client, message.tenant):
            return "forbidden", reason
        if reason := overload(self.state, self._bucket(client, message.tenant)):
            return "busy", reason
        refused = self.state.roles.refused_priority(client, message.priority)
        sizes = str(too_large(message) or "") or reason_against_prompt_rows(len(message.prompt_ids), message.params)
        return "invalid", sizes or misfit(message, verifiers[0].model) or refused

    def _unserved(self, message: Submit, verifiers: list[Worker]) -> str:
        """Return why no verifier of its model can take a job, or ""."""
        if not verifiers:
            return no_verifier(message.model, self.state.workers.served_models())
        of_model = [verifier for verifier in verifiers if verifier.model.name == verifiers[0].model.name]
        return incapable(of_model, JobRequest(message).capabilities)

    def _bucket(self, client: bytes, tenant: str) -> str | None:
        """Return the bucket whose share of the queue a job uses. None: no bucket applies."""
        roles = self.state.roles
        return bucket(roles.peer(client), tenant) if tenant else roles.owner(client)

    def follow(self, client: bytes, message: Follow) -> None:
        """Attach a client to a job that it knows by its id only."""
        self.lookup.with_job(self._follow, client, message)

    def _follow(self, client: bytes, message: Follow, job: BrokerJob | None) -> None:
        if job is None or not self._owns(client, job):
            reason = f"there is no job {message.job_id}: it was never submitted here, or its result has expired"
            refuse(self.state, client, message.job_id, "unknown", reason)
            return
        self._attach(job, client, message)

    def lose(self, job_ids: Iterable[int]) -> None:
        """Drop the jobs that this broker does not hold. Their readers learn where they are."""
        self.lookup.lose(job_ids, self._follow)

    def cancel(self, client: bytes, message: Cancel) -> None:
        """Stop a job. Its committed tokens stay."""
        if self.lookup.is_asking(message.job_id) or self.state.brokers:
            self.lookup.with_job(self._cancel, client, message)
        else:
            self._cancel(client, message, self.state.jobs.get(message.job_id))

    def _cancel(self, client: bytes, message: Cancel, job: BrokerJob | None) -> None:
        if job is not None and self._owns(client, job) and not job.transcript.finish:
            job.transcript.finish = "cancelled"
            self.finish(job)

    def _owns(self, client: bytes, job: BrokerJob) -> bool:
        return self.state.roles.owns(client, job.request.owner)

    # --- the end of a job ---------------------------------------------------------------------------------------------

    def finish(self, job: BrokerJob) -> None:
        """Free the job's workers, keep its result, and send its clients the end."""
        self.state.counts["finished_" + job.transcript.finish] += 1
        self.state.end_trace(job)
        job.transcript.ended_at = self.state.clock.journal_time
        self.placement.release(job)
        self.state.jobs.retire(job)
        self.state.record(ended_record(job), job, ended=True)
        if job.durable.has_ended:
            self.delivery.update([job])
        self.placement.place_waiting()

    def fail(self, job: BrokerJob, code: str, reason: str) -> None:
        """End a job as failed, with a reason."""
        reason = clipped(reason)
        log.warning("job_failed", job=job.job_id, code=code, reason=reason)
        request, now = job.request, self.state.clock.now
        self.state.faults.note("job_failed", str(job.job_id), reason, now, by=request.bucket, owner=request.owner)
        job.transcript.finish = "error"
        job.transcript.failure = Failed(job_id=job.job_id, code=code, reason=reason)
        self.finish(job)

    def end_overdue(self) -> None:
        """Fail the jobs whose deadline has passed."""
        now = self.state.clock.journal_time
        for job in [job for job in self.state.jobs.active.values() if 0.0 < job.request.deadline <= now]:
            done = f"{job.transcript.num_tokens} of at most {job.transcript.max_tokens} tokens"
            self.fail(job, "deadline", f"the deadline passed with {done} generated")

    def drop_unregistered(self, reason: str) -> None:
        """Refuse the jobs that the journal cannot take, although they were accepted before."""
        for job in [job for job in self.state.jobs.active.values() if not job.durable.is_registered]:
            readers = self.lookup.drop(job)
            self.state.record(JobDropped(job.job_id), job)
            for client in readers:
                refuse(self.state, client, job.job_id, "busy", reason)


def misfit(message: Submit, model: ModelInfo) -> str:
    """Return why a job does not fit a model, or ""."""
    prompt = message.prompt_ids
    if reason := reason_against(message.params.strategy):
        return reason
    if not len(prompt):
        return "the prompt is empty"
    if not 0 <= prompt.min() <= prompt.max() < (limit := model.num_prompt_tokens):
        return f"the prompt has token ids outside the vocabulary of {model.name} (0 to {limit - 1})"
    named = [token for token in message.params.token_ids_named() if token >= (limit := model.vocab_size)]
    if named:
        return f"token id {named[0]} of a parameter is outside the vocabulary of {model.name} (0 to {limit - 1})"
    if len(prompt) + message.params.max_tokens > model.max_length:
        return (
            f"a prompt of {len(prompt)} tokens and max_tokens {message.params.max_tokens} exceed the "
            f"{model.max_length} tokens that {model.name} accepts"
        )
    return ""


def overload(state: BrokerState, bucket: str | None) -> str:
    """Return why the broker cannot take a job in this bucket now, or "". None: no bucket applies."""
    if reason := state.closing or state.ledger.trouble:
        return f"no new jobs at the moment: {reason}"
    return _full_queue(state, bucket) or _slow_journal(state.ledger)


def _full_queue(state: BrokerState, bucket: str | None) -> str:
    num_jobs, most = len(state.jobs.active), state.settings.max_jobs
    if num_jobs >= most:
        return f"the queue is full ({most} jobs); try again when some have finished"
    if state.jobs.num_tokens >= MAX_TOKENS:
        return f"the queue is full ({MAX_TOKENS} tokens of prompts and texts); try again when some jobs have finished"
    if bucket and state.jobs.held[bucket] >= most - num_jobs:
        room = f"no room for more than {state.jobs.held[bucket]} jobs of one key now"
        return f"the queue has {room}; try again when some have finished"
    return ""


def _slow_journal(ledger: Ledger) -> str:
    if ledger.sequence - ledger.settled > MAX_RECORDS:
        return "the journal is behind; try again in a moment"
    return f"{ledger.full}; try again when some have finished" if ledger.full else ""
