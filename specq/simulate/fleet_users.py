"""The clients of a fleet. They submit jobs, follow them to other brokers, and check every token that they receive.

A client whose broker is silent asks others, one after the other, about each job. Rules: a token that is not the next
one of its job is an error, and so is a job that fails.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from specq.protocol import (
    Accepted,
    EngineError,
    Failed,
    Frames,
    JobTokens,
    Moved,
    SamplingParams,
    Submit,
    Tokens,
    decode,
    encode,
)
from specq.simulate.fleet import Fleet
from specq.simulate.fleet_workers import token_at

PATIENCE_S = 2.0  # without a message, until a client asks another broker
LOOK_S = 0.5


@dataclass(slots=True)
class FleetJob:
    """A job of a client: its broker, and when it was submitted, last asked about, and last got tokens."""

    job_id: int
    broker: str
    submitted: float
    asked: float
    first: float = 0.0
    heard: float = 0.0
    num_tokens: int = 0
    gap: float = 0.0  # longest time between its tokens since the last `note_fault`


class FleetUsers:
    """All clients. Each submits a job when one of its jobs has ended."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.scenario = fleet, fleet.scenario
        self.jobs: dict[int, FleetJob] = {}
        self.tokens = Counter[bytes]()  # by client
        self.num_finished = self.num_asked_again = self.num_moved = 0
        self.waits: dict[bytes, list[float]] = {}  # for the first token, by client
        self.sessions: dict[bytes, int] = {}
        self.gaps: list[float] = []  # of ended jobs
        self._ids = count(1)
        self._params = SamplingParams(max_tokens=self.scenario.traffic.output_tokens, ignore_eos=True)
        self._homes = dict[bytes, str]()
        self._owners = dict[int, bytes]()

    def start(self) -> None:
        """Submit the first jobs, over one second."""
        traffic, clients = self.scenario.traffic, self.scenario.fleet.clients
        for place, address in enumerate(self.fleet.brokers):
            own = (traffic.sessions + place) // len(self.fleet.brokers)
            for number in range(clients):
                client = f"client-{place}-{number}".encode()
                first = own // 2 if clients > 1 else own
                self.sessions[client] = (own - first + number - 1) // (clients - 1) if number else first
                self._homes[client], self.waits[client] = address, []
                self.fleet.clients[client] = partial(self._hear, client)
                for i in range(self.sessions[client]):
                    self.fleet.queue.at(self.fleet.queue.now + i / self.sessions[client], self._submit, client)
        self.fleet.queue.at(self.fleet.queue.now + LOOK_S, self._look)

    def _submit(self, client: bytes) -> None:
        now = self.fleet.queue.now
        job = FleetJob(next(self._ids), self._homes[client], now, now)
        self.jobs[job.job_id], self._owners[job.job_id] = job, client
        self._ask(job)

    def _ask(self, job: FleetJob) -> None:
        job.asked, client = self.fleet.queue.now, self._owners[job.job_id]
        submit = Submit(
            job_id=job.job_id, params=self._params, prompt_ids=self._prompt(job.job_id), have=job.num_tokens
        )
        self.fleet.send(job.broker, client, False, encode(submit))

    def _prompt(self, job_id: int) -> Any:
        fleet, length = self.scenario.fleet, self.scenario.traffic.prompt_tokens
        prompt = token_at(job_id, np.arange(length) + 1_000_000).astype(np.int32)
        shared = min(fleet.prefix_tokens, length)
        prompt[:shared] = token_at(job_id % fleet.prefixes, np.arange(shared) + 2_000_000)
        return prompt

    def _look(self) -> None:
        """Ask again about the jobs of brokers that are silent."""
        now = self.fleet.queue.now
        for client, home in self._homes.items():
            if not self.fleet.brokers[home].alive:
                self._homes[client] = self._other(home)
        for job in list(self.jobs.values()):
            is_unanswered = job.num_tokens > 0 and job.asked > job.heard
            is_silent = is_unanswered or not self.fleet.brokers[job.broker].alive
            if is_silent and now - max(job.asked, job.heard) >= PATIENCE_S:
                self._ask_other(job)
        self.fleet.queue.at(now + LOOK_S, self._look)

    def _ask_other(self, job: FleetJob) -> None:
        self.num_asked_again += 1
        job.broker = self._other(job.broker)
        self._ask(job)

    def _other(self, address: str) -> str:
        others = [one.address for one in self.fleet.live if one.address != address]
        return self.fleet.random.choice(others) if others else address

    # --- messages -----------------------------------------------------------------------------------------------------

    def _hear(self, client: bytes, broker: str, frames: Frames) -> None:
        message = decode(frames)
        if isinstance(message, JobTokens):
            for tokens in message.each():
                self._take(client, broker, tokens)
        elif isinstance(message, Tokens):
            self._take(client, broker, message)
        elif isinstance(message, Moved):
            job = self.jobs.get(message.job_id)
            self.num_moved += 1
            if job is not None and job.broker == broker:
                job.broker = message.address
                self._ask(job)
        elif isinstance(message, Failed) and message.code != "busy":
            raise EngineError(f"job {message.job_id} of the simulation failed: {message.reason}")
        elif isinstance(message, Accepted) and (accepted := self.jobs.get(message.job_id)) is not None:
            accepted.broker = broker

    def _take(self, client: bytes, broker: str, tokens: Tokens) -> None:
        job = self.jobs.get(tokens.job_id)
        if job is None:
            if tokens.base_len + len(tokens.token_ids) > self.scenario.traffic.output_tokens:
                raise EngineError(f"job {tokens.job_id} has ended, and got more tokens")
            return  # the client has asked twice, and has all of them
        now, known = self.fleet.queue.now, job.num_tokens - tokens.base_len
        start = self.scenario.traffic.prompt_tokens + tokens.base_len
        right = token_at(job.job_id, np.arange(start, start + len(tokens.token_ids)))
        if known < 0 or (tokens.token_ids != right).any():
            raise EngineError(f"job {job.job_id} got tokens that are not its next ones")
        new = max(len(tokens.token_ids) - known, 0)  # likewise
        job.broker = broker
        if new:
            job.gap = max(job.gap, now - (job.heard or job.submitted))
            self.waits[client] += [] if job.first else [now - job.submitted]
            job.first, job.heard, job.num_tokens = job.first or now, now, job.num_tokens + new
            self.tokens[client] += new
        if tokens.finish:
            self._finish(client, job)

    def _finish(self, client: bytes, job: FleetJob) -> None:
        if job.num_tokens != self.scenario.traffic.output_tokens:
            raise EngineError(f"job {job.job_id} ended with {job.num_tokens} tokens")
        del self.jobs[job.job_id], self._owners[job.job_id]
        self.gaps.append(job.gap)
        self.num_finished += 1
        self._submit(client)

    def note_fault(self) -> None:
        """Measure gaps anew from now on."""
        self.gaps.clear()
        for job in self.jobs.values():
            job.gap = 0.0
