"""The whole system under a virtual clock, with all that can go wrong: real broker, verifiers, drafters and clients, toy
models.

Everything travels as frames, over lines that lose, double, reorder and delay. Any process may be killed or frozen at
any time; the broker also between any two things that it does: before and after each group of its journal, before each
message. What holds is checked as it happens (`specq.testing.fake_journal`, `_check_told`) and at the end
(`tests.chaos.schedule`).
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

from specq.broker import Broker, Effect, Find, FindFinished, Send, Write
from specq.drafting.worker.worker import DraftWorker
from specq.protocol.messages import Accepted, Failed, Heartbeat, Hello, JobTokens, Message, Submit, Tokens
from specq.protocol.params import SamplingParams
from specq.protocol.types import ModelInfo
from specq.protocol.versions import CAPABILITIES
from specq.protocol.wire import Frames, decode, encode
from specq.simulate.machine import DelayLine, EventQueue, LineSettings
from specq.simulate.processes import DrafterProcess, Process, VerifierProcess
from specq.testing.fake_journal import FakeJournal
from specq.testing.world import NO_HOST
from specq.verifier import StepCurve, Verifier
from tests.chaos.stubs import Moods, MoodyEngine, SlowEngine, slow_proposer
from tests.chaos.users import Client

BEAT_S, LIVENESS_S = 0.1, 0.6
TICK_S, COMMIT_S = 0.05, 0.004
DELAY_S = 0.002
SIZES = (1, 8, 64)


class CrashError(Exception):
    """The broker dies here."""


class ChaosWorld:
    """`line` is what all lines are like; `crash_in` boundaries the broker dies, if that is not 0."""

    def __init__(self, seed: int, *, moody: bool = False) -> None:
        self.random, self.moody, self.moods = random.Random(seed), moody, Moods(set)
        self.queue, self.journal, self.faults = EventQueue(), FakeJournal(), Counter[str]()
        self.processes: dict[bytes, Process] = {}
        self.clients: dict[bytes, Client] = {}  # by identity
        self.line = LineSettings(DELAY_S)
        self.lines: defaultdict[tuple[bytes, str], DelayLine] = defaultdict(self._new_line)
        self.stalled: dict[bytes, float] = {}  # peer -> until when what it and the broker say does not arrive
        self.broker: Broker | None = None
        self.life = self.crash_in = self.num_boundaries = 0
        self.frozen_until = 0.0  # the broker
        self._survives = False
        self._pending: list[Write] = []
        self._numbers = count(1)
        self.start_broker()
        self.queue.at(TICK_S, self._tick)

    @property
    def now(self) -> float:
        return self.queue.now

    def _new_line(self) -> DelayLine:
        return DelayLine(self.line, self.random.random())

    def set_line(self, line: LineSettings) -> None:
        """Change what all lines are like."""
        self.line = line
        for one in self.lines.values():
            one.settings = line

    # --- who takes part ---------------------------------------------------------------------------------------------

    def add_verifier(self) -> bytes:
        """Start a verifier."""
        number = next(self._numbers)
        identity = b"v%d" % number
        engine = MoodyEngine(self.moods, self.random) if self.moody else SlowEngine()
        curve = StepCurve(SIZES, engine.step_times(SIZES))
        verifier = Verifier(engine, curve, incarnation=number, max_sessions=8, max_uncommitted=32)
        hello = self._hello("target", identity, number, engine.info, max_sessions=8)
        self._start(VerifierProcess(self.queue, identity, verifier, engine, hello, NO_HOST))
        return identity

    def add_drafter(self) -> bytes:
        """Start a drafter."""
        number = next(self._numbers)
        identity, proposer = b"d%d" % number, slow_proposer(2 + number % 4)
        drafter = DraftWorker(proposer, incarnation=number, width=4, max_ahead=8)
        hello = self._hello("draft", identity, number, proposer.info)
        self._start(DrafterProcess(self.queue, identity, drafter, proposer, hello, NO_HOST))
        return identity

    def _hello(self, role: str, identity: bytes, number: int, model: ModelInfo, max_sessions: int = 0) -> Hello:
        own = {"name": identity.decode(), "incarnation": number, "max_sessions": max_sessions}
        return Hello(role=role, model=model, capabilities=CAPABILITIES, **own)

    def _start(self, process: Process) -> None:
        self.processes[process.identity] = process
        process.start(self._from_worker, BEAT_S)

    def add_client(self, name: bytes, prompts: dict[int, list[int]], max_tokens: int) -> Client:
        """Start a client that submits these prompts; a job's seed is its id."""
        jobs = [
            Submit(
                job_id=i, params=SamplingParams(max_tokens=max_tokens, seed=i), prompt_ids=np.array(prompt, np.int32)
            )
            for i, prompt in prompts.items()
        ]
        client = Client(name, jobs)
        self.clients[client.identity] = client
        return client

    def role(self, role: str) -> list[bytes]:
        """Return the living processes of a role."""
        return [p.identity for p in self.processes.values() if p.hello.role == role and p.alive]

    # --- dying --------------------------------------------------------------------------------------------------------

    def kill(self, identity: bytes) -> None:
        """Stop a worker without a word; what it has sent still arrives."""
        self.processes[identity].alive = False

    def freeze(self, identity: bytes, seconds: float) -> None:
        """Stop a worker for a while; what is sent to it waits."""
        process = self.processes[identity]
        process.ready_at = max(process.ready_at, self.now + seconds)
        self.stalled[identity] = self.now + seconds

    def drain(self, identity: bytes, seconds: float = 1.0) -> None:
        """Ask a worker to stop, as SIGTERM does."""
        self.processes[identity].worker.state = "draining"
        self._drained(identity, self.now + seconds)

    def _drained(self, identity: bytes, end: float) -> None:
        process = self.processes[identity]
        if not process.alive:
            return
        if process.worker.sessions and self.now < end and process.hello.role == "target":
            self.queue.at(self.now + TICK_S, self._drained, identity, end)
            return
        process.worker.state = "leaving"
        self._from_worker(self.now, process, process.worker.heartbeat())
        process.alive = False

    def kill_client(self, client: Client) -> None:
        """Kill a client; another takes its place, which knows the ids of its jobs."""
        client.start(self.now)
        self.clients[client.identity] = client

    def kill_broker(self, down_s: float, *, survives: bool) -> None:
        """Kill the broker; its last records `survive` unheard, or are lost. The next starts after so many seconds."""
        if self.broker is None:
            return
        if survives:
            self.journal.write([write.record for write in self._pending])
        self._pending, self.broker, self.crash_in = [], None, 0
        self.queue.at(self.now + down_s, self.start_broker)

    def start_broker(self) -> None:
        """Start a broker on the journal."""
        self.life += 1
        self.broker = Broker(
            incarnation=0,
            heartbeat_ms=int(1000 * BEAT_S),
            liveness_ms=int(1000 * LIVENESS_S),
            has_journal=True,
            epoch=self.life << 32,
        )
        self.broker.restore(self.journal.unfinished(), self.now)

    def crash_soon(self, boundaries: int, *, survives: bool) -> None:
        """Let the broker die after a number of boundaries."""
        self.crash_in, self._survives = boundaries, survives

    def _boundary(self) -> None:
        self.num_boundaries += 1
        if self.crash_in:
            self.crash_in -= 1
            if not self.crash_in:
                self.faults["crash_at_boundary"] += 1
                raise CrashError

    # --- messages to the broker ---------------------------------------------------------------------------------------

    def _from_worker(self, time: float, sender: Process, message: Message) -> None:
        is_back = sender.hello.role == "target" and not isinstance(message, Hello | Heartbeat)
        self._carry_up(time, sender.identity, message, is_back=is_back)

    def _carry_up(self, time: float, identity: bytes, message: Message, *, is_back: bool) -> None:
        frames = encode(message)
        for arrival in self._arrivals(identity, "back" if is_back else "front", time, frames):
            self.queue.at(arrival, self._broker_takes, identity, frames, is_back)

    def _arrivals(self, identity: bytes, way: str, time: float, frames: Frames) -> list[float]:
        found = self.lines[identity, way].arrivals(time, sum(map(len, frames)))
        return [max(arrival, self.stalled.get(identity, 0.0)) for arrival in found]

    def _broker_takes(self, identity: bytes, frames: Frames, is_back: bool) -> None:
        if self.now < self.frozen_until:
            self.queue.at(self.frozen_until, self._broker_takes, identity, frames, is_back)
        elif self.broker is not None:
            take = self.broker.from_back if is_back else self.broker.from_front
            self._do(lambda: take(identity, frames, self.now))

    def _do(self, action: Callable[[], list[Effect]]) -> None:
        """Let the broker do something, and die where it must."""
        if self.broker is None:
            return
        try:
            self._apply(action())
        except CrashError:
            self.kill_broker(self.random.uniform(0.05, 0.8), survives=self._survives)

    # --- what the broker does -----------------------------------------------------------------------------------------

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._boundary()
            if isinstance(effect, Write):
                self._pending.append(effect)
                if len(self._pending) == 1:
                    self.queue.at(self.now + COMMIT_S, self._commit, self.life)
            elif isinstance(effect, Find):
                self.queue.at(self.now + COMMIT_S, self._found, self.life, effect)
            elif isinstance(effect, Send):
                self._carry_down(effect)
            else:
                assert not isinstance(effect, FindFinished), "nobody asked for a list"

    def _commit(self, life: int) -> None:
        if life == self.life and self.broker is not None:
            self._do(self._write_group)

    def _write_group(self) -> list[Effect]:
        assert self.broker is not None
        self._boundary()
        group, self._pending = self._pending, []
        self.journal.write([write.record for write in group])
        self._boundary()
        return self.broker.journaled(group[-1].sequence, self.now) if group else []

    def _found(self, life: int, asked: Find) -> None:
        broker = self.broker
        if life == self.life and broker is not None:
            self._do(lambda: broker.found(asked.job_id, self.journal.find(asked.job_id), self.now))

    def _carry_down(self, send: Send) -> None:
        self._check_told(send)
        for arrival in self._arrivals(send.to, send.link + " down", self.now, send.frames):
            self.queue.at(arrival, self._deliver, send.to, send.frames)

    def _deliver(self, to: bytes, frames: Frames) -> None:
        client = self.clients.get(to)
        if to in self.processes:
            self.processes[to].hear(decode(frames))
        elif client is not None and client.identity == to:
            client.take(client.core.receive(decode(frames), self.now), self.now)

    def _tick(self) -> None:
        self.queue.at(self.now + TICK_S, self._tick)
        broker = self.broker
        if broker is not None and self.now >= self.frozen_until:
            self._do(lambda: broker.tick(self.now))
        for client in set(self.clients.values()):
            client.take(client.core.tick(self.now), self.now)
            for message in client.core.take_outbox():
                self._carry_up(self.now, client.identity, message, is_back=False)

    # --- what must hold at any time -----------------------------------------------------------------------------------

    def _check_told(self, send: Send) -> None:
        """Fail if a client receives something that the journal does not have."""
        if send.to not in self.clients:
            return
        message: Any = decode(send.frames)
        for tokens in message.each() if isinstance(message, JobTokens) else ():
            self._check_told(send._replace(frames=encode(tokens)))
        known = self.journal.find(getattr(message, "job_id", 0))
        if isinstance(message, Accepted | Tokens):
            assert known is not None, "a client heard of a job that is not in the journal"
        if isinstance(message, Failed):
            assert known is None or message.code in ("no_verifier", known.code), (
                "a failure that the journal does not have"
            )
        if isinstance(message, Tokens) and known is not None:
            have = np.frombuffer(known.token_ids, "<i4").tolist()
            told = message.token_ids.tolist()
            assert have[message.base_len : message.base_len + len(told)] == told, "a token that is not in the journal"
            assert message.finish in ("", known.finish), "an end that is not in the journal"
