"""One broker, one verifier, one client and a journal, step by step, with a crash of the broker wherever a test wants
it.

The broker and the client's core are the real ones; the verifier is a script that says the toy text, three tokens a
round. Everything between two things that happen is a boundary at which the broker may die: its records that were not
journaled are gone, or were journaled without its hearing of it; what it was about to send is never sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specq.broker import Broker, Effect, Find, Send, Write
from specq.client.core import ClientCore
from specq.client.events import Event, JobDone, RequestFailed
from specq.protocol import SamplingParams, decode, encode
from specq.protocol.messages import (
    Accepted,
    Ack,
    Close,
    Failed,
    Heartbeat,
    Hello,
    JobTokens,
    Message,
    Open,
    Refused,
    SessionFailed,
    Submit,
    Tokens,
    Verdict,
)
from specq.testing import FakeJournal, next_token, toy_info

VERIFIER, CLIENT = b"verifier", b"client"
ROUND = 3  # tokens
GROUP = 2  # turns between two groups of the journal
TURN_S = 0.1


class CrashError(Exception):
    """The broker dies here."""


@dataclass
class ScriptedVerifier:
    """Opens, commits a round of each session at a time, and remembers across the broker's deaths."""

    sessions: dict[int, tuple[int, list[int], int]] = field(default_factory=dict)  # job -> epoch, context, limit
    registered: bool = False

    def hear(self, message: Message) -> None:
        """Take a message of the broker."""
        if isinstance(message, Open):
            known = self.sessions.get(message.session_id)
            if known is None or known[0] < message.epoch:
                context = message.token_ids.tolist()
                self.sessions[message.session_id] = (message.epoch, context, len(context) + message.tokens_left)
        elif isinstance(message, Close):
            known = self.sessions.get(message.session_id)
            if known is not None and known[0] <= message.epoch:
                del self.sessions[message.session_id]
        elif isinstance(message, Refused):
            self.registered = False
        else:
            self.registered = True

    def say(self) -> Iterable[Message]:
        """Return a round of each session that is not at its end."""
        for session_id, (epoch, context, limit) in self.sessions.items():
            base_len = len(context)
            for _ in range(min(ROUND, limit - base_len)):
                context.append(next_token(context))
            if len(context) > base_len:
                finish = "length" if len(context) == limit else ""
                tokens = np.array(context[base_len:], np.int32)
                yield Verdict(session_id=session_id, epoch=epoch, base_len=base_len, finish=finish, token_ids=tokens)

    def resend(self, message: Ack) -> Iterable[Message]:
        """Return what the broker lacks."""
        epoch, context, limit = self.sessions.get(message.session_id, (0, [], 0))
        if epoch == message.epoch and message.resend and message.length < len(context):
            finish = "length" if len(context) == limit else ""
            tokens = np.array(context[message.length :], np.int32)
            base_len = message.length
            yield Verdict(
                session_id=message.session_id, epoch=epoch, base_len=base_len, finish=finish, token_ids=tokens
            )

    def beat(self) -> Message:
        """Return the heartbeat, or the greeting while the broker does not know this verifier."""
        if not self.registered:
            return Hello(role="target", name="v", incarnation=1, model=toy_info(), endpoint="toy", max_sessions=8)
        held = self.sessions
        return Heartbeat(
            incarnation=1,
            state="ready",
            session_ids=np.array(list(held), np.int64),
            epochs=np.array([epoch for epoch, _, _ in held.values()], np.int64),
            lengths=np.array([len(context) for _, context, _ in held.values()], np.int32),
        )


