"""Admission at the broker's front: checks drafts and requests by role, share and form. Also handles revoked keys.

Rules:
- A refused message is counted and dropped. The sender receives the reason if it may know it.
- A draft is forwarded unread. Only its sender and size are checked.
- Draft distributions of untrusted drafters are removed. Their nodes are then judged as point masses, which is exact for
  any distribution.
- Drafts are not sent to a silent verifier. Its queue then holds only the messages that it must receive. A verifier that
  dials out has the queue of a client. So it is sent only `MOST_UNANSWERED` drafts between two of its own messages.

All sessions of a verifier together may use half of its time for drafts. Each session gets an equal part, and so does
each lane of a session. A draft costs the time to decode and graft it there (DRAFT_US, NODE_US, measured by `specq bench
calibrate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import structlog

from specq.broker.jobs.intake import Intake
from specq.broker.state.memory import BrokerState, Effect, Send, clipped
from specq.broker.state.registry import Worker
from specq.broker.state.rights import NOBODY, Bucket, forbidden
from specq.broker.state.transcript import DrafterLane, Drafters
from specq.broker.workers.placement import Placement
from specq.protocol import (
    ID,
    NAME,
    Cancel,
    Draft,
    Drafts,
    Failed,
    Follow,
    GetStatus,
    Heartbeat,
    Hello,
    Message,
    ProtocolError,
    Refused,
    Submit,
    TraceEvents,
    array_frame,
    decode,
    decode_header,
    encode,
    in_version_of,
    named_type,
    stripped,
)
from specq.verification import strategy

log = structlog.get_logger(__name__)

DRAFT_US, NODE_US, DISTRIBUTION_US = 40.0, 3.0, 5.0  # microseconds: per draft, per node, per KiB
DRAFTS_SHARE = 0.5  # of a verifier's time
BURST_S = 0.25
MAX_DRAFT_NODES = 512  # the capacity of a session's tree
MAX_DRAFT_BYTES = 1 << 20
MOST_UNANSWERED = 1000  # half of the front's queue of a peer
MAX_SESSIONS = 4096  # in a heartbeat, beyond the worker's own: left over from before a restart
_TOKENS = array_frame(Draft, "token_ids")
MAX_WORKERS = 4096
_AWAITED = (Submit, Follow, Cancel, Hello)  # the sender waits for an answer
_OF_WORKERS = (Hello, Heartbeat, Draft, Drafts, TraceEvents)  # not requests: no answer to charge


class Gate:
    """Checks each message of the front before it is handled. `who` is the name of the key that it came with."""

    def __init__(self, state: BrokerState) -> None:
        self.state = state

    def admit(self, identity: bytes, frames: Sequence[bytes], who: str) -> Message | None:
        """Return a request or a worker's message that may be handled, else None.

        Raises ProtocolError for a malformed message.
        """
        peer, size, now = who or identity.hex(), sum(map(len, frames)), self.state.clock.now
        header = len(frames[1]) if len(frames) > 1 else 0
        if not self.state.limits.admit_request(peer, size, now, num_header_bytes=header):
            self.state.counts["limited_requests"] += 1
            return None
        try:
            message = decode(frames)
        except ProtocolError as error:
            self._answer_unreadable(identity, frames, who, error)
            raise
        if isinstance(message, Submit) and message.params.grammar:
            self.state.limits.refund_grammar(peer, len(message.params.grammar), header)
        if isinstance(message, Heartbeat):
            check_heartbeat(self.state.workers.get(identity), message)
        reason = self._reason_against(identity, message, who)
        if not reason:
            if isinstance(message, GetStatus):
                num_jobs = len(self.state.jobs.active)
                self.state.limits.charge_status(peer, num_jobs, lists_sessions=bool(message.sessions))
            return message
        self.state.counts["forbidden"] += 1
        answer = forbidden(message, reason)
        if answer is not None:
            self.state.outbox.send_front(identity, answer)
        return None

    def _answer_unreadable(self, identity: bytes, frames: Sequence[bytes], who: str, error: ProtocolError) -> None:
        """Send a peer the reason why its message cannot be read, if its key and type are readable.

        Without an answer, the peer waits or asks again without end.
        """
        kind = named_type(frames)
        if kind not in _AWAITED or len(frames[0]) != 8 or self.state.roles.refusal(identity, who, kind):
            return
        job_id = int.from_bytes(frames[0], "little")
        reason = clipped(f"the broker cannot read this {kind.TYPE}: {error}")
        if kind is Hello:
            answer = encode(Refused(reason=reason))
        elif job_id and ID.admits(job_id):
            answer = encode(Failed(job_id=job_id, code="invalid", reason=reason))
        else:
            return
        self.state.outbox.add(Send("front", identity, in_version_of(frames, answer)))

    def _reason_against(self, identity: bytes, message: Message, who: str) -> str:
        if not isinstance(message, Hello):
            return self.state.roles.refusal(identity, who, type(message))
        names = (message.name, message.model.name, message.model.engine)
        if not all(map(str.isprintable, names)):  # they are shown on terminals
            return f"names of workers and models have at most {NAME.most} printable characters"
        if len(self.state.workers.all()) >= MAX_WORKERS and self.state.workers.get(identity) is None:
            return f"this broker already has the maximum of {MAX_WORKERS} workers"
        return self.state.roles.refusal(identity, who, Hello, message.role)

    def dialled_verifier(self, identity: bytes, kind: type[Message], who: str) -> Worker | None:
        """Return the verifier that sends a verifier's message to the front, or None if its key may not.

        Raises ProtocolError unless the sender is a verifier that dials out. Others use the broker's DEALER.
        """
        if self.state.roles.refusal(identity, who, kind):
            self.state.counts["forbidden"] += 1
            return None
        worker = self.state.workers.get(identity)
        if worker is None or not worker.dials_out:
            raise ProtocolError(f"a {kind.TYPE} at the front, not from a verifier that dials out")
        return worker

    def charge(self, identity: bytes, kind: type[Message] | None, effects: list[Effect]) -> list[Effect]:
        """Charge a peer for the answers to its message of this kind; return the effects."""
        if kind not in _OF_WORKERS or self.state.workers.get(identity) is None:
            sends = [effect.frames for effect in effects if isinstance(effect, Send) and effect.to == identity]
            self.state.limits.charge_answer(self.state.roles.peer(identity), sum(sum(map(len, f)) for f in sends))
        return effects

    def pass_draft(self, identity: bytes, frames: Sequence[bytes], who: str) -> None:
        """Forward a draft if its sender owns this lane and stays within its share of the verifier's time."""
        if self.state.roles.refusal(identity, who, Draft):
            self.state.counts["forbidden"] += 1
            return
        header = decode_header(frames)
        num_nodes = len(frames[_TOKENS]) // 4 if len(frames) > _TOKENS else 0
        claim = _Claim(int.from_bytes(frames[0], "little"), header.get("epoch"), header.get("lane", -1), num_nodes)
        worker = self.state.workers.get(identity)
        verifier = self._taker(identity, worker, claim, sum(map(len, frames)))
        if verifier is None:
            return
        if header.get("q_size") and not self.state.roles.trusts(worker.shown if worker is not None else NOBODY):
            frames = encode(stripped(cast("Draft", decode(frames))))
        verifier.num_unanswered += 1
        self.state.outbox.add(Send("back", verifier.identity, list(frames)))

    def pass_drafts(self, identity: bytes, frames: Sequence[bytes], who: str) -> None:
        """Forward the drafts of several sessions to their verifiers, each under the rules of a single one.

        Raises ProtocolError for the first one of a lane that is not the sender's, after the others were forwarded.
        """
        if self.state.roles.refusal(identity, who, Drafts):
            self.state.counts["forbidden"] += 1
            return
        if sum(map(len, frames)) > MAX_DRAFT_BYTES:
            raise ProtocolError(f"drafts of more than {MAX_DRAFT_BYTES} bytes in one message")
        drafts = cast("Drafts", decode(frames))
        drafts.check()
        columns = drafts.session_ids, drafts.epochs, drafts.lanes, drafts.num_nodes
        takers, error = dict[bytes, tuple[Worker, list[int]]](), None
        num_bytes, sender = sum(map(len, frames)) // max(len(drafts.session_ids), 1), self.state.workers.get(identity)
        for i, claim in enumerate(map(_Claim, *(column.tolist() for column in columns))):
            try:
                if (verifier := self._taker(identity, sender, claim, num_bytes)) is not None:
                    takers.setdefault(verifier.identity, (verifier, []))[1].append(i)
            except ProtocolError as found:
                error = error or found
        for verifier, places in takers.values():
            self._forward(verifier, drafts, places, frames)
        if error is not None:
            raise error

    def _forward(self, verifier: Worker, drafts: Drafts, places: Sequence[int], frames: Sequence[bytes]) -> None:
        """Send a verifier the drafts at these places; `frames` are all of them."""
        part = drafts if len(places) == len(drafts.session_ids) else drafts.take(places)
        if not verifier.reads_many_drafts:
            sent = list(map(encode, part.each()))
        else:
            sent = [list(frames) if part is drafts else encode(part)]
        verifier.num_unanswered += len(sent)
        for one in sent:
            self.state.outbox.add(Send("back", verifier.identity, one))

    def _taker(self, identity: bytes, sender: Worker | None, claim: _Claim, num_bytes: int) -> Worker | None:
        """Return the verifier that takes this draft of a worker, if one does. Counts it.

        Raises ProtocolError if the lane is not the sender's.
        """
        state = self.state
        job = state.jobs.active.get(claim.session_id)
        if job is None or job.session.epoch != claim.epoch:
            state.counts["late_drafts"] += 1
            return None
        lane = job.drafters.lanes.get(claim.lane) if type(claim.lane) is int else None
        if lane is None or lane.drafter != identity:
            raise ProtocolError("a draft for a lane that is not the sender's")
        now, verifier = state.clock.now, state.workers.get(job.session.verifier)
        if sender is not None:
            sender.last_seen = now
            sender.num_drafts += 1
        if (
            verifier is None
            or now - verifier.last_seen > state.settings.quiet_s
            or (verifier.num_unanswered >= MOST_UNANSWERED and verifier.dials_out)
            or not admit_draft(job.drafters, lane, verifier, claim.num_nodes, num_bytes, now)
        ):
            state.counts["limited_drafts"] += 1
            return None
        job.stats.draft_bytes += num_bytes
        return verifier


