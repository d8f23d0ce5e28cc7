"""`specq bench broker-rate`: how many tokens a second pass through a broker on one core."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from statistics import median

import click

from bench.broker_rate import NO_JOURNAL, Kind, broker_rate
from bench.report import Report, figure, show, tell
from bench.suite import COUNT, suite
from specq.config import DURABILITIES
from specq.runtime import Number

UNITS = {"tokens": "tokens/s", "messages": "messages/s", "busy": "cores", "us": "us"}


@suite("broker-rate")
@click.option("--sessions", type=COUNT, multiple=True, default=(256,), show_default=True, help="May be repeated.")
@click.option(
    "--tokens", type=COUNT, multiple=True, default=(1,), show_default=True,
    help="Of each session in each step; may be repeated.",
)  # fmt: skip
@click.option(
    "--clients", type=COUNT, multiple=True, default=(1,), show_default=True, help="That share them; may be repeated."
)
@click.option("--drafters", type=click.IntRange(0), default=0, show_default=True, help="That receive each verdict.")
@click.option(
    "--journal", type=click.Choice((NO_JOURNAL, *DURABILITIES)), multiple=True, default=(NO_JOURNAL, *DURABILITIES),
    show_default=True, help="Its durability; may be repeated.",
)  # fmt: skip
@click.option("--repeats", type=COUNT, default=3, show_default=True, help="Turns of each.")
@click.option("--seconds", type=Number(0.01), default=2.0, show_default=True, help="Of each turn.")
def command(
    report: Report, *, sessions: tuple[int, ...], tokens: tuple[int, ...], clients: tuple[int, ...], drafters: int,
    journal: tuple[str, ...], repeats: int, seconds: float,
) -> None:  # fmt: skip
    """Send a broker on one core the verdicts of steps as fast as its clients receive their tokens, and count these."""
    kinds = [Kind(s, t, c, drafters, j) for s, t, c, j in product(sessions, tokens, clients, journal)]
    report.update(settings={"repeats": repeats, "seconds": seconds})
    found: defaultdict[Kind, list[dict[str, float]]] = defaultdict(list)
    for kind, measured in broker_rate(kinds, repeats, seconds, tell):
        found[kind].append(measured)
        figures = {f"{kind}: {name}": figure(unit, [one[name] for one in found[kind]]) for name, unit in UNITS.items()}
        report.update(figures=figures)
    rows: list[tuple[object, ...]] = [
        ("SESSIONS", "TOKENS", "CLIENTS", "DRAFTERS", "JOURNAL", "TOKENS/S", "MESSAGES/S", "CORES", "US/TOKEN")
    ]
    for kind, turns in found.items():
        rate, messages, busy, us = (median(one[name] for one in turns) for name in UNITS)
        about = kind.sessions, kind.tokens, kind.clients, kind.drafters, kind.journal
        rows.append((*about, f"{rate:.0f}", f"{messages:.0f}", f"{busy:.2f}", f"{us:.1f}"))
    show(rows, ["medians; messages: those that clients received; cores: what the broker's process used"])
