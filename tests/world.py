"""The real broker, verifiers and drafters under a virtual clock: messages are delayed, lost or doubled as a test wants.

Everything travels as frames through `specq.wire`, as over sockets. One event at a time, in the order of its time; the
same seed gives the same run.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specq.broker.core import Broker
from specq.broker.state import Connect, Effect, Send
from specq.curve import StepCurve
from specq.drafter import Drafter
from specq.messages import Accepted, Failed, Hello, Message, Refused, Status, Submit, Tokens, Verdict, Welcome
from specq.params import SamplingParams, Speculation
from specq.verifier import Verifier
from specq.wire import decode, encode
from tests.toy import ToyEngine, ToyProposer

BEAT_S = 0.5
CLIENT = b"client"


@dataclass
class Received:
    """What a client has heard of one job."""

    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    failed: Failed | None = None
    stats: dict[str, object] = field(default_factory=dict)


class World:
    """A broker and its workers, a network between them, and a clock."""

    def __init__(
        self, *, seed: int = 0, delay_s: float = 0.0002, loss: float = 0.0, double: float = 0.0, pass_s: float = 0.001
    ) -> None:
        self.random = random.Random(seed)
        self.delay_s, self.loss, self.double, self.pass_s = delay_s, loss, double, pass_s
        self.now = 0.0
        self.broker = Broker(incarnation=1)
        self.verifiers: dict[bytes, Verifier] = {}
        self.drafters: dict[bytes, Drafter] = {}
        self.received: dict[int, Received] = {}
        self.others: list[Message] = []  # what the client heard besides its jobs
        self.refused: dict[bytes, str] = {}
        self.verdicts: list[Verdict] = []
        self._busy: set[bytes] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.at(BEAT_S / 2, self._tick)

    # --- time -------------------------------------------------------------------------------------------------------

    def at(self, delay: float, action: Callable[[], None]) -> None:
        """Do something after so many seconds."""
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, action))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = end

    def run_until(self, condition: Callable[[], bool], limit_s: float = 300.0) -> None:
        """Let time pass until the condition holds; fails after the limit."""
        end = self.now + limit_s
        while not condition():
            assert self._events, "nothing happens any more"
            assert self._events[0][0] <= end, "the condition was never met"
            self.now, _, action = heapq.heappop(self._events)
            action()

    def _carry(self, deliver: Callable[[], None], reliable: bool) -> None:
        if not reliable and self.random.random() < self.loss:
            return
        copies = 2 if not reliable and self.random.random() < self.double else 1
        for _ in range(copies):
            jitter = self.random.random() if self.loss or self.double else 0.0
            self.at(self.delay_s * (1 + 3 * jitter), deliver)

    # --- workers ----------------------------------------------------------------------------------------------------

    def add_verifier(self, identity: bytes = b"v0", engine: ToyEngine | None = None, **options: int) -> Verifier:
        """Start a verifier with a toy engine."""
        engine = engine or ToyEngine()
        sizes = [1, 8, 64]
        verifier = Verifier(engine, StepCurve(sizes, engine.step_times(sizes)), incarnation=1, **options)
        self.verifiers[identity] = verifier
        self._hello(identity, "target", verifier.engine.info, options.get("max_sessions", 64))
        self._beat(identity)
        return verifier

    def add_drafter(self, identity: bytes = b"d0", proposer: ToyProposer | None = None, **options: int) -> Drafter:
        """Start a drafter with a toy proposer."""
        drafter = Drafter(proposer or ToyProposer(), incarnation=1, **options)
        self.drafters[identity] = drafter
        self._hello(identity, "draft", drafter.proposer.info, 0)
        self._beat(identity)
        return drafter

    def kill(self, identity: bytes) -> None:
        """Stop a worker without a word."""
        self.verifiers.pop(identity, None)
        self.drafters.pop(identity, None)

    def _hello(self, identity: bytes, role: str, model: object, max_sessions: int) -> None:
        hello = Hello(
            role=role, name=identity.decode(), incarnation=1, model=model, endpoint="toy", max_sessions=max_sessions
        )
        self._to_broker(identity, [hello], front=True, reliable=True)

    def _beat(self, identity: bytes) -> None:
        worker = self.verifiers.get(identity) or self.drafters.get(identity)
        if worker is not None:
            self._to_broker(identity, [worker.heartbeat()], front=True)
            self.at(BEAT_S, lambda: self._beat(identity))

    def _wake(self, identity: bytes) -> None:
        worker = self.verifiers.get(identity) or self.drafters.get(identity)
        if worker is None or identity in self._busy or not worker.has_work:
            return
        self._busy.add(identity)
        if isinstance(worker, Verifier):
            messages = worker.step(lambda: self.now)
            rows = worker.engine.num_rows[-1] if isinstance(worker.engine, ToyEngine) and worker.engine.num_rows else 1
            self.at(worker.curve(rows), lambda: self._finish(identity, messages, front=False))
        else:
            drafts = list(worker.step())
            self.at(self.pass_s, lambda: self._finish(identity, drafts, front=True))

    def _finish(self, identity: bytes, messages: Sequence[Message], *, front: bool) -> None:
        self._busy.discard(identity)
        self.verdicts += [message for message in messages if isinstance(message, Verdict)]
        if identity in self.verifiers or identity in self.drafters:
            self._to_broker(identity, messages, front=front)
        self._wake(identity)

    # --- messages ---------------------------------------------------------------------------------------------------

    def _to_broker(self, identity: bytes, messages: Sequence[Message], *, front: bool, reliable: bool = False) -> None:
        take = self.broker.from_front if front else self.broker.from_back
        for message in messages:
            frames = encode(message)
            self._carry(lambda f=frames: self._apply(take(identity, f, self.now)), reliable)  # type: ignore[misc]

    def _tick(self) -> None:
        self._apply(self.broker.tick(self.now))
        self.at(BEAT_S / 2, self._tick)

    def _apply(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                reliable = effect.to == CLIENT  # a client asks again by itself; not what is tested here
                self._carry(lambda e=effect: self._deliver(e), reliable)  # type: ignore[misc]
            elif isinstance(effect, Connect):
                assert effect.endpoint == "toy"

    def _deliver(self, effect: Send) -> None:
        message = decode(effect.frames)
        if effect.to == CLIENT:
            self._hear(message)
        elif isinstance(message, Welcome | Refused):
            if isinstance(message, Refused) and message.fatal:
                self.refused[effect.to] = message.reason
        elif effect.to in self.verifiers:
            self._to_broker(effect.to, self.verifiers[effect.to].handle(message, self.now), front=False)
            self._wake(effect.to)
        elif effect.to in self.drafters:
            self.drafters[effect.to].handle(message)
            self._wake(effect.to)

    # --- the client -------------------------------------------------------------------------------------------------

    def submit(
        self, job_id: int, prompt: Sequence[int], *, speculation: Speculation | None = None, **params: object
    ) -> Received:
        """Submit a job; return where its tokens will appear."""
        message = Submit(
            job_id=job_id,
            params=SamplingParams(**params).validate(),
            speculation=speculation or Speculation(),
            prompt_ids=np.array(prompt, np.int32),
        )
        received = self.received.setdefault(job_id, Received())
        self.send(message)
        return received

    def send(self, message: Message) -> None:
        """Send a message to the broker as the client."""
        self._to_broker(CLIENT, [message], front=True, reliable=True)

    def _hear(self, message: Message) -> None:
        if isinstance(message, Tokens):
            received = self.received[message.job_id]
            known = len(received.token_ids) - message.base_len
            assert known >= 0, "a gap in what the client hears"
            received.token_ids += message.token_ids.tolist()[known:]
            received.finish, received.stats = message.finish, message.stats
        elif isinstance(message, Failed) and message.job_id:
            self.received[message.job_id].failed = message
        elif not isinstance(message, Accepted):
            self.others.append(message)

    def status(self) -> dict[str, object]:
        """Return the broker's status report."""
        found = [message for message in self.others if isinstance(message, Status)]
        return found[-1].report
