"""Sessions for verifiers: places jobs, moves them, takes them back, and handles lost workers.

Rule: each session is opened under a new epoch. The broker ignores what a former verifier still sends for it.

The journal names the verifier of a job by its incarnation. So a restarted broker knows which verifiers must come back.
Their jobs wait until a verifier of that incarnation registers or the time is over. In the first case the jobs may
continue. The second case counts as a crash. This also finds a job that crashes verifier and broker together. A broker
or verifier that stops in good order leaves no job bound.
"""

from __future__ import annotations

from collections.abc import Iterable

from specq.broker.state.job import BrokerJob, JobEvent, JobState, Requirements
from specq.broker.state.ledger import bound_record, crashed_record
from specq.broker.state.memory import GRACE_S, BrokerState, Disconnect
from specq.broker.state.registry import Worker
from specq.broker.workers.assignment import (
    DrafterAssignment,
    after_crash,
    choose,
    is_given_up,
    moves,
    open_to,
    to_clear,
)
from specq.journal import NO_CRASHES, Crashes
from specq.protocol import Close, Open, SessionFailed

MAX_FAILURES = 3  # times that verifiers may give a job back before it fails


class Placement:
    """Places jobs on verifiers, and takes them away again."""

    def __init__(self, state: BrokerState) -> None:
        self.state, self.drafter_assignment = state, DrafterAssignment(state)
        self.bindings = Bindings(state)

    def settle(self) -> None:
        """Place the waiting jobs, and assign missing drafters."""
        self.place_waiting()
        self.drafter_assignment.assign_all()

    def lose(self, worker: Worker, *, crashed: bool = False) -> None:
        """Remove a worker, and give its jobs to others. If a verifier `crashed`, each of its jobs may be the cause."""
        self.state.workers.remove(worker.identity)
        jobs = self.state.jobs.among(worker.job_ids)
        self._trace_loss(worker, jobs, "crashed" if crashed else "left")
        if worker.hello.role == "draft":
            for job in jobs:
                job.drafters.drop(worker.identity)
            return
        self.state.outbox.add(Disconnect(worker.identity))
        if crashed:
            self.state.clock.allow(GRACE_S)
            self.bindings.note_crash(jobs)
        else:
            for job in jobs:
                self.bindings.let_wait(job)

    def _trace_loss(self, worker: Worker, jobs: Iterable[BrokerJob], how: str) -> None:
        for trace in [job.trace for job in jobs if job.trace is not None]:
            trace.lose(worker.identity)
            trace.note(how, self.state.clock.now, worker=worker.name)

    def clear(self, job: BrokerJob) -> None:
        """End the quarantine of a job that made good progress. Other jobs may run beside it again."""
        self.bindings.set_crashes(job, NO_CRASHES)
        self.place_waiting()

    # --- sessions ---------------------------------------------------------------------------------------------------

    def place_waiting(self) -> None:
        """Open waiting jobs in the queue's order while there is space."""
        queue = self.state.jobs.queue
        while (
            (found := queue.take(self._places_for, self.state.clock.journal_time)) is not None
            or self._clear_for_quarantined()
            or self._take_from_background()
        ):
            if found is not None:
                job, able = found
                self.open(job, self._best_of(job, able))
                self.drafter_assignment.assign_drafters(job)

    def _places_for(self, requirements: Requirements, freed: Worker | None = None) -> list[Worker] | None:
        """Return the verifiers with space that meet the requirements, or None. `freed`: this one has space, too."""
        able, isolated = self._able(requirements), self.state.jobs.isolated()
        quarantined = [one for one in self.state.jobs.queue.quarantined() if one.model == requirements.model]
        wanted = {worker.identity for one in quarantined for worker in self._able(one)}
        able = [worker for worker in able if worker.has_room or worker is freed]
        return open_to(able, isolated, alone=requirements.alone, wanted=wanted) or None

    def _able(self, requirements: Requirements) -> list[Worker]:
        """Return the verifiers that meet the requirements, with or without space."""
        able = [w for w in self.state.workers.verifiers(requirements.model) if w.serves(requirements)]
        return [w for w in able if w.identity not in requirements.avoided] or able

    def _clear_for_quarantined(self) -> bool:
        """If jobs in quarantine wait, free the best verifier for them. Return False if that is not needed."""
        for requirements in self.state.jobs.queue.quarantined():
            worker = to_clear(self._able(requirements), self.state.jobs.isolated())
            if worker is not None:
                for job in self.state.jobs.among(worker.job_ids):
                    self.take_from(job, worker)
                    self.bindings.let_wait(job)
                return True
        return False

    def _take_from_background(self) -> bool:
        """If a job waits for a place that a job in the background has, let the latter wait. False: none is needed."""
        now = self.state.clock.journal_time
        for requirements in self.state.jobs.queue.in_front():
            able = [w for w in self._able(requirements) if w.state == "ready" and w.job_ids]
            helpful = [worker for worker in able if self._places_for(requirements, freed=worker)]
            jobs = self.state.jobs.among(job_id for worker in helpful for job_id in worker.job_ids)
            yielding = [job for job in jobs if job.request.is_background(now)]
            job = min(yielding, key=lambda one: one.transcript.num_tokens, default=None)
            worker = None if job is None else self.state.workers.get(job.session.verifier)
            if job is not None and worker is not None:
                self.take_from(job, worker)
                self.bindings.let_wait(job)
                return True
        return False

    def _best_of(self, job: BrokerJob, able: list[Worker]) -> Worker:
        """Return the verifier that a lost broker's job has been at, because it has the KV, or the best one."""
        for worker in able:
            if job.session.incarnation == worker.hello.incarnation:
                return worker
        return choose(able, job.request.max_length, job.request.prefix_keys(self.state.sharers(job.request)))

    def hand_over(self, worker: Worker) -> None:
        """Move the jobs of a leaving verifier to others. Jobs without another place end there."""
        for job in self.state.jobs.among(worker.job_ids):
            able = self._places_for(job.requirements)
            if able is not None:
                self._move(job, self._best_of(job, able))

    def rebalance(self) -> None:
        """Move jobs to verifiers that have joined."""
        if len(self.state.jobs.queue):
            return
        now = self.state.clock.now
        for alike in self.state.workers.alike():
            isolated = self.state.jobs.isolated()
            recent = now - 2 * self.state.settings.heartbeat_ms / 1000
            able = [w for w in alike if w.identity not in isolated and not w.is_unreachable and w.last_seen >= recent]
            jobs = [job for w in able for job in self.state.jobs.among(w.job_ids)]
            if len({w.capabilities for w in able}) > 1:  # jobs that need what only some can do stay where they are
                common = frozenset.intersection(*[w.capabilities for w in able])
                jobs = [job for job in jobs if job.request.capabilities <= common]
            for job, to in moves(able, jobs, now):
                self._move(job, to)

    def _move(self, job: BrokerJob, to: Worker) -> None:
        """Let another verifier continue a job."""
        former = self.state.workers.get(job.session.verifier)
        if former is not None:
            self.take_from(job, former)
        self.state.counts["moved"] += 1
        if job.trace is not None:
            job.trace.note("moved", self.state.clock.now, verifier=to.name)
        job.session.moved_at = self.state.clock.now
        self.open(job, to)

    def take_from(self, job: BrokerJob, worker: Worker) -> None:
        """Close a job's session at its verifier."""
        worker.job_ids.discard(job.job_id)
        job.session.verifier = b""
        self.state.outbox.send_back(worker.identity, Close(session_id=job.job_id, epoch=job.session.epoch))

    def open(self, job: BrokerJob, worker: Worker) -> None:
        """Open a job's session at a verifier, from the transcript on."""
        request, transcript = job.request, job.transcript
        job.note(JobEvent.OPENED)
        job.session.open(worker.identity, self.state.next_epoch(job))
        trace = job.trace
        if trace is not None:
            trace.expect(worker.identity, worker.name, "target")
            trace.note("opened", self.state.clock.now, verifier=worker.name, context_tokens=transcript.length)
        worker.job_ids.add(job.job_id)
        sharers = self.state.sharers(request)
        worker.take(request.max_length, request.prefix_keys(sharers))
        weights = worker.binding(job.requirements.weights) or worker.weights
        self.bindings.bind(job, weights, worker.hello.incarnation)
        self.state.outbox.send_back(
            worker.identity,
            Open(
                session_id=job.job_id,
                epoch=job.session.epoch,
                prompt_len=transcript.prompt_len,
                tokens_left=transcript.tokens_left,
                params=request.params,
                speculation=request.speculation,
                trace=trace is not None and trace.in_all_processes,
                explain=request.submit.explain,
                owner=sharers,
                by_owner=worker.knows_owners,
                former_ends=weights != worker.weights,
                is_background=worker.knows_background and request.is_background(self.state.clock.journal_time),
                token_ids=transcript.context(),
            ),
        )
        self.drafter_assignment.resume(job)

    def open_anew(self, job: BrokerJob) -> None:
        """Let a job's verifier begin its session again, without its present drafts."""
        verifier = self.state.workers.get(job.session.verifier)
        if verifier is not None:
            self.open(job, verifier)

    def drafted_by(self, worker: Worker) -> list[BrokerJob]:
        """Return the jobs of a drafter."""
        return [job for job in self.state.jobs.among(worker.job_ids) if worker.identity in job.drafters.identities()]

    def release(self, job: BrokerJob) -> None:
        """Free the workers of an ended job."""
        verifier = self.state.workers.get(job.session.verifier)
        if verifier is not None:
            self.take_from(job, verifier)
        job.session.verifier = b""
        self.drafter_assignment.release(job)

    def session_failed(self, verifier: bytes, message: SessionFailed) -> None:
        """Handle a verifier that cannot continue a session: try another verifier, or fail the job."""
        job = self.state.jobs.active.get(message.session_id)
        if job is None or not job.session.is_at(verifier, message.epoch):
            return
        worker = self.state.workers.get(verifier)
        if worker is not None:
            worker.job_ids.discard(job.job_id)
        if message.retry:
            self.give_back(job, message.reason)
            self.place_waiting()
        else:
            self.state.jobs.give_up(job, message.reason)

    def give_back(self, job: BrokerJob, reason: str) -> None:
        """Note that a verifier cannot continue a job. Another one tries, unless too many have failed."""
        session, request, now = job.session, job.request, self.state.clock.now
        session.verifier = b""
        session.num_failures += 1
        if job.trace is not None:
            job.trace.note("given back", now, reason=reason[:300])
        self.state.faults.note("given_back", str(job.job_id), reason, now, by=request.bucket, owner=request.owner)
        if session.num_failures >= MAX_FAILURES:
            self.state.jobs.give_up(job, f"gave up after {session.num_failures} failures; last: {reason}")
        else:
            self.bindings.let_wait(job)


