"""The roles of the value fuzzer: raw peers that take part as far as they must, and otherwise send messages of a
`Forger`. Each has `send()`, which sends one forged message, and `hear()`, which receives messages and keeps it
registered.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np
import zmq

from specq.config.values import free_address
from specq.protocol import Frames, ModelInfo, ProtocolError, SamplingParams, decode, encode, type_of
from specq.protocol.messages import (
    MESSAGES,
    Ack,
    Assign,
    Cancel,
    Close,
    Draft,
    FetchTokenizer,
    Follow,
    GetStatus,
    Heartbeat,
    Hello,
    ListJobs,
    Message,
    Open,
    Refused,
    Release,
    SessionFailed,
    Submit,
    TokenizerChunk,
    Verdict,
    Verdicts,
)
from tests.chaos.forging import Forger, Session

BEAT_S = 0.1
SEND_MS = 20_000  # a peer that takes nothing for so long has stopped
STRAYS = 0.1  # of the messages are of types that the receiver does not take
NUM_SOCKETS = 8  # since a broker limits the requests of each


class Peer:
    """Sockets to one address, and what is said over them in turn."""

    weights: ClassVar[dict[type[Message], int]] = {}

    def __init__(self, address: str, forger: Forger, num_sockets: int = NUM_SOCKETS) -> None:
        self.forger, self.rng = forger, forger.rng
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets = [self.connect(address) for _ in range(num_sockets)]
        self.num_sent, self.num_heard = 0, 0

    def connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDTIMEO, SEND_MS)
        socket.connect(address)
        return socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.context.destroy(0)

    def choose(self) -> type[Message]:
        if self.rng.random() < STRAYS:
            return self.rng.choice([cls for cls in MESSAGES.values() if cls is not Hello])
        return self.rng.choices(list(self.weights), list(self.weights.values()))[0]

    def send(self) -> None:
        """Say one forged message."""
        number = self.num_sent % len(self.sockets)
        self.num_sent += 1
        frames = self.forge(number)
        if frames:
            self.sockets[number].send_multipart(frames)

    def forge(self, number: int) -> Frames:
        """Return what is to be said over a socket; nothing if it would rightly end a job that is another's."""
        cls = self.choose()
        return [] if cls is Cancel else self.forger.frames(cls)

    def hear(self) -> None:
        """Take all that has arrived."""
        for number, socket in enumerate(self.sockets):
            while socket.poll(0):
                self.num_heard += 1
                with contextlib.suppress(
                    ProtocolError
                ):  # verdicts are passed on as they are: another role may have forged it
                    self.take(number, decode(socket.recv_multipart()))

    def take(self, number: int, message: Message) -> None:
        """Take a message from a socket."""


class ForgedClient(Peer):
    """Asks for jobs, and of jobs."""

    weights: ClassVar[dict[type[Message], int]] = {
        Submit: 60,
        Follow: 12,
        Cancel: 12,
        ListJobs: 5,
        GetStatus: 5,
        FetchTokenizer: 1,
    }

    def forge(self, number: int) -> Frames:
        """Return what is to be said; without keys anybody may cancel any job, so not that of the jobs beside."""
        frames = self.forger.frames(self.choose())
        is_anothers = int.from_bytes(frames[0], "little") in self.forger.others
        return [] if is_anothers and type_of(frames) is Cancel else frames


class ForgedDrafter(Peer):
    """Registered drafters, which are given real sessions and lanes of them."""

    weights: ClassVar[dict[type[Message], int]] = {Draft: 80, Heartbeat: 12, Hello: 3}

    def __init__(self, address: str, forger: Forger) -> None:
        super().__init__(address, forger)
        self.known: list[dict[int, Session]] = [{} for _ in self.sockets]
        self.beaten = 0.0
        for number in range(len(self.sockets)):
            self.say_hello(number)

    def say_hello(self, number: int) -> None:
        model = ModelInfo(**self.forger.model | {"fingerprint": f"forged {number}"})
        hello = Hello(role="draft", name=f"forged-{number}", incarnation=self.rng.getrandbits(62), model=model)
        self.sockets[number].send_multipart(encode(hello))

    def forge(self, number: int) -> Frames:
        self.forger.sessions = self.known[number]
        return super().forge(number)

    def hear(self) -> None:
        super().hear()
        if time.monotonic() > self.beaten + BEAT_S:
            self.beaten = time.monotonic()
            for socket, known in zip(self.sockets, self.known, strict=True):
                socket.send_multipart(encode(beat(list(known.values()))))

    def take(self, number: int, message: Message) -> None:
        known = self.known[number]
        match message:
            case Refused():
                self.say_hello(number)
            case Assign():
                known[message.session_id] = Session(
                    message.session_id, message.epoch, message.lane, len(message.token_ids)
                )
            case Release():
                known.pop(message.session_id, None)
            case Verdict() if message.session_id in known:
                known[message.session_id].length = message.base_len + len(message.token_ids)
                if message.finish:
                    del known[message.session_id]


