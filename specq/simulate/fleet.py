"""Several real brokers on one journal, with many light workers and clients, under the virtual clock.

All that is measured is decided by `specq.broker`. Imitated: the workers (`fleet_workers`), the clients (`fleet_users`),
the journal (`journal`, with its leases), and what is around a broker's core:

- lines with a fixed delay, that lose nothing while both ends live;
- a broker takes one message after the other, `broker_us` each; verdicts count one by one;
- records are in the journal GROUP_S after the first of a group; an answer of the journal takes READ_S;
- leases are renewed, and jobs of lost brokers taken, as `specq.journal.threads` does.

While the journal stands still, all of that waits. What waited is then carried out in an order by chance.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from specq.broker import Broker, Connect, Disconnect, Effect, Find, Send, Write
from specq.journal import RENEW_S, TAKE_S, TakingRule
from specq.protocol import Frames, Hello, Verdicts, array_frame, type_of
from specq.simulate.fleet_verifiers import FleetVerifier
from specq.simulate.fleet_workers import FleetDrafter, FleetWorker
from specq.simulate.journal import SharedJournal
from specq.simulate.machine import EventQueue
from specq.simulate.settings import Scenario

GROUP_S, READ_S = 0.004, 0.002
RARE = {"tick", "gain", "lose", "list_brokers", "+hello"}  # the processor's clock takes too long for all
_IDS = array_frame(Verdicts, "session_ids")


class FleetBroker:
    """A broker with its part of the journal.

    - `core_s`: seconds of its core so far, by what it did; `longest_s`: of one of the RARE calls, in processor time.
    - `messages`, `bytes`: those received (+) and sent (-) so far, by name.
    """

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet, self.number, self.address = fleet, number, f"tcp://broker-{number}:5555"
        scenario, now = fleet.scenario, fleet.queue.now
        self.core = Broker(
            incarnation=1,
            heartbeat_ms=scenario.network.heartbeat_ms,
            liveness_ms=6 * scenario.network.heartbeat_ms,
            max_jobs=1_000_000,
            has_journal=True,
            epoch=fleet.journal.join(self.address, now),
        )
        self.core.state.address = self.address
        self.alive, self.busy_until, self.taken = True, 0.0, 0
        self.core_s: dict[str, float] = defaultdict(float)
        self.longest_s: dict[str, float] = defaultdict(float)
        self.messages, self.bytes = Counter[str](), Counter[str]()
        self._us = scenario.host.broker_us / 1e6
        self._writes: list[Write] = []
        self._taking = TakingRule(now)
        self._tick_s = scenario.network.heartbeat_ms / 2000
        phase = fleet.random.random()
        fleet.queue.at(now + phase * self._tick_s, self._tick)
        fleet.queue.at(now + phase * RENEW_S, self._renew)

    @property
    def jobs(self) -> set[int]:
        """The jobs that have not ended, and those whose last records are not journaled yet."""
        return {*self.core.state.jobs.active, *(write.record.job_id for write in self._writes)}

    # --- messages -----------------------------------------------------------------------------------------------------

    def hear(self, identity: bytes, frames: Frames, *, by_back: bool) -> None:
        """Take a message that has just arrived."""
        if not self.alive:
            return
        kind = type_of(frames)
        count = len(frames[_IDS]) // 8 if kind is Verdicts else 1
        self.busy_until = done = max(self.busy_until, self.fleet.queue.now) + count * self._us
        name = kind.TYPE if kind else ""
        self._count("+" + name, frames)
        take = self.core.from_back if by_back else self.core.from_front
        self._run("+hello" if kind is Hello else name, done, take, identity, frames, done)

    def _count(self, name: str, frames: Frames) -> None:
        self.messages[name] += 1
        self.bytes[name] += sum(map(len, frames))

    def _run(self, name: str, at: float, act: Callable[..., list[Effect]], *arguments: Any) -> None:
        """Call the core, and carry out its effects at a time, behind those of earlier calls: the core is one."""
        at = max(at, self.busy_until)
        clock = time.thread_time if name in RARE else time.perf_counter
        started = clock()
        effects = act(*arguments)
        spent = clock() - started
        self.core_s[name] += spent
        if name in RARE:
            self.longest_s[name] = max(self.longest_s[name], spent)
        for effect in effects:
            if isinstance(effect, Send):
                self._count("-" + _name(effect.frames), effect.frames)
                self.fleet.deliver(at, self, effect)
            elif isinstance(effect, Write):
                if not self._writes:
                    self.fleet.queue.at(at + GROUP_S, self._write)
                self._writes.append(effect)
            elif isinstance(effect, Find):
                self.fleet.at_journal(at + READ_S, self._answer, effect.job_id)
            else:
                assert isinstance(effect, (Connect, Disconnect)), "nobody lists ended jobs here"

    def _tick(self) -> None:
        if self.alive:
            self._run("tick", self.fleet.queue.now, self.core.tick, self.fleet.queue.now)
            self.fleet.queue.at(self.fleet.queue.now + self._tick_s, self._tick)

    # --- the journal --------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        if self.fleet.waits_for_journal(self._write) or not self.alive:
            return
        writes, self._writes, now = self._writes, [], self.fleet.queue.now
        lost = self.fleet.journal.write(self.address, [write.record for write in writes])
        if lost:
            self._run("lose", now, self.core.lose, lost, now)
        if writes:
            self._run("journaled", now, self.core.journaled, writes[-1].sequence, now)

    def _answer(self, job_id: int) -> None:
        if self.alive:
            now = self.fleet.queue.now
            self._run("found", now, self.core.found, job_id, self.fleet.journal.find(job_id, now), now)

    def _renew(self) -> None:
        if self.fleet.waits_for_journal(self._renew) or not self.alive:
            return
        now = self.fleet.queue.now
        addresses = self.fleet.journal.renew(self.address, now)
        if addresses != self.core.state.brokers:
            self._run("list_brokers", now, self.core.list_brokers, addresses, now)
        jobs = self.fleet.journal.take(self.address, now) if self._taking.may_take(now) else []
        if jobs:  # what was recorded of them before does not count
            self.taken += len(jobs)
            self.fleet.last_taken = now
            ids = {job.submit.job_id for job in jobs}
            self._writes = [write for write in self._writes if write.record.job_id not in ids]
            self._run("gain", now, self.core.gain, jobs, now)
        self.fleet.queue.at(now + (TAKE_S if jobs else RENEW_S), self._renew)


def _name(frames: Frames) -> str:
    kind = type_of(frames)
    return kind.TYPE if kind else ""


class Fleet:
    """All brokers, workers and lines of a scenario. `clients` receive the messages for their identities."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.queue, self.journal = scenario, EventQueue(), SharedJournal()
        self.random = random.Random(f"{scenario.traffic.seed} fleet")
        self.clients: dict[bytes, Callable[[str, Frames], None]] = {}
        self.last_taken = 0.0
        self._identities: dict[tuple[bytes, int], bytes] = {}
        self._journal_stands_until = 0.0
        self._near_s, self._far_s = scenario.network.near_rtt_ms / 2000, scenario.network.rtt_ms / 2000
        self.brokers = {one.address: one for one in (FleetBroker(self, i) for i in range(scenario.fleet.brokers))}
        self.verifiers = [FleetVerifier(i, *self._shared) for i in range(scenario.engine.verifiers)]
        self.drafters = [FleetDrafter(i, *self._shared) for i in range(scenario.draft.drafters)]
        self._workers: dict[bytes, FleetWorker] = {one.identity: one for one in (*self.verifiers, *self.drafters)}
        for worker in self._workers.values():
            worker.start(list(self.brokers))

    @property
    def _shared(self) -> tuple[Scenario, EventQueue, Callable[..., None]]:
        return self.scenario, self.queue, self.send

    @property
    def live(self) -> list[FleetBroker]:
        return [one for one in self.brokers.values() if one.alive]

    # --- lines --------------------------------------------------------------------------------------------------------

    def _delay(self, peer: bytes) -> float:
        return self._far_s if peer.startswith(b"draft") else self._near_s

    def send(self, broker: str, identity: bytes, by_back: bool, frames: Frames) -> None:
        """Carry a message to a broker."""
        receiver, arrival = self.brokers[broker], self.queue.now + self._delay(identity)
        if identity in self._workers:  # a worker has another identity at each broker
            identity = self._identity(identity, receiver)
        self.queue.at(arrival, self._arrive, receiver, identity, frames, by_back)

    def _identity(self, worker: bytes, broker: FleetBroker) -> bytes:
        """Return a worker's identity at a broker, as by chance."""
        if (worker, broker.number) not in self._identities:
            digest = blake2b(b"%s %d" % (worker, broker.number), digest_size=8).digest()
            self._identities[worker, broker.number] = worker + b"@" + digest
        return self._identities[worker, broker.number]

    def _arrive(self, broker: FleetBroker, identity: bytes, frames: Frames, by_back: bool) -> None:
        broker.hear(identity, frames, by_back=by_back)

    def deliver(self, at: float, sender: FleetBroker, effect: Send) -> None:
        """Carry a message from a broker."""
        worker = self._workers.get(effect.to.partition(b"@")[0])
        hear = worker.hear if worker is not None else self.clients[effect.to]
        self.queue.at(at + self._delay(effect.to), hear, sender.address, effect.frames)

    # --- faults -------------------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """Kill the first brokers, verifiers and drafters at once, and let the journal stand, as the scenario says."""
        fleet = self.scenario.fleet
        for broker in list(self.brokers.values())[: fleet.lost_brokers]:
            broker.alive = False
        for worker in (*self.verifiers[: fleet.lost_verifiers], *self.drafters[: fleet.lost_drafters]):
            worker.alive = False
        self._journal_stands_until = self.queue.now + fleet.journal_stands_s

    def waits_for_journal(self, action: Callable[[], None]) -> bool:
        """Return whether the journal stands still. Then `action` is called when it does not."""
        if self.queue.now >= self._journal_stands_until:
            return False
        self.queue.at(self._journal_stands_until + self.random.random() * GROUP_S, action)
        return True

    def at_journal(self, at: float, action: Callable[[int], None], job_id: int) -> None:
        """Call an action with an answer of the journal, which may stand still."""
        stands = self._journal_stands_until
        self.queue.at(at if at >= stands else stands + self.random.random() * GROUP_S, action, job_id)
