"""What the journal costs on this machine: time of a group by durability and size, and the broker's throughput with it.

    python scripts/journal_cost.py --roundtrip 3 --out journal_cost.json

A group of n rows is one round of each of n sessions, as the broker's writer thread commits it. The round trips are those
of `specq bench --roundtrip` with all sessions outstanding, without a journal and with one, in turn.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from specq.bench.machine import describe
from specq.bench.roundtrip import roundtrip
from specq.config.sections import DURABILITIES
from specq.journal import JobTaken, Opening, TokensAdded, open_journal
from specq.protocol.messages import Submit
from specq.protocol.params import SamplingParams
from specq.runtime.columns import columns

ROWS = (1, 16, 64)
TOKENS = 9  # of one round: a chain of 8 and a bonus
NONE = "none"


@click.command()
@click.option("--groups", default=1000, show_default=True, help="Groups of each kind.")
@click.option("--roundtrip", "repeats", default=0, show_default=True, help="Repetitions of the round trips; 0: none.")
@click.option("--seconds", default=2.0, show_default=True, help="Of each repetition.")
@click.option("--directory", type=click.Path(file_okay=False, exists=True), help="Where the journals are made.")
@click.option(
    "--out", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="File for all figures, JSON."
)
def journal_cost(groups: int, repeats: int, seconds: float, directory: str | None, out: Path | None) -> None:
    """Measure, and print a table."""
    figures: dict[str, Any] = describe(shlex.join(["scripts/journal_cost.py", *sys.argv[1:]]))
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        figures["groups"] = [
            {"durability": durability, "rows": rows, **group_times(Path(folder), durability, rows, groups)}
            for durability in DURABILITIES
            for rows in ROWS
        ]
        if repeats:
            figures["roundtrip"] = round_trips(Path(folder), repeats, seconds)
    click.echo(columns([tuple(name.upper() for name in figures["groups"][0]), *map(_values, figures["groups"])]))
    for name, one in figures.get("roundtrip", {}).items():
        click.echo(f"journal {name}: {one['rate']:.0f} round trips/s, {one['ratio']:.2f} of those without")
    if out is not None:
        out.write_text(json.dumps(figures, indent=2) + "\n")


def _values(row: dict[str, Any]) -> tuple[object, ...]:
    return tuple(row.values())


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


if __name__ == "__main__":
    journal_cost()
