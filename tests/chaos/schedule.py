"""A random schedule of faults, and what must hold after it.

    play(seed)   runs one schedule and returns what happened; raises AssertionError where something was lost, doubled,
                 wrong, or stands still

Rules checked, besides those of the world: every job ends once, with the fault-free text (or, where texts depend on
sessions, one that could have been said), or given up where verifier after verifier was taken from under it, which
nobody can tell from a job that brings them down; within `RECOVERY_S` of the last fault every session advances; drafters
keep up again; in the end no worker holds anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from specq.broker.workers.assignment import LONE_CRASHES
from specq.simulate.machine import LineSettings
from specq.testing.toy import toy_text
from tests.chaos.stubs import moody_text_is_right
from tests.chaos.users import Client
from tests.chaos.world import DELAY_S, LIVENESS_S, ChaosWorld

RECOVERY_S = 5.0
FAULTS_S = 3.0  # how long faults are injected
TOKENS = 90
PROMPT_LEN = 3
BEHIND = 40  # tokens that a drafter may lag behind
CRASHES = 2 + LONE_CRASHES  # of verifiers, until a job is given up that had a part in each


@dataclass
class Outcome:
    """What a schedule came to; num_given_up: jobs that were taken for what brings verifiers down; recoveries: seconds
    from the last fault to each job's next token."""

    faults: Counter[str] = field(default_factory=Counter)
    num_jobs: int = 0
    recoveries: list[float] = field(default_factory=list)
    num_boundaries: int = 0
    num_given_up: int = 0


