"""Planted bugs: each leaves out one thing that failures need. A function plants its bug; the schedules must show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from specq.broker import Broker, Effect, core
from specq.broker.jobs.intake import Delivery
from specq.broker.jobs.lookup import JobLookup
from specq.broker.jobs.verdicts import Added, VerdictHandler
from specq.broker.state.job import BrokerJob
from specq.broker.state.table import Jobs
from specq.broker.state.transcript import Commit
from specq.broker.workers.assignment import DrafterAssignment, Expected, Reported
from specq.broker.workers.presence import Presence
from specq.client.core import ClientCore
from specq.journal import JournalWriter, StoredJob
from specq.protocol import Judgement, Message, Open, SessionStep, Verdict
from specq.protocol.messages import Verdicts as StepVerdicts
from specq.verifier.inbox import VerifierInbox
from tests.chaos.stubs import SlowEngine

Patch = pytest.MonkeyPatch


def no_fencing_by_epoch(patch: Patch) -> None:
    """Take a verdict of an earlier session of the same verifier for one of the present session."""

    def unfenced(self: VerdictHandler, verifier: bytes, commit: Commit) -> BrokerJob | None:
        job = self.state.jobs.active.get(commit.session_id)
        return job if job is not None and job.session.verifier == verifier else None

    patch.setattr(VerdictHandler, "_job_of", unfenced)


def late_verdict_of_an_expired_verifier(patch: Patch) -> None:
    """Take the verdicts of a verifier that lost the session to another."""

    def from_back(self: Broker, identity: bytes, frames: Sequence[bytes], now: float) -> list[Effect]:
        self.state.clock.now, kind = now, core.type_of(frames)
        if self.state.workers.get(identity) is not None or kind not in (Verdict, StepVerdicts):
            return heard(self, identity, frames, now)
        if kind is Verdict:
            self.verdicts.take(identity, frames)
        else:
            self.verdicts.commit_all(identity, *self.verdicts.relay_all(identity, frames))
        return self._effects()

    heard = Broker.from_back
    patch.setattr(VerdictHandler, "_job_of", lambda self, _, commit: self.state.jobs.active.get(commit.session_id))
    patch.setattr(Broker, "from_back", from_back)


def no_resend(patch: Patch) -> None:
    """Let a verifier never send a verdict again."""
    ack = VerifierInbox._ack
    patch.setattr(VerifierInbox, "_ack", lambda self, message, now: ack(self, replace(message, resend=False), now))


def no_reopening(patch: Patch) -> None:
    """Let a session that its verifier does not know stay lost."""
    expected = Presence._expected

    def never_missing(self: Any, verifier: Any) -> dict[int, Expected]:
        sessions = expected(self, verifier)
        for session in sessions.values():
            session.mark.is_missing = False
        return sessions

    patch.setattr(Presence, "_expected", never_missing)


def no_kv_rollback(patch: Patch) -> None:
    """Keep the KV of the first nodes, not of the accepted ones."""
    run = SlowEngine._run

    def keeping(self: SlowEngine, step: SessionStep) -> Judgement | None:
        judgement = run(self, step)
        if judgement is not None and judgement.path:
            num_kept = len(judgement.path)
            self.contexts[step.session_id][-num_kept:] = step.tree.token_ids[:num_kept].tolist()
        return judgement

    patch.setattr(SlowEngine, "_run", keeping)


def no_client_dedupe(patch: Patch) -> None:
    """Take tokens that come twice for new ones."""
    extend = ClientCore._extend
    patch.setattr(
        ClientCore, "_extend", lambda self, request, message, known, now: extend(self, request, message, 0, now)
    )


def client_never_asks_again(patch: Patch) -> None:
    """Let a client ask once."""
    tick = ClientCore.tick

    def once(self: ClientCore, now: float) -> Any:
        for request in self._requests.values():
            request.sent = now
        return tick(self, now)

    patch.setattr(ClientCore, "tick", once)


def no_replay_of_a_lost_verdict(patch: Patch) -> None:
    """Let a drafter that missed a verdict never receive it."""
    reconcile = DrafterAssignment.reconcile

    def silent(self: DrafterAssignment, worker: Any, reported: dict[int, Reported]) -> None:
        send = self.state.outbox.send_front
        self.state.outbox.send_front = lambda to, message: None if isinstance(message, Verdict) else send(to, message)  # type: ignore[method-assign]
        reconcile(self, worker, reported)
        self.state.outbox.send_front = send  # type: ignore[method-assign]

    patch.setattr(DrafterAssignment, "reconcile", silent)


def no_dedupe_of_jobs(patch: Patch) -> None:
    """Take a job that is submitted again for a new one."""
    patch.setattr(Jobs, "get", lambda self, job_id: None)


def sent_before_it_is_journaled(patch: Patch) -> None:
    """Send clients their tokens at once."""
    update = Delivery.update

    def eager(self: Delivery, jobs: Sequence[BrokerJob]) -> None:
        for job in jobs:
            job.durable.note(job.transcript.num_tokens, ended=bool(job.transcript.finish))
        update(self, jobs)

    journal = VerdictHandler._journal

    def journal_later(self: VerdictHandler, added: Sequence[Added]) -> None:
        journal(self, added)
        self.delivery.update([one.job for one in added])

    patch.setattr(Delivery, "update", eager)
    patch.setattr(VerdictHandler, "_journal", journal_later)


def dead_verifiers_keep_their_sessions(patch: Patch) -> None:
    """Lose no worker that is silent."""
    patch.setattr(Presence, "lose_dead", lambda self: self.placement.settle())


def open_keeps_the_old_session(patch: Patch) -> None:
    """Let a verifier keep a known session and ignore the new opening."""
    opened = VerifierInbox._open

    def keep(self: VerifierInbox, message: Open, now: float) -> list[Message]:
        known = self.sessions.get(message.session_id)
        if known is None:
            return opened(self, message, now)
        known.epoch = max(known.epoch, message.epoch)
        return []

    patch.setattr(VerifierInbox, "_open", keep)


MUTANTS = (
    no_fencing_by_epoch,
    late_verdict_of_an_expired_verifier,
    no_resend,
    no_reopening,
    no_kv_rollback,
    no_client_dedupe,
    client_never_asks_again,
    no_replay_of_a_lost_verdict,
    no_dedupe_of_jobs,
    sent_before_it_is_journaled,
    dead_verifiers_keep_their_sessions,
    open_keeps_the_old_session,
)


# --- of brokers that share a journal in PostgreSQL: `tests.chaos.cluster` finds them by what clients see --------------


def written_without_a_fence(patch: Patch) -> None:
    """Let any broker write the records of any job: the database's function does not look at the holder."""
    from specq.journal.postgres import functions, schema, store  # imports psycopg

    unfenced = functions.WRITE.replace("AND a.broker = p_broker", "").replace("AND broker = p_broker", "")
    assert unfenced.count("p_broker") < functions.WRITE.count("p_broker")
    step = schema.TABLES + functions.FUNCTIONS.replace(functions.WRITE, unfenced)
    patch.setattr(store, "prepare", lambda session: schema.prepare(session, (step,)))


