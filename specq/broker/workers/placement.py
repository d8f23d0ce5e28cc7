"""Sessions to verifiers: jobs are placed, moved, given back, and taken from workers that are lost.

Rule: a session is opened under a new epoch each time, so that whatever its former verifier still sends for it is
ignored.

The journal names the verifier that holds a job by its incarnation, so that a broker that starts again knows which
verifiers must come back. Until one of that incarnation registers, which clears its jobs, or the time for that is over,
which counts as a crash, they are placed nowhere: a job that crashes verifier and broker together is found as well. A
broker or verifier that stops in good order leaves no job bound.
"""

from __future__ import annotations

from collections.abc import Iterable

from specq.broker.state.job import BrokerJob, Requirements
from specq.broker.state.ledger import bound_record, crashed_record
from specq.broker.state.lifecycle import JobEvent, JobState
from specq.broker.state.memory import GRACE_S, BrokerState, Disconnect
from specq.broker.state.registry import Worker
from specq.broker.workers.assignment import DrafterAssignment
from specq.broker.workers.policy import after_crash, choose, is_given_up, moves, open_to, to_clear
from specq.journal import NO_CRASHES, Crashes
from specq.protocol import Close, Open, SessionFailed

MAX_FAILURES = 3  # times that verifiers may give a job back before it is given up


