"""The broker without its sockets: frames in, effects out, time as an argument.

- `from_front(identity, frames)` handles clients, draft workers and the control socket of verifiers. `who` is the name
  of the key that the socket has seen (`specq.broker.gate`).
- `from_back(identity, frames)` handles the verifier of that identity. The broker has connected a DEALER to it. A
  verifier that dials out sends the same messages to the front.
- `from_back_lazily` does the same, and yields each effect as soon as it is known. Then `deliver()` sends clients the
  results of several messages.
- `tick()` checks liveness and deadlines, and sends again to slow readers.
- `journaled(sequence)` notes what the journal holds. `found` and `listed` take the journal's answers.

Rule: a message that breaks the protocol is counted and dropped. It never stops the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import structlog

from specq.broker.gate import Gate, Revocation
from specq.broker.jobs.intake import Delivery, Intake
from specq.broker.jobs.reports import StatusReports
from specq.broker.jobs.verdicts import VerdictHandler
from specq.broker.state.ledger import Ledger, restored
from specq.broker.state.memory import GRACE_S, BrokerClock, BrokerSettings, BrokerState, Effect, FindFinished, Send
from specq.broker.state.registry import Worker
from specq.broker.state.rights import Roles
from specq.broker.validation import validate
from specq.broker.workers.assignment import ActivationRelay
from specq.broker.workers.placement import Placement
from specq.broker.workers.presence import Presence, Unserved
from specq.broker.workers.tokenizers import Tokenizers
from specq.journal import JobSummary, StoredJob
from specq.protocol import (
    Activations,
    Cancel,
    Draft,
    Drafts,
    FetchTokenizer,
    Follow,
    GetClock,
    GetStatus,
    GetTrace,
    Heartbeat,
    Hello,
    JournalBusyError,
    ListJobs,
    Message,
    ProtocolError,
    SessionFailed,
    Submit,
    TokenizerChunk,
    TraceEvents,
    Verdict,
    Verdicts,
    decode,
    is_about_grammar,
    type_of,
)
from specq.transport import Grant
from specq.verification import reason_against

log = structlog.get_logger(__name__)

Handler = Callable[[bytes, Any], None]


class Broker:
    """Dispatches messages to the components.

    - `validates`: check the invariants after each message and tick. Used in tests and chaos runs.
    - `incarnation`: a number of seconds, for example the wall clock at the start. Without a journal, it makes a later
      broker's epochs greater than an earlier one's. The earlier broker must have opened fewer than 1024 sessions a
      second on average.
    - `epoch`: the journal's. The epochs of new jobs are greater than this, and that needs no clock.
    - `offset`: the journal's time is the caller's time plus this, in seconds. Any value works without a journal.
    - `grants`: the allowed keys, by name. None: keys are not in use.
    - `traced_at_once`: as in `BrokerSettings`.
    - `weights_wait_s`: how long jobs wait for weights that no verifier has, in seconds. 0: without limit.
    """

    validates = False

    def __init__(
        self,
        *,
        incarnation: int,
        heartbeat_ms: int = 500,
        liveness_ms: int = 3000,
        max_jobs: int = 10_000,
        has_journal: bool = False,
        epoch: int = 0,
        offset: float = 0.0,
        drafters_per_job: int = 2,
        grants: Mapping[str, Grant] | None = None,
        weights_wait_s: float = 600.0,
        traced_at_once: int = 0,
    ) -> None:
        self.state = BrokerState(
            BrokerSettings(heartbeat_ms, liveness_ms / 1000, max_jobs, drafters_per_job, traced_at_once),
            BrokerClock(offset),
            Ledger(has_journal=has_journal),
            Roles(grants),
            epoch=epoch or incarnation << 10,
        )
        self.placement = Placement(self.state)
        self.presence = Presence(self.state, self.placement)
        self.unserved = Unserved(self.state, weights_wait_s)
        self.delivery, self.gate = Delivery(self.state), Gate(self.state)
        self.intake = Intake(self.state, self.placement, self.delivery)
        self.tokenizers, self.reports = Tokenizers(self.state), StatusReports(self.state)
        self.revocation = Revocation(self.state, self.placement, self.intake)
        self.activations = ActivationRelay(self.state)
        self.verdicts = VerdictHandler(self.state, self.placement, self.intake, self.delivery)
        self._front: dict[type[Message], Handler] = {
            Submit: self.intake.submit,
            Follow: self.intake.follow,
            ListJobs: self.reports.list_jobs,
            Cancel: self.intake.cancel,
            GetStatus: self.reports.get_status,
            GetTrace: self.reports.get_trace,
            GetClock: self.reports.get_clock,
            TraceEvents: self.reports.take_events,
            FetchTokenizer: self.tokenizers.fetch,
            Hello: self.presence.hello,
            Heartbeat: self.presence.heartbeat,
        }
        self._back: dict[type[Message], Handler] = {
            SessionFailed: self.placement.session_failed,
            TokenizerChunk: self.tokenizers.chunk,
        }
        self._of_verifiers = frozenset({Verdict, Verdicts, Activations, *self._back})

    def from_front(self, identity: bytes, frames: Sequence[bytes], now: float, who: str = "") -> list[Effect]:
        """Take a message from a client or worker."""
        self.state.clock.now, kind = now, type_of(frames)
        if (worker := self.state.workers.get(identity)) is not None:
            worker.sent_bytes += sum(map(len, frames))
        try:
            if kind in self._of_verifiers:
                verifier = self.gate.dialled_verifier(identity, kind, who)
                return [*self._from_verifier(verifier, frames), *self.deliver(now)] if verifier is not None else []
            if kind is Draft:
                self.gate.pass_draft(identity, frames, who)
            elif kind is Drafts:
                self.gate.pass_drafts(identity, frames, who)
            elif (message := self.gate.admit(identity, frames, who)) is not None:
                self._dispatch(self._front, identity, message)
        except ProtocolError as error:
            self._drop("front", error)
        return self.gate.charge(identity, kind, self._effects())

    def from_back(self, identity: bytes, frames: Sequence[bytes], now: float) -> list[Effect]:
        """Take a message from a verifier."""
        return [*self.from_back_lazily(identity, frames, now), *self.deliver(now)]

    def from_back_lazily(self, identity: bytes, frames: Sequence[bytes], now: float) -> Iterator[Effect]:
        """Take a message from a verifier, and yield effects as they are known; the caller carries each out at once.

        Drafters so receive the verdicts of a step before these are committed. Clients receive them by `deliver`.
        """
        worker = self.state.workers.get(identity)
        if worker is None:  # its DEALER closes soon
            return
        self.state.clock.now = now
        worker.sent_bytes += sum(map(len, frames))
        yield from self._from_verifier(worker, frames)

    def _from_verifier(self, worker: Worker, frames: Sequence[bytes]) -> Iterator[Effect]:
        if not self.state.roles.stands(worker.shown, "target"):  # its link closes soon: see `gate.Revocation`
            self.state.counts["forbidden"] += 1
            return
        identity, worker.last_seen, worker.num_unanswered = worker.identity, self.state.clock.now, 0
        try:
            if (kind := type_of(frames)) is Verdict:
                self.verdicts.take(identity, frames)
            elif kind is Activations:
                self.activations.take(identity, frames)
            elif kind is Verdicts:
                step, relayed = self.verdicts.relay_all(identity, frames)
                yield from self.state.outbox.take()
                self.verdicts.commit_all(identity, step, relayed)
            else:
                self._dispatch(self._back, identity, decode(frames))
        except ProtocolError as error:
            self._drop("back", error)
        yield from self._effects()

    def deliver(self, now: float) -> list[Effect]:
        """Send clients the delayed tokens: one message for several verdicts. Drafters have received these before."""
        self.state.clock.now = now
        self.delivery.flush()
        return self._effects()

    def tick(self, now: float) -> list[Effect]:
        """Do what is due at this time. Call it about once per heartbeat."""
        self.state.clock.now = now
        self.revocation.apply()
        self.presence.lose_dead()
        self.tokenizers.tidy()
        self.placement.rebalance()
        self.intake.end_overdue()
        for job, reason in self.unserved.given_up():
            self.intake.fail(job, "engine", reason)
        self.delivery.update_again(list(self.state.jobs.active.values()))
        return self._effects()

    def stood_still(self, seconds: float, now: float) -> None:
        """Do not count these seconds, just before `now`, as silence of workers: the broker itself read no messages."""
        for worker in self.state.workers.all():
            worker.last_seen = min(now, worker.last_seen + seconds)
            worker.progressed = min(now, worker.progressed + seconds)

    def undelivered(self, effect: Send) -> None:
        """Note that a peer did not take a message, since its queue is full or it is gone.

        The tokens are sent again later.
        """
        self.state.counts["undelivered"] += 1
        self.delivery.note_undelivered(effect)

    # --- the end ----------------------------------------------------------------------------------------------------

    def drain(self, now: float) -> None:
        """Stop accepting new jobs."""
        self.state.clock.now, self.state.closing = now, "this broker is stopping"

    @property
    def is_idle(self) -> bool:
        """Return whether no job waits or runs."""
        return not self.state.jobs.active

    def awaits_verifiers(self, since: float) -> bool:
        """Return whether a verifier that holds jobs has not sent anything since then."""
        verifiers = {job.session.verifier for job in self.state.jobs.active.values()}
        return any(worker.last_seen < since for i in verifiers if (worker := self.state.workers.get(i)) is not None)

    def unbind_jobs(self, since: float, now: float) -> list[Effect]:
        """Unbind the jobs of the verifiers that have sent something since then.

        If such a verifier crashes while no broker runs, that does not count against jobs. A later broker finds out
        whether the other verifiers crashed.
        """
        self.state.clock.now = now
        for job in self.state.jobs.active.values():
            worker = self.state.workers.get(job.session.verifier)
            if worker is not None and worker.last_seen >= since:
                self.placement.bindings.bind(job, job.session.weights)
        return self._effects()

    def give_up(self, now: float) -> list[Effect]:
        """End the jobs that no broker can continue: this one stops without a journal."""
        self.state.clock.now = now
        for job in list(self.state.jobs.active.values()):
            self.intake.fail(job, "lost", "the broker was stopped before the job ended, and it keeps no journal")
        return self._effects()

    # --- the journal ------------------------------------------------------------------------------------------------

    def gain(self, jobs: Sequence[StoredJob], now: float) -> list[Effect]:
        """Take over the unfinished jobs of a broker that is lost, while this one runs."""
        self.state.clock.now = now
        self.intake.lose(stored.submit.job_id for stored in jobs)  # those that it lost, and has not learned of yet
        self.restore(jobs, now)
        self.placement.place_waiting()
        return self._effects()

    def restore(self, jobs: Iterable[StoredJob], now: float) -> None:
        """Take over the unfinished jobs of an earlier broker. They wait for verifiers and for their clients.

        A job that a verifier held waits until that verifier is back or counts as crashed. A job fails if a broker no
        longer accepts its values.
        For a short time, a missing verifier is not a reason to refuse a client. The client asks again.
        """
        clock = self.state.clock
        clock.now = now
        clock.allow(min(GRACE_S, self.state.settings.liveness_s))
        for stored in jobs:
            job = restored(stored)
            self.state.begin_trace(job, "taken over")
            self.placement.bindings.restore(job)
            if stored.misfit:
                self.intake.fail(job, "invalid", f"its values are out of bounds: {stored.misfit}")
            elif reason := reason_against(job.request.params.strategy):  # not installed any more
                self.intake.fail(job, "invalid", reason)

    def lose(self, job_ids: Iterable[int], now: float) -> list[Effect]:
        """Drop jobs that another broker holds. Their readers learn where they are."""
        self.state.clock.now = now
        self.intake.lose(job_ids)
        return self._effects()

    def list_brokers(self, addresses: tuple[str, ...], now: float) -> list[Effect]:
        """Note the addresses of all live brokers of the journal, and send them to the workers."""
        self.state.clock.now, self.state.brokers = now, addresses
        for worker in self.state.workers.all():
            self.presence.send_brokers(worker)
        return self._effects()

    def journaled(self, sequence: int, now: float) -> list[Effect]:
        """Note that the journal holds all records up to this one. Clients may now receive their contents."""
        self.state.clock.now = now
        settled = self.state.ledger.settle(sequence)
        self.delivery.update(settled)
        self.intake.lookup.settled(settled)
        return self._effects()

    def troubled(self, reason: str, now: float) -> list[Effect]:
        """Note why the journal cannot be written. "": it can be written.

        While it cannot be written, the broker refuses new jobs. It also refuses the jobs that the journal does not hold
        yet. The other jobs continue, but their clients receive no tokens. Their verifiers pause at `max_uncommitted`.
        """
        self.state.clock.now, self.state.ledger.trouble = now, reason
        if reason:
            self.state.faults.note("journal_trouble", "journal", reason, now)
            self.intake.drop_unregistered(f"no new jobs at the moment: {reason}")
        return self._effects()

    def filled(self, reason: str, now: float) -> list[Effect]:
        """Note why the journal has no space for new jobs. "": it has space."""
        self.state.clock.now, self.state.ledger.full = now, reason
        return self._effects()

    def found(self, job_id: int, stored: StoredJob | JournalBusyError | None, now: float) -> list[Effect]:
        """Take the journal's record of a job: the answer to `Find`."""
        self.state.clock.now = now
        self.intake.lookup.found(job_id, stored)
        return self._effects()

    def listed(self, asked: FindFinished, found: list[JobSummary] | JournalBusyError, now: float) -> list[Effect]:
        """Take the list of ended jobs: the answer to `FindFinished`."""
        self.state.clock.now = now
        self.reports.listed(asked.client, asked.skip, found)
        return self.gate.charge(asked.client, ListJobs, self._effects())

    def note_sent(self, effect: Send) -> None:
        """Count the bytes of a message that a worker's socket has taken."""
        worker = self.state.workers.get(effect.to)
        if worker is not None:
            worker.received_bytes += sum(map(len, effect.frames))

    def reaches_by_front(self, verifier: bytes) -> bool:
        """Return whether messages to this verifier go over the front, since it dials out."""
        worker = self.state.workers.get(verifier)
        return worker is not None and worker.dials_out

    # --- inside -----------------------------------------------------------------------------------------------------

    def _effects(self) -> list[Effect]:
        """End the jobs that were given up, and return all effects."""
        while self.state.jobs.given_up:
            job, reason = self.state.jobs.given_up.pop()
            self.intake.fail(job, "invalid" if is_about_grammar(reason) else "engine", reason)
        if self.validates:
            validate(self.state)
        return self.state.outbox.take()

    def _dispatch(self, handlers: dict[type[Message], Handler], identity: bytes, message: Message) -> None:
        handler = handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"the broker does not accept {message.TYPE} here")
        handler(identity, message)

    def _drop(self, where: str, error: ProtocolError) -> None:
        self.state.counts["dropped_" + where] += 1
        log.debug("message_dropped", where=where, reason=str(error))