def epochs_of_the_brokers_own_counter(patch: Patch) -> None:
    """Let a broker that takes a job count its epochs on from its own, not from the journal's."""
    restored = core.restored

    def on_its_own(stored: StoredJob) -> BrokerJob:
        job = restored(stored)
        job.session.base_epoch = 0
        return job

    patch.setattr(core, "restored", on_its_own)


def lost_records_count_as_written(patch: Patch) -> None:
    """Let a broker keep the jobs that the journal says it has lost."""
    patch.setattr(Broker, "lose", lambda self, job_ids, now: [])


def shows_jobs_without_a_lease(patch: Patch) -> None:
    """Let a broker answer from memory, whenever it renewed its lease last."""
    patch.setattr(JobLookup, "_may_be_lost", lambda self, job: False)
    patch.setattr(JournalWriter, "_renew", _renew_only)


def _renew_only(self: JournalWriter) -> None:
    """Do not ask what was lost."""
    self._journal.lost = frozenset  # type: ignore[method-assign]
    renew_and_ask(self)


renew_and_ask = JournalWriter._renew

SHARED = (
    sent_before_it_is_journaled,
    written_without_a_fence,
    epochs_of_the_brokers_own_counter,
    lost_records_count_as_written,
    shows_jobs_without_a_lease,
)
