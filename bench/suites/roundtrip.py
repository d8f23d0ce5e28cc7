"""`specq bench roundtrip`: what the broker adds to a round trip."""

from __future__ import annotations

import click

from bench.report import Report, figure, show, tell
from bench.roundtrip import roundtrip, roundtrip_table, verdict_on
from bench.suite import COUNT, suite
from specq.runtime import Number

UNITS = {"p50_us": "us", "p99_us": "us", "rate": "round trips/s"}


@suite("roundtrip")
@click.option("--repeats", type=COUNT, default=3, show_default=True, help="Repetitions.")
@click.option("--count", type=COUNT, default=2000, show_default=True, help="Round trips with one outstanding, of each.")
@click.option("--seconds", type=Number(0.01), default=2.0, show_default=True, help="Of each, with all outstanding.")
@click.option("--keys", default="", help="Directory of CURVE keys (specq keys) for all of specq; none: no encryption.")
def command(report: Report, *, repeats: int, count: int, seconds: float, keys: str) -> None:
    """Measure a draft up and a verdict down: straight from a stub drafter to a stub verifier, and through the broker."""
    report.update(settings={"repeats": repeats, "count": count, "seconds": seconds, "keys": bool(keys)})
    result = roundtrip(repeats=repeats, count=count, seconds=seconds, keys=keys, tell=tell)
    figures = {
        f"{way} {name}": figure(unit, [one[way][name] for one in result["repeats"]])
        for way in ("direct", "broker")
        for name, unit in UNITS.items()
    }
    report.update(figures=figures, results=result)
    show(roundtrip_table(result), verdict_on(result))
