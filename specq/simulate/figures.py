"""Users, and the figures of a simulation: rates, times, and speculation counts.

Users submit jobs, and record when their tokens arrive. Rule: every finished job's tokens are compared with the stub
target's text. If one differs, or a job fails, the simulation is invalid and ends with EngineError."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
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
from specq.simulate.stubs import StubText
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


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 95th percentile and mean of some times, in milliseconds; all 0 without times."""

    p50: float = 0.0
    p95: float = 0.0
    mean: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        if not seconds:
            return cls()
        p50, p95 = np.percentile(seconds, (50, 95))
        return cls(*(round(float(value) * 1e3, 4) for value in (p50, p95, np.mean(seconds))))


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over all verifiers and drafters since the start."""

    tokens: int = 0
    rounds: int = 0
    nodes: int = 0
    accepted: int = 0
    steps: int = 0
    rows: int = 0
    passes: int = 0
    engine_s: float = 0.0
    draft_s: float = 0.0
    draft_bytes: int = 0
    verdict_bytes: int = 0

    def since(self, before: Counts) -> Counts:
        """Return the counts added since `before`."""
        own, old = asdict(self), asdict(before)
        return Counts(**{name: value - old[name] for name, value in own.items()})


@dataclass(frozen=True, slots=True)
class Figures:
    """One scenario's results, over its measured time.

    goodput             tokens that reached users, a second.
    mean_accepted_length   tokens of a round, the target's own included. 1.0 is plain decoding.
    acceptance_rate     accepted share of the verified nodes.
    wasted_rows         verified nodes that were not accepted.
    hits, stale, orphans   of the jobs that finished in this time, as `specq.protocol.stats.SessionStats` counts them.
    hit_rate            share of rounds that began with live nodes.
    time_to_first_token_ms, token_ms (between a job's tokens), job_ms   of the jobs that finished in this time.
    rows_per_step       mean rows of a step.
    engine_load, draft_load   the share of the time in which the hardware computes.
    in_flight           jobs at the end of the measured time.
    """

    seconds: float
    goodput: float
    jobs: int
    in_flight: int
    rounds: int
    mean_accepted_length: float
    draft_tokens: int
    accepted_tokens: int
    wasted_rows: int
    acceptance_rate: float
    drafted: int
    hits: int
    hit_rate: float
    stale: int
    orphans: int
    time_to_first_token_ms: Spread
    token_ms: Spread
    job_ms: Spread
    rows_per_step: float
    engine_load: float
    draft_load: float
    draft_bytes_per_token: float
    verdict_bytes_per_token: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def figures(
    seconds: float, counts: Counts, jobs: Sequence[JobRecord], in_flight: int, fleet: tuple[int, int]
) -> Figures:
    """Return the figures of `seconds`; `jobs` finished in them; `fleet`: numbers of verifiers and drafters."""
    known = {name: _sum(jobs, name) for name in ("drafted", "hits", "misses", "stale", "orphans")}
    return Figures(
        seconds=seconds,
        goodput=round(counts.tokens / seconds, 4),
        jobs=len(jobs),
        in_flight=in_flight,
        rounds=counts.rounds,
        mean_accepted_length=_ratio(counts.accepted + counts.rounds, counts.rounds),
        draft_tokens=counts.nodes,
        accepted_tokens=counts.accepted,
        wasted_rows=counts.nodes - counts.accepted,
        acceptance_rate=_ratio(counts.accepted, counts.nodes),
        drafted=known["drafted"],
        hits=known["hits"],
        hit_rate=_ratio(known["hits"], known["hits"] + known["misses"]),
        stale=known["stale"],
        orphans=known["orphans"],
        time_to_first_token_ms=Spread.of([job.first - job.submitted for job in jobs]),
        token_ms=Spread.of([(job.last - job.first) / (job.num_tokens - 1) for job in jobs if job.num_tokens > 1]),
        job_ms=Spread.of([job.last - job.submitted for job in jobs]),
        rows_per_step=_ratio(counts.rows, counts.steps),
        engine_load=_ratio(counts.engine_s, seconds * fleet[0]),
        draft_load=_ratio(counts.draft_s, seconds * fleet[1]),
        draft_bytes_per_token=_ratio(counts.draft_bytes, counts.tokens),
        verdict_bytes_per_token=_ratio(counts.verdict_bytes, counts.tokens),
    )


def _sum(jobs: Iterable[JobRecord], name: str) -> int:
    return sum(int(job.stats.get(name, 0)) for job in jobs)


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 5) if whole else 0.0