class Schedule:
    """One world and the faults that befall it."""

    def __init__(self, seed: int, *, moody: bool = False) -> None:
        self.world = ChaosWorld(seed, moody=moody)
        self.random = self.world.random
        self.clients: list[Client] = []
        self.num_out = 0  # faults that are not over
        self.prompts = {i: [i, i + 1, i + 2] for i in range(1, 1 + self.random.randint(2, 5))}

    def begin(self) -> None:
        """Start all processes, and submit the jobs."""
        world = self.world
        for _ in range(2):
            world.add_verifier()
        for _ in range(self.random.randint(0, 2)):
            world.add_drafter()
        world.queue.run(0.3)
        halves = [{i: p for i, p in self.prompts.items() if i % 2 == half} for half in (0, 1)]
        self.clients = [world.add_client(b"client %d" % n, half, TOKENS) for n, half in enumerate(halves)]

    def play(self) -> Outcome:
        """Run to the end, and check."""
        self.begin()
        self.world.set_line(self._bad_line())
        self._schedule_faults()
        self.world.queue.run(FAULTS_S)
        self.world.queue.run_until(lambda: self.num_out == 0, 60.0)
        self.world.set_line(LineSettings(DELAY_S))
        self.world.crash_in = 0
        return self.end()

    def end(self) -> Outcome:
        """Check that all goes on, and that it ends well."""
        outcome = Outcome(self.world.faults, len(self.prompts), num_boundaries=self.world.num_boundaries)
        self._recover(outcome)
        self._finish()
        outcome.num_given_up = sum(len(client.failures) for client in self.clients)
        return outcome

    def _bad_line(self) -> LineSettings:
        loss, double = self.random.choice([0.0, 0.002, 0.01, 0.05]), self.random.choice([0.0, 0.002, 0.01, 0.05])
        jitter = self.random.choice([0.0, DELAY_S, 20 * DELAY_S])
        for kind, value in (("lossy", loss), ("doubling", double), ("reordering", jitter)):
            self.world.faults[kind + "_lines"] += value > 0
        return LineSettings(DELAY_S, jitter_s=jitter, loss=loss, double=double, in_order=not jitter)

    # --- faults -------------------------------------------------------------------------------------------------------

    def _schedule_faults(self) -> None:
        kinds: list[Callable[[], float]] = [
            self._kill_verifier, self._kill_drafter, self._kill_broker, self._kill_client, self._crash, self._crash,
            self._freeze_worker, self._freeze_broker, self._stall, self._drain, self._kill_all_verifiers,
        ]  # fmt: skip
        for _ in range(self.random.randint(1, 8)):
            fault = self.random.choice(kinds)
            self.world.queue.at(self.world.now + self.random.uniform(0.0, FAULTS_S), self._inject, fault)

    def _inject(self, fault: Callable[[], float]) -> None:
        seconds = fault()
        self.num_out += 1
        self.world.queue.at(self.world.now + seconds, self._over)

    def _over(self) -> None:
        self.num_out -= 1

    def _count(self, kind: str) -> float:
        """Count a fault; return how long it shall last."""
        self.world.faults[kind] += 1
        return self.random.choice([0.1, 0.5, 2.5 * LIVENESS_S])

    def _later(self, seconds: float, start: Callable[[], object]) -> float:
        self.world.queue.at(self.world.now + seconds, start)
        return seconds

    def _kill_verifier(self) -> float:
        alive = self.world.role("target")
        if alive:
            self.world.kill(self.random.choice(alive))
        return self._later(self._count("verifier_killed"), self.world.add_verifier)

    def _kill_all_verifiers(self) -> float:
        for identity in self.world.role("target"):
            self.world.kill(identity)
        return self._later(self._count("all_verifiers_killed"), self.world.add_verifier)

    def _kill_drafter(self) -> float:
        alive = self.world.role("draft")
        if alive:
            self.world.kill(self.random.choice(alive))
        return self._later(self._count("drafter_killed"), self.world.add_drafter)

    def _kill_broker(self) -> float:
        down_s = self._count("broker_killed")
        self.world.kill_broker(down_s, survives=self.random.random() < 0.5)
        return down_s + 0.01

    def _crash(self) -> float:
        self.world.crash_soon(self.random.randint(1, 60), survives=self.random.random() < 0.5)
        return 1.0

    def _kill_client(self) -> float:
        self._count("client_killed")
        self.world.kill_client(self.random.choice(self.clients))
        return 0.0

    def _freeze_worker(self) -> float:
        seconds = self._count("worker_frozen")
        alive = self.world.role("target") + self.world.role("draft")
        if alive:
            self.world.freeze(self.random.choice(alive), seconds)
        return seconds

    def _freeze_broker(self) -> float:
        seconds = self._count("broker_frozen")
        self.world.frozen_until = self.world.now + seconds
        return seconds

    def _stall(self) -> float:
        """Hold all messages between a party and the broker. They arrive later."""
        seconds = self._count("line_stalled")
        peers = self.world.role("target") + self.world.role("draft") + [client.identity for client in self.clients]
        self.world.stalled[self.random.choice(peers)] = self.world.now + seconds
        return seconds

    def _drain(self) -> float:
        alive = self.world.role("target")
        if alive:
            self.world.drain(self.random.choice(alive))
        self._count("verifier_drained")
        return self._later(1.2, self.world.add_verifier)

    # --- what must hold -----------------------------------------------------------------------------------------------

    def _lengths(self) -> dict[int, int]:
        """Return the generated tokens of each job in the journal; -1 for one that has ended."""
        known = {i: self.world.journal.find(i) for i in self.prompts}
        return {i: -1 if job and job.finish else job.num_tokens if job else 0 for i, job in known.items()}

    def _recover(self, outcome: Outcome) -> None:
        before, since = self._lengths(), self.world.now
        waiting = {i for i, length in before.items() if length >= 0}
        while waiting and self.world.now < since + RECOVERY_S:
            self.world.queue.run(0.02)
            now = self._lengths()
            for i in [i for i in waiting if now[i] != before[i]]:
                waiting.discard(i)
                outcome.recoveries.append(self.world.now - since)
        assert not waiting, f"sessions {sorted(waiting)} stand still {RECOVERY_S:g} s after the last fault"
        self._check_drafters()

    def _check_drafters(self) -> None:
        """Each drafter knows about as much of its sessions as the broker does."""
        broker = self.world.broker
        assert broker is not None
        for identity in self.world.role("draft"):
            for session in self.world.processes[identity].worker.sessions.values():
                job = broker.state.jobs.active.get(session.session_id)
                if job is not None and identity in job.drafters.identities() and job.session.epoch == session.epoch:
                    assert job.transcript.length - session.length < BEHIND, "a drafter does not learn what it missed"

    def _finish(self) -> None:
        world = self.world
        world.queue.run_until(lambda: all(len(c.texts) + len(c.failures) >= len(c.jobs) for c in self.clients), 120.0)
        world.queue.run(3 * LIVENESS_S)
        for client in self.clients:
            for job in client.jobs:
                if job.job_id in client.failures:
                    self._check_failure(client.failures[job.job_id])
                else:
                    self._check_text(job.job_id, client.texts[job.job_id])
        assert {i: world.journal.num_ends[i] for i in self.prompts} == dict.fromkeys(self.prompts, 1)
        assert world.broker is not None
        assert not world.broker.state.jobs.active
        for identity in world.role("target") + world.role("draft"):
            assert not world.processes[identity].worker.sessions, "a worker holds on to a job that has ended"

    def _check_failure(self, reason: str) -> None:
        """Fail if a job was given up without enough real or apparent verifier deaths."""
        assert "verifiers crashed because of it" in reason, reason
        faults = self.world.faults
        num_dead = faults["verifier_killed"] + 2 * faults["all_verifiers_killed"]
        num_silent = faults["worker_frozen"] + faults["line_stalled"] + faults["verifier_drained"]
        assert num_dead + num_silent >= CRASHES, f"{reason}, of which there were {num_dead + num_silent} at most"

    def _check_text(self, job_id: int, text: list[int]) -> None:
        stored = self.world.journal.find(job_id)
        assert stored is not None
        assert np.frombuffer(stored.token_ids, "<i4").tolist() == text, "the journal has another text than the client"
        assert len(text) == TOKENS
        prompt = self.prompts[job_id]
        if self.world.moody:
            assert moody_text_is_right(prompt, text, job_id, self.world.moods[job_id]), "a text that nobody said"
        else:
            assert text == toy_text(prompt, TOKENS, job_id), "a wrong text"


def play(seed: int) -> Outcome:
    """Play a schedule; every third in a world whose texts depend on the sessions."""
    return Schedule(seed, moody=seed % 3 == 2).play()
