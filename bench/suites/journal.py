"""`specq bench journal`: the cost of the journal on this machine, as the time of a group of rows.

A group of n rows is one round of each of n sessions, as the broker's writer thread commits it. `specq bench
broker-rate` shows how a journal changes the broker's rate.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np

from bench.report import Report, figure, show
from bench.suite import COUNT, option, suite
from specq.config import DURABILITIES
from specq.journal import JobTaken, Opening, TokensAdded, open_journal
from specq.protocol import SamplingParams, Submit

UNITS = {"p50_us": "us", "p99_us": "us", "groups_per_s": "groups/s"}
ROWS = (1, 16, 64)
TOKENS = 9  # of one round: a chain of 8 and a bonus


@suite("journal")
@option("--groups", COUNT, 1000, "Number of groups of each kind.")
@click.option("--directory", type=click.Path(file_okay=False, exists=True), help="Directory for the journals.")
def command(report: Report, *, groups: int, directory: str | None) -> None:
    """Measure the time of a group of rows by durability and size."""
    report.update(settings={"groups": groups, "directory": directory})
    with TemporaryDirectory(dir=directory) as folder:
        found = list(measure_groups(Path(folder), groups))
    figures = {
        f"{one['durability']}, {one['rows']} rows, {name}": figure(unit, [one[name]])
        for one in found
        for name, unit in UNITS.items()
    }
    report.update(figures=figures, results={"groups": found})
    show([tuple(name.upper() for name in found[0]), *(tuple(row.values()) for row in found)])


def measure_groups(folder: Path, num_groups: int) -> Iterator[dict[str, Any]]:
    """Yield the times of groups, by durability and number of rows."""
    for durability in DURABILITIES:
        for rows in ROWS:
            yield {"durability": durability, "rows": rows, **group_times(folder, durability, rows, num_groups)}


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