class _Claim(NamedTuple):
    """What a draft says of itself."""

    session_id: int
    epoch: object
    lane: object
    num_nodes: int


def admit_draft(
    drafters: Drafters, lane: DrafterLane, verifier: Worker, num_nodes: int, num_bytes: int, now: float
) -> bool:
    """Return whether this draft of `num_bytes` bytes on a lane of a job may use the verifier's time.

    Only the cost of earlier drafts decides. The size of this one depends on its sampled tokens, and these must not
    decide whether it arrives (decision 0008).
    """
    if num_nodes > MAX_DRAFT_NODES or num_bytes > MAX_DRAFT_BYTES:
        return False
    rate = 1e6 * DRAFTS_SHARE / ((verifier.num_sessions or 1) * len(drafters.lanes))
    burst = BURST_S * rate
    bucket = lane.budget
    if bucket is None:
        bucket = lane.budget = Bucket(burst, now)
    return bucket.spend(DRAFT_US + NODE_US * num_nodes + DISTRIBUTION_US * num_bytes / 1024, rate, burst, now)


def check_heartbeat(worker: Worker | None, message: Heartbeat) -> None:
    """Check the sizes of a heartbeat's arrays.

    Raises ProtocolError if it lists more sessions than a worker can have, or if the arrays differ in length.
    """
    num_jobs = len(worker.job_ids) if worker is not None else 0
    sizes = {len(message.session_ids), len(message.epochs), len(message.lengths)}
    if len(sizes) > 1 or max(sizes) > MAX_SESSIONS + 2 * num_jobs:
        raise ProtocolError(f"a heartbeat with {max(sizes)} sessions")


