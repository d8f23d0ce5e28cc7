"""The simulated processes: a worker's loop, as in `workers/`, under a virtual clock.

Each process does one thing at a time. An idle process handles a message when it arrives. A busy one handles it right
after its current work, before any other work. So messages are handled in the order of arrival. A process that computes
is ahead of the queue's clock until it is done: `ready_at` is when it receives again. The time of a computation depends
on the other processes that compute on its machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from specq.drafting.worker import DraftWorker
from specq.protocol import (
    SUFFIX,
    Brokers,
    Draft,
    Drafts,
    Hello,
    Message,
    ProtocolError,
    Refused,
    Verdict,
    Verdicts,
    Welcome,
)
from specq.simulate.machine import EventQueue, SimulatedMachine, Tenant
from specq.simulate.settings import HostSettings
from specq.verifier import Verifier

Transmit = Callable[[float, "Process", Message], None]  # at a time, over a process's own line, a message

MICROSECOND = 1e-6


class Timed(Protocol):
    """A stub model: `busy_s` grows by the time that each of its steps or passes takes its process alone."""

    busy_s: float
    clock: Callable[[], float]


class Process:
    """Base: registers, sends heartbeats, handles messages, and works while there is work.

    refusal: why the broker refused it.
    """

    def __init__(
        self, queue: EventQueue, identity: bytes, worker: Any, model: Timed, hello: Hello, host: HostSettings
    ) -> None:
        self.queue, self.identity, self.worker, self.model, self.hello = queue, identity, worker, model, hello
        self.host = host
        self.place(SimulatedMachine(), Tenant(core=0))  # a machine of its own, unless it is placed on another
        self.transmit: Transmit
        self.beat_s = 0.5
        self.alive, self.registered, self.refusal = True, False, ""
        self.ready_at = 0.0
        self.num_dropped = 0
        self._turning = False  # whether a turn is in the queue

    def place(self, machine: SimulatedMachine, tenant: Tenant) -> None:
        """Share a machine with other processes."""
        self.machine, self.tenant = machine, machine.add(tenant)

    def start(self, transmit: Transmit, beat_s: float) -> None:
        """Register and begin to send heartbeats."""
        self.transmit, self.beat_s = transmit, beat_s
        self._beat()

    def hear(self, message: Message) -> None:
        """Handle a message that has just arrived."""
        if not self.alive:
            return
        if isinstance(message, Welcome):
            self.registered = True
        elif isinstance(message, Refused):
            self.registered, self.refusal = False, message.reason if message.fatal else ""
        elif not isinstance(message, Brokers):  # there is one broker here
            self.ready_at = self.compute(max(self.ready_at, self.queue.now), self.cost(message))
            self._handle(message)
            self._turn_later()

    def compute(self, start: float, seconds: float, *, help_part: float = 0.0) -> float:
        """Return when a computation ends that takes `seconds` alone; a thread on another core does the `help_part`."""
        return self.machine.compute(self.tenant, start, seconds, help_part=help_part) if seconds else start

    def cost(self, message: Message) -> float:
        """Return the seconds that handling a message takes."""
        raise NotImplementedError

    def _handle(self, message: Message) -> None:
        try:
            answers = self.worker.handle(message, *self.stamp())
        except ProtocolError:
            self.num_dropped += 1
            return
        self.send(self.ready_at, answers or ())

    def stamp(self) -> tuple[float, ...]:
        """Return the arguments of `worker.handle` besides the message."""
        return ()

    def send(self, time: float, messages: Sequence[Message]) -> None:
        """Send messages at a time."""
        for message in messages:
            self.transmit(time, self, message)

    def _turn_later(self) -> None:
        if not self._turning:
            self._turning = True
            self.queue.at(self.ready_at, self._turn)

    def _turn(self) -> None:
        """Work once; continue when that is done, or rest until a message arrives."""
        self._turning = False
        if not self.alive:
            return
        started = max(self.ready_at, self.queue.now)
        if self.work(started):
            self._turn_later()

    def work(self, started: float) -> bool:
        """Run a step or pass, set `ready_at` to its end and send its results; False if there was no work."""
        raise NotImplementedError

    def _beat(self) -> None:
        if self.alive:
            beat = self.worker.heartbeat() if self.registered else self.hello
            self.transmit(max(self.queue.now, self.ready_at), self, beat)
            self.queue.at(self.queue.now + self.beat_s, self._beat)


class _WorkClock:
    """The clock of a process that computes from `start` on: it advances by what its model takes."""

    def __init__(self, process: Process, start: float) -> None:
        self._process, self._now, self._busy_s = process, start, process.model.busy_s
        process.model.clock = self

    def __call__(self) -> float:
        fresh, self._busy_s = self._process.model.busy_s - self._busy_s, self._process.model.busy_s
        self._now = self._process.compute(self._now, fresh, help_part=getattr(self._process.model, "help_part", 0.0))
        return self._now


class VerifierProcess(Process):
    """A verifier, as in workers/target.py."""

    worker: Verifier

    def cost(self, message: Message) -> float:
        if not isinstance(message, Draft | Drafts):
            return 0.0
        seconds = (self.host.draft_us + self.host.graft_us * len(message.token_ids)) * MICROSECOND
        self.worker.sources.account(seconds)
        return seconds

    def stamp(self) -> tuple[float, ...]:
        return (self.ready_at,)

    def work(self, started: float) -> bool:
        verifier, clock = self.worker, _WorkClock(self, started)
        verifier.begin(started, clock)
        if not verifier.has_work:
            return False
        before = verifier.sources.num_sent.get(SUFFIX, 0)
        reports = verifier.step(clock)
        num_nodes = verifier.sources.num_sent.get(SUFFIX, 0) - before
        self.ready_at = self.compute(clock(), num_nodes * self.host.lookup_us * MICROSECOND)
        for message in reports.packed():
            self.ready_at = self.compute(self.ready_at, _num_verdicts(message) * self.host.verdict_us * MICROSECOND)
            self.transmit(self.ready_at, self, message)
        return self.ready_at > started or bool(reports)


class DrafterProcess(Process):
    """A drafter, as in workers/draft.py."""

    worker: DraftWorker

    def cost(self, message: Message) -> float:
        heard = _num_verdicts(message) if isinstance(message, Verdict | Verdicts) else 0
        return heard * self.host.hear_us * MICROSECOND

    def work(self, started: float) -> bool:
        clock, before = _WorkClock(self, started), self.worker.num_passes
        drafts = self.worker.step()
        num_passes = self.worker.num_passes - before
        self.ready_at = self.compute(clock(), num_passes * self.host.pass_us * MICROSECOND)
        for draft in Drafts.packed(drafts):
            self.ready_at = self.compute(self.ready_at, self.host.send_us * MICROSECOND)
            self.transmit(self.ready_at, self, draft)
        return self.ready_at > started


def _num_verdicts(message: Message) -> int:
    return len(message.session_ids) if isinstance(message, Verdicts) else 1
