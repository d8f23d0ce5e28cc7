"""The verifier's handling of messages: it opens and closes sessions, takes drafts, and sends tokens again.

Rule: a session belongs to the broker that opened it. Another broker takes it over by an `Open` with a higher epoch. Its
other messages for this session are refused.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from specq.protocol import (
    Ack,
    Clock,
    Close,
    Draft,
    Drafts,
    Fault,
    FetchTokenizer,
    GetActivations,
    Message,
    ModelInfo,
    Open,
    ProtocolError,
    SpecqError,
    are_valid,
    reason_against,
    stripped,
    trace_events,
)
from specq.runtime import Faults, Tracer, traced
from specq.text import TextCodec, tokenizer_chunks
from specq.verifier.control.controller import Controller
from specq.verifier.sessions.admission import reason_to_refuse
from specq.verifier.sessions.grammars import SessionGrammars
from specq.verifier.sessions.open_sessions import OpenSessions
from specq.verifier.sessions.session import Session
from specq.verifier.sources import SourceSet
from specq.verifier.step.meter import trace_open
from specq.verifier.step.planner import StepPlanner
from specq.verifier.step.verdicts import failure, verdict_again

log = structlog.get_logger(__name__)


class VerifierInbox:
    """Handles the messages for one verifier. A message can only harm its own session."""

    def __init__(
        self,
        model: ModelInfo,
        sessions: OpenSessions,
        sources: SourceSet,
        control: Controller,
        planner: StepPlanner,
        tracer: Tracer,
        forget: Callable[[int], None],
        *,
        trust_drafts: bool,
        tokenizer_files: dict[str, str],
        grammars: SessionGrammars,
        scores_prompts: bool = False,
    ) -> None:
        """Take the parts of the verifier.

        forget  removes a session, if it exists.
        scores_prompts  whether the engine returns log-probabilities of prompts.
        """
        self._model, self.sessions, self._sources = model, sessions, sources
        self._control, self._planner, self._tracer, self._forget = control, planner, tracer, forget
        self._trusts_drafts, self.tokenizer_files, self._grammars = trust_drafts, tokenizer_files, grammars
        self._scores_prompts = scores_prompts
        self.codec = TextCodec(tokenizer_files) if "tokenizer.json" in tokenizer_files else None
        self._handlers: dict[type[Message], Callable[..., list[Message]]] = {
            Open: self._open,
            Close: self._close,
            Ack: self._ack,
            Draft: self._draft,
            Drafts: self._drafts,
            FetchTokenizer: self._fetch_tokenizer,
            GetActivations: self._get_activations,
            Clock: self._clock,
        }

    def handle(self, message: Message, now: float, broker: str = "") -> list[Message]:
        """Handle one message from a broker and return the answers. `broker`: its name.

        Raises ProtocolError if the message is not for a verifier.
        """
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"a verifier does not accept {message.TYPE}")
        if isinstance(message, Close | Ack | Draft | GetActivations):
            self._check_opener(message, broker)
        self.sessions.changed()
        try:
            return handler(message, now, broker)
        except SpecqError:
            raise
        except Exception as error:  # noqa: BLE001 - a message harms no session but its own
            return self._not_handled(message, error)

    def _check_opener(self, message: Close | Ack | Draft | GetActivations, broker: str) -> None:
        """Raise ProtocolError if another broker opened the session."""
        session = self.sessions.get(message.session_id)
        if session is not None and session.broker != broker:
            raise ProtocolError(f"a {message.TYPE} from {broker or 'a broker'} for a session of another broker")

    def _not_handled(self, message: Message, error: Exception) -> list[Message]:
        """Fail a session that could not be opened; drop any other message."""
        log.error("message_handling_failed", kind=message.TYPE, **traced(error))
        if isinstance(message, Open):
            faults = Faults()
            faults.note(message, "opened", error)
            self._forget(message.session_id)
            return [failure(message, faults.found[message.session_id])]
        raise ProtocolError(f"a {message.TYPE} could not be handled: {type(error).__name__}") from error

    def _open(self, message: Open, now: float, broker: str) -> list[Message]:
        known = self.sessions.get(message.session_id)
        if known is not None and known.epoch >= message.epoch:
            if known.broker != broker:
                raise ProtocolError(f"an open from {broker or 'a broker'} that lost the session to another broker")
            return []
        has_codec, scores = self.codec is not None, self._scores_prompts
        reason = reason_to_refuse(message, self._model, has_codec=has_codec, scores_prompts=scores)
        if message.params.grammar and not self._grammars.are_served:
            reason = reason or f"{self._model.name} is served here without grammars"
        if reason:
            return [failure(message, Fault(reason))]
        self._forget(message.session_id)
        session = Session.of(message, self._model, self.sessions.trees, self.codec)
        session.broker = broker
        self.sessions.add(session)
        self._grammars.begin(session)
        self._control.bursts.arrive(now)
        trace_open(self._tracer, message, now, broker)
        return []

    def _close(self, message: Close, now: float, broker: str) -> list[Message]:
        session = self.sessions.get(message.session_id)
        if session is not None and session.epoch <= message.epoch:
            self._forget(message.session_id)
        return []

    def _ack(self, message: Ack, now: float, broker: str) -> list[Message]:
        session = self.sessions.get(message.session_id)
        if session is None or session.epoch != message.epoch or message.length > session.length:
            return []
        session.journaled = max(session.journaled, message.length)
        if not message.resend or message.length == session.length:
            return []
        return [verdict_again(session, message.length, self._planner.asked)]

    def _draft(self, message: Draft, now: float, broker: str) -> list[Message]:
        session = self.sessions.get(message.session_id)
        if session is None or session.epoch != message.epoch:
            return []
        reason = reason_against(message, self._model.vocab_size)
        if reason:
            raise ProtocolError(f"a draft was dropped: {reason}")
        self._control.note_draft(message.session_id, message.base_len, now)
        self._sources.put(session, message if self._trusts_drafts else stripped(message))
        if self._tracer.is_on:
            values = (message.lane, len(message.token_ids), message.base_len)
            self._tracer.note(message.session_id, trace_events.DRAFT_ARRIVED, now, *values)
        return []

    def _drafts(self, message: Drafts, now: float, broker: str) -> list[Message]:
        """Take the drafts of several sessions. Raises ProtocolError for the first bad one, after the others."""
        message.check()
        if not are_valid(message, self._model.vocab_size) or self._tracer.is_on:
            return self._one_by_one(message, now, broker)
        known, places, is_foreign = list[Session](), list[int](), False
        columns = message.session_ids, message.epochs, message.base_lens
        for i, (session_id, epoch, base_len) in enumerate(zip(*(one.tolist() for one in columns), strict=True)):
            session = self.sessions.get(session_id)
            if session is None or session.epoch != epoch:
                continue
            if session.broker != broker:
                is_foreign = True
                continue
            self._control.note_draft(session_id, base_len, now)
            known.append(session)
            places.append(i)
        if known:
            self._sources.put_all(known, message if len(known) == len(message.session_ids) else message.take(places))
        if is_foreign:
            raise ProtocolError(f"drafts from {broker or 'a broker'} for a session of another broker")
        return []

    def _one_by_one(self, message: Drafts, now: float, broker: str) -> list[Message]:
        errors = list[ProtocolError]()
        for draft in message.each():
            try:
                self.handle(draft, now, broker)
            except ProtocolError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return []

    def _get_activations(self, message: GetActivations, now: float, broker: str) -> list[Message]:
        session = self.sessions.get(message.session_id)
        if session is None or session.epoch != message.epoch:
            return []
        return [*self._sources.ask_activations(session, message)]

    def _fetch_tokenizer(self, message: FetchTokenizer, now: float, broker: str) -> list[Message]:
        return list(tokenizer_chunks(self._model, self.tokenizer_files))

    def _clock(self, message: Clock, now: float, broker: str) -> list[Message]:
        self._tracer.take_clock(message, broker)
        return []
