"""The users: they submit jobs, and record when their tokens arrive.

Rule: every finished job's tokens are compared with the stub target's text. If one differs, or a job fails, the
simulation is invalid and ends with EngineError.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from specq.protocol import (
    EngineError,
    Failed,
    Frames,
    JobTokens,
    SamplingParams,
    Speculation,
    Submit,
    Tokens,
    array_frame,
    decode,
    decode_header,
    encode,
    type_of,
)
from specq.simulate.settings import Scenario, TrafficSettings
from specq.simulate.stub_text import StubText
from specq.simulate.world import SimulatedWorld

CLIENT = b"users"
_TOKENS = array_frame(Tokens, "token_ids")


@dataclass(slots=True)
class JobRecord:
    """One job, by the users' clock: when it was submitted, when its first and last tokens came, and the job's stats."""

    job_id: int
    submitted: float
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    data: list[bytes] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)


class Users:
    """Submits jobs according to the scenario: `sessions` at a time, or `jobs_per_s`."""

    def __init__(self, world: SimulatedWorld, scenario: Scenario, text: StubText) -> None:
        self.world, self.text = world, text
        self.num_tokens = 0  # received so far
        self.jobs: dict[int, JobRecord] = {}  # in flight
        self.finished: list[JobRecord] = []
        self.open = True  # whether jobs are submitted
        self._num_submitted = 0
        self.ask(scenario.traffic, scenario.speculation)
        self._random = random.Random(f"{self.traffic.seed} arrivals")

    def ask(self, traffic: TrafficSettings, speculation: Speculation) -> None:
        """Submit such jobs from now on; `num_jobs` counts from here."""
        self.traffic, self.speculation = traffic, speculation
        self._params = SamplingParams(max_tokens=traffic.output_tokens, ignore_eos=True)
        self._last = self._num_submitted + traffic.num_jobs if traffic.num_jobs else sys.maxsize

    def start(self) -> None:
        """Submit the first jobs."""
        if self.traffic.jobs_per_s:
            self._await_next()
        else:
            for _ in range(self.traffic.sessions):
                self._submit()

    @property
    def done(self) -> bool:
        """Whether all jobs have ended and no more will be submitted."""
        return not self.jobs and (not self.open or self._num_submitted >= self._last)

    def _await_next(self) -> None:
        gap = self._random.expovariate(self.traffic.jobs_per_s)
        self.world.queue.at(self.world.queue.now + gap, self._arrive)

    def _arrive(self) -> None:
        self._submit()
        if self.open:
            self._await_next()

    def _submit(self) -> None:
        if not self.open or self._num_submitted >= self._last:
            return
        self._num_submitted += 1
        job_id = self._num_submitted
        self.jobs[job_id] = JobRecord(job_id, self.world.queue.now)
        prompt = self.text.prompt(job_id, self.traffic.prompt_tokens)
        submit = Submit(job_id=job_id, params=self._params, speculation=self.speculation, prompt_ids=prompt)
        self.world.send(CLIENT, submit)

    def hear(self, frames: Frames) -> None:
        """Receive a message of the broker; only the measured parts of tokens are read."""
        kind = type_of(frames)
        if kind is Tokens:
            self._hear_tokens(frames)
        elif kind is JobTokens:
            for tokens in cast("JobTokens", decode(frames)).each():
                self._hear_tokens(encode(tokens))
        elif kind is Failed:
            failed = decode(frames)
            assert isinstance(failed, Failed), "its type says so"
            raise EngineError(f"job {failed.job_id} of the simulation failed: {failed.reason}")

    def _hear_tokens(self, frames: Frames) -> None:
        job = self.jobs[int.from_bytes(frames[0], "little")]
        if len(frames) > _TOKENS:
            job.last = self.world.queue.now
            job.first = job.first or job.last
            job.data.append(frames[_TOKENS])
            added = len(frames[_TOKENS]) // 4
            job.num_tokens += added
            self.num_tokens += added
        if b'"finish"' in frames[1]:
            job.stats = decode_header(frames)["stats"]
            self._finish(job)

    def _finish(self, job: JobRecord) -> None:
        self._check(job)
        job.data.clear()
        del self.jobs[job.job_id]
        self.finished.append(job)
        if not self.traffic.jobs_per_s:
            self._submit()

    def _check(self, job: JobRecord) -> None:
        prompt = self.text.prompt(job.job_id, self.traffic.prompt_tokens).tolist()
        tokens = np.frombuffer(b"".join(job.data), "<i4").tolist()
        if len(tokens) != self.traffic.output_tokens or not self.text.follows(job.job_id, prompt, tokens):
            raise EngineError(f"job {job.job_id} of the simulation has {len(tokens)} tokens, not all the target's own")
