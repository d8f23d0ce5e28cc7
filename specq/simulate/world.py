"""A broker, its workers and clients, the lines between them, and a virtual clock.

All messages are frames of `specq.protocol.wire`, as over sockets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from specq.broker import Broker, Connect, Effect, Send
from specq.drafting.suffix.source import SuffixDecoder
from specq.drafting.worker import DraftWorker
from specq.protocol import Frames, Heartbeat, Hello, Message, ProtocolError, Verdicts, decode, encode
from specq.simulate.machine import DelayLine, EventQueue, LineSettings, SimulatedMachine, Tenant
from specq.simulate.processes import MICROSECOND, DrafterProcess, Process, VerifierProcess
from specq.simulate.settings import HostSettings, MachineSettings
from specq.verifier import DraftSource, StepCurve, Verifier

ENDPOINT = "simulated"
NEAR = LineSettings(delay_s=0.0001)

Hear = Callable[[Frames], None]


class SimulatedWorld:
    """The whole simulated system. `queue` has the clock.

    Each worker or client gets its lines when it is added: one each way.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        host: HostSettings | None = None,
        machine: MachineSettings | None = None,
        heartbeat_ms: int = 500,
        liveness_ms: int = 3000,
        max_jobs: int = 10_000,
    ) -> None:
        self.seed, self.host = seed, host or HostSettings()
        self.queue = EventQueue()
        self.broker = Broker(incarnation=1, heartbeat_ms=heartbeat_ms, liveness_ms=liveness_ms, max_jobs=max_jobs)
        self.processes: dict[bytes, Process] = {}
        self.lines: dict[bytes, tuple[DelayLine, DelayLine]] = {}  # up to the broker, down from it
        self._beat_s = heartbeat_ms / 1000
        self._clients: dict[bytes, Hear] = {}
        self._incarnations = count(1)
        self._sharing = machine or MachineSettings()
        self._machine, self._num_placed = SimulatedMachine(), Counter[str]()
        own, apart = self._sharing.draft_cores - 1, -2  # where clients have a machine of their own
        self._broker_at = self._machine.add(Tenant(own, has_model=False))
        self._clients_at = self._machine.add(Tenant(own if self._sharing.draft_cores else apart, has_model=False))
        self.queue.at(self._beat_s / 2, self._tick)

    # --- participants -------------------------------------------------------------------------------------------------

    def add_verifier(
        self,
        identity: bytes,
        engine: Any,
        curve: StepCurve,
        line: LineSettings = NEAR,
        *,
        sources: Iterable[DraftSource] | None = None,
        **options: Any,
    ) -> Verifier:
        """Start a verifier around a stub engine.

        sources   suffix decoding by default.
        options   those of `Verifier`.
        """
        sources = (SuffixDecoder(),) if sources is None else sources
        verifier = Verifier(engine, curve, sources, incarnation=next(self._incarnations), **options)
        hello = Hello(
            role="target",
            name=identity.decode(),
            incarnation=verifier.incarnation,
            model=engine.info,
            endpoint=ENDPOINT,
            max_sessions=verifier.planner.max_sessions,
            capabilities=verifier.capabilities,
        )
        self._start(VerifierProcess(self.queue, identity, verifier, engine, hello, self.host), line)
        return verifier

    def add_drafter(self, identity: bytes, proposer: Any, line: LineSettings = NEAR, **options: Any) -> DraftWorker:
        """Start a drafter around a stub proposer; `options` are those of `DraftWorker`."""
        drafter = DraftWorker(proposer, incarnation=next(self._incarnations), **options)
        hello = drafter.hello(identity.decode())
        self._start(DrafterProcess(self.queue, identity, drafter, proposer, hello, self.host), line)
        return drafter

    def add_client(self, identity: bytes, hear: Hear, line: LineSettings = NEAR) -> None:
        """Add a client; `hear` receives its messages, as frames."""
        self._clients[identity] = hear
        self._connect(identity, line)

    def kill(self, identity: bytes) -> None:
        """Stop a worker without notice."""
        process = self.processes.pop(identity)
        process.alive = False
        process.machine.remove(process.tenant)

    def _start(self, process: Process, line: LineSettings) -> None:
        self.processes[process.identity] = process
        if self._sharing.draft_cores:
            process.place(self._machine, self._tenant(process.hello.role))
        self._connect(process.identity, line)
        process.start(self.transmit, self._beat_s)

    def _tenant(self, role: str) -> Tenant:
        """Return the place of the next verifier or drafter: drafters take turns on their cores, behind the broker."""
        sharing, number = self._sharing, self._num_placed[role]
        self._num_placed[role] += 1
        if role == "target":
            helper, core = Tenant(self._broker_at.core, sharing.step_stretch), sharing.draft_cores + number
            return Tenant(core, sharing.step_stretch, helper=helper, helped_stretch=sharing.helped_stretch)
        return Tenant(number % sharing.draft_cores, sharing.pass_stretch, gives_way=True)

    def _connect(self, identity: bytes, line: LineSettings) -> None:
        name = identity.hex()
        self.lines[identity] = (DelayLine(line, f"{self.seed} up {name}"), DelayLine(line, f"{self.seed} down {name}"))

    # --- messages ---------------------------------------------------------------------------------------------------

    def transmit(self, time: float, sender: Process, message: Message) -> None:
        """Carry a worker's message to the broker."""
        by_back = isinstance(sender, VerifierProcess) and not isinstance(message, (Hello, Heartbeat))
        count = len(message.session_ids) if isinstance(message, Verdicts) else 1
        self._carry_up(time, sender.identity, message, by_back=by_back, count=count)

    def send(self, client: bytes, message: Message) -> None:
        """Carry a client's message to the broker."""
        self._carry_up(self.queue.now, client, message, by_back=False)

    def _carry_up(self, time: float, identity: bytes, message: Message, *, by_back: bool, count: int = 1) -> None:
        frames = encode(message)
        take = self.broker.from_back if by_back else self.broker.from_front
        for arrival in self.lines[identity][0].arrivals(time, _size(frames)):
            self.queue.at(arrival, self._broker_takes, take, identity, frames, count)

    def _broker_takes(self, take: Callable[..., list[Effect]], identity: bytes, frames: Frames, count: int) -> None:
        start = max(self._broker_at.busy_until, self.queue.now)
        done = self._machine.compute(self._broker_at, start, count * self.host.broker_us * MICROSECOND)
        self._apply(take(identity, frames, done), done)

    def _tick(self) -> None:
        self._apply(self.broker.tick(self.queue.now), self.queue.now)
        self.queue.at(self.queue.now + self._beat_s / 2, self._tick)

    def _apply(self, effects: Sequence[Effect], time: float) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                for arrival in self.lines[effect.to][1].arrivals(time, _size(effect.frames)):
                    self.queue.at(arrival, self._deliver, effect.to, effect.frames)
            elif isinstance(effect, Connect):
                assert effect.endpoint == ENDPOINT, "it is what the verifier's hello said"

    def _deliver(self, to: bytes, frames: Frames) -> None:
        process = self.processes.get(to)
        if process is not None:
            try:
                process.hear(decode(frames))
            except ProtocolError:  # as the loops of real processes do
                process.num_dropped += 1
        elif to in self._clients:
            start, taking_s = max(self._clients_at.busy_until, self.queue.now), self.host.client_us * MICROSECOND
            heard = self._machine.compute(self._clients_at, start, taking_s)
            self.queue.at(heard, self._clients[to], frames)


def _size(frames: Frames) -> int:
    return sum(map(len, frames))
