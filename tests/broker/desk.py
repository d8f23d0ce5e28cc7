"""A broker with one verifier, spoken to directly: for tests of what it answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from specq.broker import Broker, Effect, Find, FindFinished, Send, Write
from specq.broker.state.job import BrokerJob
from specq.protocol.messages import Heartbeat, Hello, JobTokens, Message, Submit, Tokens, Verdict
from specq.protocol.params import SamplingParams
from specq.protocol.versions import CAPABILITIES
from specq.protocol.wire import decode, encode
from specq.testing.toy import toy_info

VERIFIER, ANN, BEN = b"verifier", b"ann", b"ben"


class Desk:
    """A broker with one verifier, spoken to directly."""

    def __init__(
        self, *, max_sessions: int = 8, capabilities: tuple[str, ...] = CAPABILITIES, **options: object
    ) -> None:
        self.broker = Broker(incarnation=1, **options)
        self.now = 100.0
        self.writes: list[Write] = []
        self.sent: list[tuple[bytes, Message]] = []
        self.asked: list[Find | FindFinished] = []
        self.hello(VERIFIER, max_sessions=max_sessions, capabilities=capabilities)

    def hello(
        self, identity: bytes, max_sessions: int = 8, capabilities: tuple[str, ...] = CAPABILITIES, **model: str
    ) -> None:
        hello = Hello(
            role="target",
            name="v",
            incarnation=1,
            model=replace(toy_info(), **model),
            endpoint="toy",
            max_sessions=max_sessions,
            capabilities=capabilities,
        )
        self.front(identity, hello)

    def add_drafter(self, name: bytes, **fields: object) -> list[Message]:
        """Register a drafter with a model of its own; return what it receives."""
        model = replace(toy_info(), fingerprint=name.decode())
        return self.front(name, Hello(role="draft", name=name.decode(), incarnation=1, model=model, **fields))

    def leave(self, identity: bytes = VERIFIER, state: str = "leaving") -> None:
        self.front(identity, Heartbeat(incarnation=1, state=state))

    def front(self, identity: bytes, message: Message) -> list[Message]:
        """Send a message to the broker; return what this peer receives at once."""
        return self.take(self.broker.from_front(identity, encode(message), self.now), identity)

    def back(self, message: Message, verifier: bytes = VERIFIER, received: bytes = ANN) -> list[Message]:
        """Let a verifier send a message; return what a client receives at once."""
        return self.take(self.broker.from_back(verifier, encode(message), self.now), received)

    def received(self, who: bytes = b"", *kinds: type[Message]) -> list[Any]:
        """Return what was sent to a peer (b"": to all), of these kinds or of any."""
        return [m for to, m in self.sent if who in (b"", to) and isinstance(m, kinds or Message)]

    def job(self, job_id: int) -> BrokerJob:
        """Return a job that waits or runs."""
        return self.broker.state.jobs.active[job_id]

    def take(self, effects: list[Effect], received: bytes = b"") -> list[Message]:
        """Take effects in; return what one peer receives."""
        self.writes += [effect for effect in effects if isinstance(effect, Write)]
        self.asked += [effect for effect in effects if isinstance(effect, Find | FindFinished)]
        sends = [(effect.to, decode(effect.frames)) for effect in effects if isinstance(effect, Send)]
        self.sent += sends
        return [message for to, message in sends if to == received]

    def submit(
        self, job_id: int, client: bytes = ANN, max_tokens: int = 10, prompt_logprobs: int = -1, **fields: object
    ) -> list[Message]:
        """Submit a job that the journal does not know."""
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        received = self.front(client, Submit(job_id=job_id, params=params, prompt_ids=np.array([5, 6]), **fields))
        return received + [message for asked in self._asked() for message in self.found(asked, client)]

    def _asked(self) -> list[Find]:
        asked, self.asked = self.asked, []
        return [one for one in asked if isinstance(one, Find)]

    def found(self, asked: Find, client: bytes) -> list[Message]:
        return self.take(self.broker.found(asked.job_id, None, self.now), client)

    def verdict(
        self, job_id: int, *tokens: int, finish: str = "", received: bytes = ANN, **fields: object
    ) -> list[Message]:
        """Commit tokens of a job; return what a client receives at once."""
        job = self.job(job_id)
        said = {"base_len": job.transcript.length, "finish": finish, "token_ids": np.array(tokens)} | fields
        verdict = Verdict(session_id=job_id, epoch=job.session.epoch, **said)
        return self.back(verdict, job.session.verifier, received)

    def journaled(self, received: bytes = ANN) -> list[Message]:
        """Let the journal have everything; return what a client receives."""
        return self.take(self.broker.journaled(self.writes[-1].sequence, self.now), received)

    def tick(self, seconds: float = 0.25, received: bytes = ANN) -> list[Message]:
        self.now += seconds
        self.beat(VERIFIER)
        return self.take(self.broker.tick(self.now), received)

    def beat(self, verifier: bytes, *, is_deaf: bool = False) -> None:
        """Send a verifier's heartbeat with its sessions, or with none of the sent ones."""
        jobs = self.broker.state.jobs.active.values()
        held = [job for job in jobs if job.session.verifier == verifier and not is_deaf]
        beat = Heartbeat(
            incarnation=1,
            state="ready",
            session_ids=np.array([job.job_id for job in held], np.int64),
            epochs=np.array([job.session.epoch for job in held], np.int64),
            lengths=np.array([job.transcript.length for job in held], np.int32),
        )
        self.front(verifier, beat)


def desk_with(*job_ids: int, **options: Any) -> Desk:
    """Return a desk where Ann has submitted jobs, which the journal has if there is one."""
    desk = Desk(**options)
    for job_id in job_ids:
        desk.submit(job_id)
    if options.get("has_journal"):
        desk.journaled()
    return desk


def token_ids(messages: list[Message]) -> list[int]:
    return [
        token for message in messages if isinstance(message, Tokens | JobTokens) for token in message.token_ids.tolist()
    ]