class Placement:
    """Places jobs on verifiers, and takes them away again."""

    def __init__(self, state: BrokerState) -> None:
        self.state, self.drafter_assignment = state, DrafterAssignment(state)
        self.bindings = Bindings(state)

    def settle(self) -> None:
        """Place what waits for a verifier, and give drafters to what lacks them."""
        self.place_waiting()
        self.drafter_assignment.assign_all()

    def lose(self, worker: Worker, *, crashed: bool = False) -> None:
        """Forget a worker; its jobs go to others. Each of a verifier's may be why it `crashed`."""
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
        """End the quarantine of a job that went on well: others may run beside it again."""
        self.bindings.set_crashes(job, NO_CRASHES)
        self.place_waiting()

    # --- sessions ---------------------------------------------------------------------------------------------------

    def place_waiting(self) -> None:
        """Open jobs that wait, in the queue's order, while there is room."""
        queue = self.state.jobs.queue
        while (
            found := queue.take(self._places_for, self.state.clock.journal_time)
        ) is not None or self._clear_for_quarantined():
            if found is not None:
                job, able = found
                self.open(job, self._best_of(job, able))
                self.drafter_assignment.assign_drafters(job)

    def _places_for(self, requirements: Requirements) -> list[Worker] | None:
        """Return the verifiers with room that meet the requirements; None if there are none."""
        able, isolated = self._able(requirements), self.state.jobs.isolated()
        waiting = any(other.model == requirements.model for other in self.state.jobs.queue.quarantined())
        return open_to(able, isolated, alone=requirements.alone, quarantined_wait=waiting) or None

    def _able(self, requirements: Requirements) -> list[Worker]:
        """Return the verifiers that meet the requirements, with room or without."""
        weights, apart = requirements.weights, requirements.apart
        able = [w for w in self.state.workers.verifiers(requirements.model) if w.serves(weights, apart=apart)]
        return [w for w in able if w.identity not in requirements.avoided] or able

    def _clear_for_quarantined(self) -> bool:
        """Let the jobs of the best verifier for jobs in quarantine wait, if such jobs wait; False if that is not
        needed."""
        for requirements in self.state.jobs.queue.quarantined():
            worker = to_clear(self._able(requirements), self.state.jobs.isolated())
            if worker is not None:
                for job in self.state.jobs.among(worker.job_ids):
                    self.take_from(job, worker)
                    self.bindings.let_wait(job)
                return True
        return False

    def _best_of(self, job: BrokerJob, able: list[Worker]) -> Worker:
        return choose(able, job.request.max_length, job.request.prefix_keys(self.state.sharers(job.request)))

    def hand_over(self, worker: Worker) -> None:
        """Let others go on with the jobs of a verifier that is about to leave; those without a place end there."""
        for job in self.state.jobs.among(worker.job_ids):
            able = self._places_for(job.requirements)
            if able is not None:
                self._move(job, self._best_of(job, able))

    def rebalance(self) -> None:
        """Let verifiers that have joined share in the work."""
        if len(self.state.jobs.queue):
            return
        now = self.state.clock.now
        for alike in self.state.workers.alike():
            isolated = self.state.jobs.isolated()
            recent = now - 2 * self.state.settings.heartbeat_ms / 1000
            able = [w for w in alike if w.identity not in isolated and not w.is_unreachable and w.last_seen >= recent]
            jobs = [job for w in able for job in self.state.jobs.among(w.job_ids)]
            if not all(w.knows_owners for w in able):
                jobs = [job for job in jobs if not job.requirements.apart]
            for job, to in moves(able, jobs, now):
                self._move(job, to)

    def _move(self, job: BrokerJob, to: Worker) -> None:
        """Let another verifier go on with a job."""
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
        job.session.open(worker.identity, self.state.next_epoch())
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
                token_ids=transcript.context(),
            ),
        )
        self.drafter_assignment.resume(job)

    def open_anew(self, job: BrokerJob) -> None:
        """Let a job's verifier begin its session again, without the drafts that it has."""
        verifier = self.state.workers.get(job.session.verifier)
        if verifier is not None:
            self.open(job, verifier)

    def drafted_by(self, worker: Worker) -> list[BrokerJob]:
        """Return the jobs that a drafter drafts for."""
        return [job for job in self.state.jobs.among(worker.job_ids) if worker.identity in job.drafters.identities()]

    def release(self, job: BrokerJob) -> None:
        """Free the workers of a job that ended."""
        verifier = self.state.workers.get(job.session.verifier)
        if verifier is not None:
            self.take_from(job, verifier)
        job.session.verifier = b""
        self.drafter_assignment.release(job)

    def session_failed(self, verifier: bytes, message: SessionFailed) -> None:
        """A verifier cannot go on with a session: try another, or fail the job."""
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
        """Note that a verifier cannot go on with a job: another tries, unless too many could not."""
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
    """Binds jobs to verifiers, and lets go of them."""

    def __init__(self, state: BrokerState) -> None:
        self.state = state
        self._absent: dict[
            int, list[BrokerJob]
        ] = {}  # from before the broker's start, by the incarnation that held them

    def bind(self, job: BrokerJob, weights: str, incarnation: int = 0) -> None:
        """Note in job and journal which weights its text comes from, and the incarnation of the verifier that holds
        it."""
        session = job.session
        if (session.weights, session.incarnation) != (weights, incarnation):
            session.weights, session.incarnation = weights, incarnation
            self.state.record(bound_record(job), job)

    def let_wait(self, job: BrokerJob) -> None:
        """Let a job that no verifier holds any more wait for one, if it is not given up."""
        job.session.verifier = b""
        self.bind(job, job.session.weights)
        if job.state is not JobState.GIVEN_UP:
            self.state.jobs.wait(job)

    def note_crash(self, jobs: Iterable[BrokerJob]) -> None:
        """Count a verifier's crash against each of the jobs that it had, and let them go on elsewhere."""
        jobs = list(jobs)
        for job in jobs:
            self.set_crashes(job, after_crash(job, len(jobs)))
            self.let_wait(job)

    def set_crashes(self, job: BrokerJob, crashes: Crashes) -> None:
        """Note in job and journal the crashes that count against a job; give it up if they are enough."""
        job.crashes = crashes
        self.state.jobs.note_quarantine(job)
        self.state.record(crashed_record(job), job)
        if is_given_up(crashes):
            reason = f"{crashes.total} verifiers crashed because of it, {crashes.lone} of them with only this job"
            self.state.jobs.give_up(job, reason)

    # --- after the broker's own crash ---------------------------------------------------------------------------------

    def restore(self, job: BrokerJob) -> None:
        """Take a job from the journal; one that a verifier held waits for that first."""
        self.state.jobs.add(job, waits=not job.session.incarnation)
        if job.session.incarnation:
            self._absent.setdefault(job.session.incarnation, []).append(job)

    def welcome_back(self, incarnation: int) -> None:
        """Let the jobs of a verifier that has come back go on: it did not crash."""
        for job in _unfinished(self._absent.pop(incarnation, [])):
            self.let_wait(job)

    def note_absent(self) -> None:
        """Count the verifiers that have not come back as crashed, if the time for that is over."""
        if self._absent and not self.state.clock.in_grace:
            lost, self._absent = self._absent, {}
            for jobs in lost.values():
                self.note_crash(_unfinished(jobs))


def _unfinished(jobs: list[BrokerJob]) -> list[BrokerJob]:
    """Leave out what was cancelled, or overdue, meanwhile."""
    return [job for job in jobs if not job.transcript.finish]
