"""Verdicts into jobs: to the session's drafters at once, then into the transcript and towards the journal.

Once the journal has it, a verdict's text goes to the clients: see `specq.broker.core.Broker.journaled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from specq.broker.jobs.commits import Commit, fits_logprobs, read_commit
from specq.broker.jobs.intake import Intake
from specq.broker.jobs.job import Job
from specq.broker.jobs.records import added_record
from specq.broker.jobs.relay import relay
from specq.broker.state import State
from specq.broker.workers.placement import Placement
from specq.broker.workers.quarantine import is_cleared
from specq.protocol import Verdict, decode, encode
from specq.protocol import Verdicts as StepVerdicts


class Verdicts:
    """The handler of verdicts, the most frequent messages."""

    def __init__(self, state: State, placement: Placement, intake: Intake) -> None:
        self.state, self.placement, self.intake = state, placement, intake

    def take_all(self, verifier: bytes, frames: Sequence[bytes]) -> None:
        """Take the verdicts of a step, each as if it had come alone; raises ProtocolError, with none of them taken, if the message is
        malformed."""
        step = decode(frames)
        assert isinstance(step, StepVerdicts)
        for verdict in step.each():
            self.take(verifier, encode(verdict))

    def take(self, verifier: bytes, frames: Sequence[bytes]) -> None:
        """Commit a verdict, and pass it to the session's drafters, the journal and the clients."""
        commit = read_commit(frames)
        job = self.state.jobs.active.get(int.from_bytes(frames[0], "little"))
        if job is None or not job.session.is_at(verifier, commit.epoch):
            self.state.counts["late_verdicts"] += 1
            return
        transcript = job.transcript
        num_top = transcript.logprobs.num_top
        verdict = cast("Verdict", decode(frames)) if num_top >= 0 or job.explanation else None
        misfit = verdict is not None and not fits_logprobs(verdict, num_top)
        known = -1 if misfit else transcript.commit(commit)
        if known < 0:
            self.state.counts["misfit_verdicts"] += 1
            return
        self.state.outbox.add(*relay(job, commit, frames))
        if known < len(commit.token_ids):
            job.stats.add(commit)
            if (worker := self.state.workers.get(verifier)) is not None:
                worker.num_tokens += len(commit.token_ids) - known
            if job.trace is not None and job.trace.in_all_processes:
                counts = (commit.base_len, len(commit.token_ids), commit.num_nodes, commit.num_accepted)
                job.trace.add_often(self.state.clock.now, "verdict", *counts, *commit.us)
            self.state.rounds[job.request.model].add(job, commit, len(commit.token_ids) - known)
            if verdict is not None:
                transcript.logprobs.extend(verdict, known)
                if job.explanation and not known:
                    job.explanation.add(verdict, commit.base_len - transcript.prompt_len)
        if transcript.finish:
            self.intake.finish(job)
        elif known < len(commit.token_ids):
            self._added(job, commit, known)

    def _added(self, job: Job, commit: Commit, known: int) -> None:
        """Journal what a verdict added to a job; without a journal, send it to the clients at once."""
        if is_cleared(job):
            self.placement.clear(job)
        if self.state.ledger.has_journal:
            self.state.record(added_record(job, commit, known), job)
        else:
            job.durable.note(job.transcript.num_tokens, ended=False)
            self.intake.update(job)