class ForgedVerifier(Peer):
    """A verifier of a model of its own, with jobs of its own; what it says of them is true, of others' it is not."""

    weights: ClassVar[dict[type[Message], int]] = {Heartbeat: 10, Hello: 2}
    back_weights: ClassVar[dict[type[Message], int]] = {
        Verdict: 50,
        Verdicts: 30,
        SessionFailed: 10,
        TokenizerChunk: 10,
    }
    job_every = 100  # messages

    def __init__(self, address: str, forger: Forger) -> None:
        super().__init__(address, forger, num_sockets=2)
        self.endpoint, self.client = free_address(), self.connect(address)
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(self.endpoint)
        self.brokers: list[bytes] = []  # identities of the broker's sockets here
        self.beaten = 0.0
        for number in range(len(self.sockets)):
            self.say_hello(number)

    def say_hello(self, number: int) -> None:
        hello = Hello(
            role="target", name=f"forged-{number}", incarnation=self.rng.getrandbits(62), endpoint=self.endpoint,
            model=ModelInfo(**self.forger.model), max_sessions=8,
        )  # fmt: skip
        self.sockets[number].send_multipart(encode(hello))

    def send(self) -> None:
        if self.num_sent % self.job_every == 0:
            params = SamplingParams(max_tokens=50, logprobs=self.rng.choice([-1, 0, 2]))
            job = Submit(
                job_id=self.rng.getrandbits(62), params=params, model=self.forger.model["name"],
                prompt_ids=np.array([1, 2, 3], np.int32),
            )  # fmt: skip
            self.client.send_multipart(encode(job))
        if not self.brokers or self.rng.random() < 0.1:
            super().send()
            return
        self.num_sent += 1
        cls = self.rng.choices(list(self.back_weights), list(self.back_weights.values()))[0]
        self.router.send_multipart([self.rng.choice(self.brokers), *self.forger.frames(cls)])

    def hear(self) -> None:
        super().hear()
        while self.client.poll(0):
            self.client.recv_multipart()
        while self.router.poll(0):
            identity, *frames = self.router.recv_multipart()
            self.brokers = [*[known for known in self.brokers if known != identity], identity][-2:]
            self.hear_broker(decode(frames))
        if time.monotonic() > self.beaten + BEAT_S:
            self.beaten = time.monotonic()
            for socket in self.sockets:
                socket.send_multipart(encode(replace(beat(list(self.forger.sessions.values())), pending=0)))

    def hear_broker(self, message: Message) -> None:
        own = self.forger.sessions
        if isinstance(message, Open):
            own[message.session_id] = Session(message.session_id, message.epoch, 0, len(message.token_ids))
        elif isinstance(message, Close):
            own.pop(message.session_id, None)
        elif isinstance(message, Ack) and message.session_id in own:
            own[message.session_id].length = message.length

    def take(self, number: int, message: Message) -> None:
        if isinstance(message, Refused):
            self.say_hello(number)


class ForgedBroker(Peer):
    """A stranger at a verifier's socket who speaks as its broker would, of sessions of his own."""

    weights: ClassVar[dict[type[Message], int]] = {Open: 50, Close: 10, Ack: 15, Draft: 30, FetchTokenizer: 1}
    num_sessions = 40

    def __init__(self, address: str, forger: Forger) -> None:
        super().__init__(address, forger)
        forger.sessions = {i: Session(i, length=3) for i in range(1, self.num_sessions)}


def beat(sessions: Sequence[Session]) -> Heartbeat:
    """Return an honest heartbeat."""
    numbers: dict[str, Any] = {
        "session_ids": np.array([one.session_id for one in sessions], np.int64),
        "epochs": np.array([one.epoch for one in sessions], np.int64),
        "lengths": np.array([one.length for one in sessions], np.int32),
    }
    return Heartbeat(incarnation=1, state="ready", steps=random.getrandbits(40), free_slots=10_000, **numbers)
