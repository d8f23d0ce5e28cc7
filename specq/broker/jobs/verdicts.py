"""Verdicts into jobs: to the session's drafters at once, then into the transcript and towards the journal.

Once the journal has it, a verdict's text goes to the clients: see `specq.broker.core.Broker.journaled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from specq.broker.jobs.commits import Commit, commits_of, fits_logprobs, read_commit
from specq.broker.jobs.delivery import Delivery
from specq.broker.jobs.intake import Intake
from specq.broker.jobs.job import BrokerJob
from specq.broker.jobs.records import added_record
from specq.broker.jobs.relay import SILENT, StepRelay, relay
from specq.broker.state import BrokerState
from specq.broker.workers.placement import Placement
from specq.protocol import Verdict, decode, encode
from specq.protocol import Verdicts as StepVerdicts


class Added(NamedTuple):
    """A verdict that added to a job all its tokens but for the first `known`."""

    job: BrokerJob
    commit: Commit
    known: int


class VerdictHandler:
    """The handler of verdicts, the most frequent messages."""

    def __init__(self, state: BrokerState, placement: Placement, intake: Intake, delivery: Delivery) -> None:
        self.state, self.placement, self.intake, self.delivery = state, placement, intake, delivery

    def take_all(self, verifier: bytes, frames: Sequence[bytes]) -> None:
        """Take the verdicts of a step, each as if it had come alone; raises ProtocolError, with none of them taken, if
        the message is malformed."""
        step = cast("StepVerdicts", decode(frames))
        step.check()
        relayed, added = StepRelay(step, frames), list[Added]()
        for place, commit in enumerate(commits_of(step)):
            job = self._job_of(verifier, commit)
            if job is None:
                continue
            is_misfit = job.transcript.logprobs.num_top >= 0 and commit.token_ids
            known = self._commit(verifier, job, commit, is_misfit=bool(is_misfit))
            if known >= 0:
                relayed.add(place, job, commit)
                if known < len(commit.token_ids):
                    added.append(Added(job, commit, known))
        self.state.outbox.add(*relayed.sends())
        self._hear(verifier, step.min_accept_prob)
        self._journal(added)

    def take(self, verifier: bytes, frames: Sequence[bytes]) -> None:
        """Commit a verdict, and pass it to the session's drafters, the journal and the clients."""
        commit = read_commit(frames)
        job = self._job_of(verifier, commit)
        if job is None:
            return
        transcript = job.transcript
        verdict = cast("Verdict", decode(frames)) if job.has_details else None
        if commit.cached_tokens:  # nobody else reads that, and older drafters would refuse it
            frames = encode(replace(cast("Verdict", decode(frames)), cached_tokens=0))
        is_misfit = verdict is not None and not fits_logprobs(verdict, transcript.logprobs.num_top)
        known = self._commit(verifier, job, commit, is_misfit=is_misfit)
        if known < 0:
            return
        self.state.outbox.add(*relay(job, commit, frames))
        self._hear(verifier, commit.min_accept_prob)
        is_new = known < len(commit.token_ids)
        if verdict is not None and is_new:
            transcript.logprobs.extend(verdict, known)
            if job.explanation and not known:
                job.explanation.add(verdict, commit.base_len - transcript.prompt_len)
        if transcript.finish:
            self.intake.finish(job)
        elif is_new:
            self._journal([Added(job, commit, known)])

    def _hear(self, verifier: bytes, min_accept_prob: int) -> None:
        """Take in what a verifier asks of drafters."""
        worker, wants_silence = self.state.workers.get(verifier), min_accept_prob > SILENT
        if worker is not None and worker.wants_silence != wants_silence:
            self.placement.drafter_assignment.hear(worker, wants_silence=wants_silence)

    def _job_of(self, verifier: bytes, commit: Commit) -> BrokerJob | None:
        """Return the job that a verdict is on; None, and that is counted, if the session is not this verifier's any
        more."""
        job = self.state.jobs.active.get(commit.session_id)
        if job is not None and job.session.is_at(verifier, commit.epoch):
            return job
        self.state.counts["late_verdicts"] += 1
        return None

    def _commit(self, verifier: bytes, job: BrokerJob, commit: Commit, *, is_misfit: bool) -> int:
        """Append to a job what a verdict adds; return how many of its tokens were known, -1 if it does not fit."""
        known = -1 if is_misfit else job.transcript.commit(commit)
        if known < 0:
            self.state.counts["misfit_verdicts"] += 1
        elif num_new := len(commit.token_ids) - known:
            if commit.base_len == job.transcript.prompt_len and not known:
                job.stats.cached_tokens = min(commit.cached_tokens, job.transcript.prompt_len)
            job.stats.add(commit)
            self.state.rounds[job.request.model].add(job.transcript, commit, num_new)
            if (worker := self.state.workers.get(verifier)) is not None:
                worker.num_tokens += num_new
            if job.trace is not None and job.trace.in_all_processes:
                counts = (commit.base_len, len(commit.token_ids), commit.num_nodes, commit.num_accepted)
                job.trace.add_often(self.state.clock.now, "verdict", *counts, *commit.us)
        return known

    def _journal(self, added: Sequence[Added]) -> None:
        """Journal what verdicts added to jobs; without a journal, the clients may receive it now."""
        for job, commit, known in added:
            if job.is_cleared:
                self.placement.clear(job)
            if self.state.ledger.has_journal:
                self.state.record(added_record(job, commit, known), job)
            else:
                job.durable.note(job.transcript.num_tokens, ended=False)
                self.delivery.note(job)
