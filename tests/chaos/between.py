"""A forger between a broker and its drafter: what a broker says to a drafter can come only over the drafter's own
connection."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import ClassVar, Self

import zmq

from specq.config.values import free_address
from specq.protocol import Assign, Frames, Message, ProtocolError, Refused, Release, Verdict, Verdicts, Welcome, decode
from tests.chaos.forgers import SEND_MS, Peer
from tests.chaos.forging import Forger, Session


class Between(Peer):
    """Sits between a broker and a drafter, passes everything on, and adds what a broker would say, forged."""

    weights: ClassVar[dict[type[Message], int]] = {Assign: 40, Verdict: 40, Verdicts: 20, Release: 10}
    num_sessions = 40

    def __init__(self, address: str, forger: Forger) -> None:
        super().__init__(address, forger, num_sockets=1)
        forger.sessions = {i: Session(i, length=3) for i in range(1, self.num_sessions)}
        self.address, self.drafter = free_address(), b""
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.SNDTIMEO, SEND_MS)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.router.bind(self.address)
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._relay, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join(60)
        super().__exit__(kind, error, at)

    def _relay(self) -> None:
        while not self._stopped.wait(0.001):
            try:
                self.hear()
            except zmq.ZMQError:  # the drafter has ended
                self.drafter = b""

    def send(self) -> None:
        """Add a forged message, but never a word that by itself ends the drafter: that is a broker's right."""
        self.num_sent += 1
        frames = self.forger.frames(self.choose())
        if not is_last_word(frames):
            with self._lock:
                self.router.send_multipart([self.drafter, *frames])

    def hear(self) -> None:
        with self._lock:
            while self.router.poll(0):
                self.drafter, *frames = self.router.recv_multipart()
                self.sockets[0].send_multipart(frames)
            while self.drafter and self.sockets[0].poll(0):
                self.router.send_multipart([self.drafter, *self.sockets[0].recv_multipart()])


def is_last_word(frames: Frames) -> bool:
    """Whether a drafter would rightly end, or rest for an hour, at this."""
    try:
        return isinstance(decode(frames), Refused | Welcome)
    except ProtocolError:
        return False
