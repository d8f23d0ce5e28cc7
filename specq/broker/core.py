"""The broker without its sockets: frames in, effects out, time as an argument.

    from_front(identity, frames)   clients and draft workers, and the control socket of verifiers
    from_back(identity, frames)    the verifier of that identity, over the DEALER that the broker connected to it
    tick()                         liveness, placement, refilling of slow readers

Rules: a message that breaks the protocol is counted and dropped, and never stops the loop. Drafts are passed on unread
but for who sent them. A verdict goes to the drafters at once, then into the job, then to the client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import structlog

from specq.broker.commits import read_commit
from specq.broker.intake import Intake
from specq.broker.placement import Placement
from specq.broker.state import Effect, Send, State
from specq.errors import ProtocolError
from specq.messages import (
    Cancel,
    Draft,
    FetchTokenizer,
    GetStatus,
    Heartbeat,
    Hello,
    Message,
    SessionFailed,
    Submit,
    TokenizerChunk,
    Tokens,
    Verdict,
)
from specq.wire import decode, decode_header, type_of

log = structlog.get_logger(__name__)

Handler = Callable[..., None]


class Broker:
    """Dispatches messages to the rooms; drafts and verdicts, the hot ones, it handles itself."""

    def __init__(
        self, *, incarnation: int, heartbeat_ms: int = 500, liveness_ms: int = 3000, max_jobs: int = 10_000
    ) -> None:
        self.state = State(
            incarnation=incarnation, heartbeat_ms=heartbeat_ms, liveness_ms=liveness_ms, max_jobs=max_jobs
        )
        self.placement = Placement(self.state)
        self.intake = Intake(self.state, self.placement)
        self._front: dict[type[Message], Handler] = {
            Submit: self.intake.submit,
            Cancel: self.intake.cancel,
            GetStatus: self.intake.get_status,
            FetchTokenizer: self.intake.fetch_tokenizer,
            Hello: self.placement.hello,
            Heartbeat: self.placement.heartbeat,
        }
        self._back: dict[type[Message], Handler] = {
            SessionFailed: self.placement.session_failed,
            TokenizerChunk: self.intake.tokenizer_chunk,
        }

    def from_front(self, identity: bytes, frames: Sequence[bytes], now: float) -> list[Effect]:
        """Take a message from a client or worker."""
        try:
            if type_of(frames) is Draft:
                self._draft(identity, frames, now)
            else:
                self._dispatch(self._front, identity, decode(frames), now)
        except ProtocolError as error:
            self._drop("front", error)
        return self._effects()

    def from_back(self, identity: bytes, frames: Sequence[bytes], now: float) -> list[Effect]:
        """Take a message from a verifier."""
        worker = self.state.roster.get(identity)
        if worker is None:  # its DEALER is about to be closed
            return []
        worker.heard = now
        try:
            if type_of(frames) is Verdict:
                self._verdict(identity, frames)
            else:
                self._dispatch(self._back, identity, decode(frames), now)
        except ProtocolError as error:
            self._drop("back", error)
        return self._effects()

    def tick(self, now: float) -> list[Effect]:
        """Do what time asks for; to be called about every heartbeat."""
        self.placement.lose_silent(now)
        for job in self.state.jobs.active.values():
            self.intake.tell(job)
        return self._effects()

    def _effects(self) -> list[Effect]:
        """End the jobs that were given up, and return all that is to be done."""
        while self.placement.given_up:
            job, reason = self.placement.given_up.pop()
            self.intake.fail(job, "engine", reason)
        return self.state.take_outbox()

    def undelivered(self, effect: Send) -> None:
        """Learn that a peer did not take a message: its queue is full, or it is gone. Tokens are sent again later."""
        self.state.counts["undelivered"] += 1
        if type_of(effect.frames) is not Tokens:
            return
        message = decode(effect.frames)
        job = self.state.jobs.get(int.from_bytes(effect.frames[0], "little"))
        if job is not None and isinstance(message, Tokens):
            job.sent = min(job.sent, message.base_len)

    def _dispatch(self, handlers: dict[type[Message], Handler], identity: bytes, message: Message, now: float) -> None:
        handler = handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"the broker takes no {message.TYPE} here")
        handler(identity, message, now)

    def _drop(self, where: str, error: ProtocolError) -> None:
        self.state.counts["dropped_" + where] += 1
        log.debug("message_dropped", where=where, reason=str(error))

    def _draft(self, identity: bytes, frames: Sequence[bytes], now: float) -> None:
        """Pass a draft on, if it comes from the drafter that has this lane of the session."""
        header = decode_header(frames)
        job = self.state.jobs.active.get(int.from_bytes(frames[0], "little"))
        if job is None or job.epoch != header.get("epoch"):
            self.state.counts["late_drafts"] += 1
            return
        if job.drafters.get(header.get("lane", -1)) != identity:
            raise ProtocolError("a draft for a lane that is not the sender's")
        worker = self.state.roster.get(identity)
        if worker is not None:
            worker.heard = now
        job.stats.draft_bytes += sum(map(len, frames))
        self.state.emit(Send("back", job.verifier, list(frames)))

    def _verdict(self, identity: bytes, frames: Sequence[bytes]) -> None:
        """Pass a verdict to the session's drafters, commit it, and tell the client."""
        commit = read_commit(frames)
        job = self.state.jobs.active.get(int.from_bytes(frames[0], "little"))
        if job is None or job.verifier != identity or job.epoch != commit.epoch:
            self.state.counts["late_verdicts"] += 1
            return
        self.state.emit(*[Send("front", drafter, list(frames)) for drafter in job.drafters.values()])
        known = job.commit(commit)
        if known < 0:
            self.state.counts["misfit_verdicts"] += 1
            return
        if known < len(commit.token_ids):
            job.stats.add(commit)
            if job.params.logprobs >= 0:
                job.logprobs.extend(cast("Verdict", decode(frames)), known)
        if job.finish:
            self.intake.finish(job)
        else:
            self.intake.tell(job)
