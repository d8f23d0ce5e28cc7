"""What the journal costs: the time of a group of rows, and the broker's throughput with a journal and without.

A group of n rows is one round of each of n sessions, as the broker's writer thread commits it. The round trips are those
of `bench.roundtrip` with all sessions outstanding, without a journal and with one, in turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.roundtrip import roundtrip
from specq.config import DURABILITIES
from specq.journal import JobTaken, Opening, TokensAdded, open_journal
from specq.protocol import SamplingParams, Submit

ROWS = (1, 16, 64)
TOKENS = 9  # of one round: a chain of 8 and a bonus
NONE = "none"


def group_times(folder: Path, durability: str, num_rows: int, num_groups: int) -> dict[str, float]:
    """Return the median and 99th percentile of the time of a group in microseconds, and groups a second."""
    journal = open_journal(str(folder / f"{durability}-{num_rows}.journal"), Opening(durability))
    submits = [_submit(job_id) for job_id in range(1, num_rows + 1)]
    journal.write([JobTaken(submit, "", 0.0, 0.0) for submit in submits])
    times = []
    tokens = np.arange(TOKENS, dtype="<i4").tobytes()
    for number in range(num_groups):
        records = [TokensAdded(s.job_id, number * TOKENS, tokens, bytes(TOKENS), b"", TOKENS - 1) for s in submits]
        started = time.perf_counter()
        journal.write(records)
        times.append((time.perf_counter() - started) * 1e6)
    journal.close()
    return {
        "p50_us": round(median(times), 1),
        "p99_us": round(float(np.quantile(times, 0.99)), 1),
        "groups_per_s": round(1e6 * len(times) / sum(times), 1),
    }


def _submit(job_id: int) -> Submit:
    return Submit(job_id=job_id, params=SamplingParams(), prompt_ids=np.arange(100, dtype=np.int32))


def measure_groups(folder: Path, num_groups: int) -> Iterator[dict[str, Any]]:
    """Yield the times of groups, by durability and number of rows."""
    for durability in DURABILITIES:
        for rows in ROWS:
            yield {"durability": durability, "rows": rows, **group_times(folder, durability, rows, num_groups)}


def round_trips(folder: Path, repeats: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Return the rate without a journal and with each kind, medians; the ratios are of neighbouring runs."""
    names = [NONE, *DURABILITIES]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in names[:: -1 if repeat % 2 else 1]:
            path = folder / f"roundtrip-{name}-{repeat}.journal"
            options = ("--journal", NONE) if name == NONE else ("--journal", str(path), "--durability", name)
            result = roundtrip(repeats=1, count=200, seconds=seconds, journal=options)
            rates[name].append(result["broker"]["rate"])
    ratios = {name: median(a / b for a, b in zip(rates[name], rates[NONE], strict=True)) for name in names}
    return {
        name: {"rate": round(median(rates[name]), 1), "ratio": round(ratios[name], 3), "rates": rates[name]}
        for name in names
    }