class Revocation:
    """Applies changes of the grants to running jobs, workers and readers."""

    def __init__(self, state: BrokerState, placement: Placement, intake: Intake) -> None:
        self.state, self.placement, self.intake = state, placement, intake

    def apply(self) -> None:
        """Remove the workers, drop the readers and fail the jobs of keys that are not allowed any more."""
        if not self.state.roles.have_changed():
            return
        for worker in self.state.workers.all():
            self._look_at(worker)
        jobs = list(self.state.jobs.active.values())
        for job in [*jobs, *self.state.jobs.finished.values()]:
            job.readers.retain(lambda reader: self.state.roles.stands(reader.shown, "client"))
        for job in jobs:
            if not self.state.roles.may_own(job.request.owner):
                self.intake.fail(job, "forbidden", "the key that submitted the job is no longer allowed to submit jobs")
        self.placement.settle()

    def _look_at(self, worker: Worker) -> None:
        """Remove a worker whose key is gone.

        If a drafter is not trusted any more, open its sessions anew.
        """
        stands = self.state.roles.stands(worker.shown, worker.hello.role)
        was_trusted, worker.is_trusted = worker.is_trusted, self.state.roles.trusts(worker.shown)
        drafted = self.placement.drafted_by(worker) if was_trusted and not worker.is_trusted else []
        if not stands:
            log.warning("worker_revoked", name=worker.name, role=worker.hello.role, key=worker.shown.name)
            self.state.counts["workers_revoked"] += 1
            reason = f"the key {worker.shown.name} is no longer allowed to be a {worker.hello.role} worker"
            refused = Refused(reason=reason, fatal=False)  # the key may be back at the next `Hello`
            self.state.outbox.send_front(worker.identity, refused)
            self.placement.lose(worker)
        for job in drafted:
            if strategy(job.request.params.strategy).takes_distributions:  # the verifier has trusted its distributions
                self.placement.open_anew(job)