class Scene:
    """What happens, in turns; `crash_at` says at which boundary the broker dies, and `survives` what becomes of records
    that were on their way to the journal: they are lost, or journaled unheard."""

    def __init__(self, crash_at: Iterable[int] = (), *, survives: bool = False, journal: Any = None) -> None:
        self.journal, self.verifier = journal or FakeJournal(), ScriptedVerifier()
        self.client = ClientCore("nowhere", timeout_s=1000.0)
        self.events: list[Event] = []
        self.now, self.life, self.num_boundaries = 0.0, 0, 0
        self._crash_at, self._survives = set(crash_at), survives
        self._pending: list[Write] = []
        self._to_broker: deque[tuple[bytes, Message]] = deque()
        self._start()
        self._to_broker.append((VERIFIER, self.verifier.beat()))

    # --- the broker's lives -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.life += 1
        self.broker = Broker(incarnation=0, has_journal=True, epoch=self.life << 32)
        self.broker.restore(self.journal.unfinished(), self.now)

    def _boundary(self) -> None:
        self.num_boundaries += 1
        if self.num_boundaries in self._crash_at:
            raise CrashError

    def _die(self) -> None:
        if self._survives:
            self.journal.write([write.record for write in self._pending])
        self._pending.clear()
        self._to_broker.clear()  # a dead peer's buffers are gone
        self._start()

    # --- turns --------------------------------------------------------------------------------------------------------

    def submit(self, job_id: int, prompt: list[int], max_tokens: int) -> None:
        """Let the client submit a job."""
        params = SamplingParams(max_tokens=max_tokens)
        self.client.submit(Submit(job_id=job_id, params=params, prompt_ids=np.array(prompt, np.int32)), self.now)

    def run(self, done: Callable[[], bool], most_turns: int = 400) -> None:
        """Take turns until it is done; fails if it never is."""
        for turn in range(most_turns):
            if done():
                return
            try:
                self._turn(turn)
            except CrashError:
                self._die()
        raise AssertionError("it never came to an end")

    def _turn(self, turn: int) -> None:
        self.now += TURN_S
        self.events += self.client.tick(self.now)
        self._to_broker += [(CLIENT, message) for message in self.client.take_outbox()]
        if turn % 5 == 0:
            self._to_broker.append((VERIFIER, self.verifier.beat()))
        self._to_broker += [(VERIFIER, message) for message in self.verifier.say()]
        while self._to_broker:
            identity, message = self._to_broker.popleft()
            is_back = isinstance(message, Verdict | SessionFailed)
            take = self.broker.from_back if is_back else self.broker.from_front
            self._apply(take(identity, encode(message), self.now))
        self._apply(self.broker.tick(self.now))
        if turn % GROUP == 0:
            self._commit()

    def _commit(self) -> None:
        """Journal the older half of what is on its way, as one group, and notify the broker."""
        if not self._pending:
            return
        self._boundary()
        half = (len(self._pending) + 1) // 2
        group, self._pending = self._pending[:half], self._pending[half:]
        self.journal.write([write.record for write in group])
        self._boundary()
        self._apply(self.broker.journaled(group[-1].sequence, self.now))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._boundary()
            if isinstance(effect, Write):
                self._pending.append(effect)
            elif isinstance(effect, Find):
                self._apply(self.broker.found(effect.job_id, self.journal.find(effect.job_id), self.now))
            elif isinstance(effect, Send):
                self._deliver(effect.to, decode(effect.frames))

    def _deliver(self, to: bytes, message: Message) -> None:
        if to == CLIENT:
            self._check(message)
            self.events += self.client.receive(message, self.now)
        elif isinstance(message, Ack):
            self._to_broker += [(VERIFIER, answer) for answer in self.verifier.resend(message)]
        else:
            self.verifier.hear(message)

    # --- what must hold -----------------------------------------------------------------------------------------------

    def _check(self, message: Message) -> None:
        """Fail if the client receives something that the journal does not have."""
        for tokens in message.each() if isinstance(message, JobTokens) else ():
            self._check(tokens)
        if not isinstance(message, Accepted | Tokens | Failed):
            return
        known = self.journal.find(message.job_id)
        if isinstance(message, Failed):
            assert known is None or message.code in ("invalid", "conflict", known.code), (
                "a failure that the journal does not have"
            )
            return
        assert known is not None, "a client heard of a job that is not in the journal"
        if isinstance(message, Tokens):
            have = np.frombuffer(known.token_ids, "<i4").tolist()
            end = message.base_len + len(message.token_ids)
            told = message.token_ids.tolist()
            assert have[message.base_len : end] == told, "a client saw a token that is not in the journal"
            assert message.finish in ("", known.finish), "a client heard of an end that is not in the journal"

    def ended(self, *jobs: int) -> bool:
        """Whether the client received the end of these jobs."""
        return {event.key for event in self.events if isinstance(event, JobDone | RequestFailed)} >= set(jobs)

    def texts(self) -> dict[int, list[int]]:
        """Return what the client holds of the jobs that ended well; each ends once."""
        done = [event for event in self.events if isinstance(event, JobDone)]
        assert len({event.key for event in done}) == len(done), "a job ended twice"
        return {event.key: event.transcript.token_ids for event in done}