class Bindings:
    """Binds jobs to verifiers, and unbinds them."""

    def __init__(self, state: BrokerState) -> None:
        self.state = state
        self._absent: dict[int, list[BrokerJob]] = {}  # of former brokers, by incarnation of their verifier

    def bind(self, job: BrokerJob, weights: str, incarnation: int = 0) -> None:
        """Note in job and journal the weights behind its text, and its verifier's incarnation."""
        session = job.session
        if (session.weights, session.incarnation) != (weights, incarnation):
            session.weights, session.incarnation = weights, incarnation
            self.state.record(bound_record(job), job)

    def let_wait(self, job: BrokerJob) -> None:
        """Let a job without a verifier wait for one, unless it is given up."""
        job.session.verifier = b""
        self.bind(job, job.session.weights)
        if job.state is not JobState.GIVEN_UP:
            self.state.jobs.wait(job)

    def note_crash(self, jobs: Iterable[BrokerJob]) -> None:
        """Count a verifier's crash against each of its jobs, and let them continue elsewhere."""
        jobs = list(jobs)
        for job in jobs:
            self.set_crashes(job, after_crash(job, len(jobs)))
            self.let_wait(job)

    def set_crashes(self, job: BrokerJob, crashes: Crashes) -> None:
        """Note in job and journal the crashes that count against a job. Give it up if they reach the limit."""
        job.crashes = crashes
        self.state.jobs.note_quarantine(job)
        self.state.record(crashed_record(job), job)
        if is_given_up(crashes):
            reason = f"{crashes.total} verifiers crashed because of it, {crashes.lone} of them with only this job"
            self.state.jobs.give_up(job, reason)

    # --- after the broker's own crash ---------------------------------------------------------------------------------

    def restore(self, job: BrokerJob) -> None:
        """Take a job from the journal. If a verifier held it and is not here, the job waits for that verifier first."""
        incarnation = job.session.incarnation
        is_absent = incarnation not in {0, *(worker.hello.incarnation for worker in self.state.workers.verifiers())}
        self.state.jobs.add(job, waits=not is_absent)
        if is_absent:
            self._absent.setdefault(incarnation, []).append(job)

    def welcome_back(self, incarnation: int) -> None:
        """Let the jobs of a returned verifier continue: it did not crash."""
        for job in _unfinished(self._absent.pop(incarnation, [])):
            self.let_wait(job)

    def note_absent(self) -> None:
        """Count the verifiers that have not come back as crashed, once their time is over."""
        if self._absent and not self.state.clock.in_grace:
            lost, self._absent = self._absent, {}
            for jobs in lost.values():
                self.note_crash(_unfinished(jobs))


def _unfinished(jobs: list[BrokerJob]) -> list[BrokerJob]:
    """Leave out jobs that ended in the meantime, or went to another broker."""
    return [job for job in jobs if job.state is JobState.ABSENT]
