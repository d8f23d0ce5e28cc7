"""The figures of a simulation: rates, times, and speculation counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specq.simulate.traffic import JobRecord


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
