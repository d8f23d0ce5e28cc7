"""`specq bench never-slower`: what a verifier's default makes of drafters, beside no speculation, lookups alone, and drafts always."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from bench.deployments import Deployments
from bench.figures import CONFIDENCE
from bench.never_slower import PLACEMENTS, Cell, Pace, cells, measure_cell
from bench.pairs import parse_pairs
from bench.report import Figure, Report, attempt, figure, show, tell
from bench.suite import COUNT, suite
from specq.protocol import ConfigError
from specq.runtime import Number

SESSIONS = (1, 4, 16)
DEFAULT_PAIRS = ("tiny=tiny,tiny", "random=tiny,random")
LEAST, FORCED_WINS, OF_FORCED = (
    0.98,
    1.05,
    0.97,
)  # of the best of plain and lookup; where that matters; of forced drafts
HEADER = (
    "CELL",
    "PLAIN",
    "LOOKUP",
    "DEFAULT",
    "FORCED",
    "DEFAULT/BEST",
    "FORCED/BEST",
    "DEFAULT/FORCED",
    "DRAFT CPU",
    "",
)


@suite("never-slower")
@click.option(
    "--pair",
    multiple=True,
    metavar="NAME=TARGET,DRAFT",
    help="Models; may be repeated; DRAFT may be weak, weak:NOISE or random.  [default: tiny with its draft, and with a random one]",
)
@click.option("--sessions", multiple=True, type=COUNT, help="In flight; may be repeated.  [default: 1, 4, 16]")
@click.option(
    "--placement",
    multiple=True,
    type=click.Choice(list(PLACEMENTS)),
    help="Who drafts: none, one or two workers, the verifier's process, or both; may be repeated.  [default: all]",
)
@click.option(
    "--only", multiple=True, metavar="PAIR/PLACEMENT/SESSIONS", help="Measure only this cell; may be repeated."
)
@click.option("--turn-s", type=Number(0.01), default=1.2, show_default=True, help="Seconds of a plain turn.")
@click.option("--repeats", type=COUNT, default=6, show_default=True, help="Turns of each contestant.")
@click.option("--settle-s", type=Number(0), default=8.0, show_default=True, help="Service before them.")
@click.option(
    "--output-len",
    type=COUNT,
    default=96,
    show_default=True,
    help="Tokens of each job; fewer where one takes longer than a turn.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Keep the cells that the file of --out has; measure the others, and those that failed.",
)
def command(
    report: Report,
    *,
    pair: tuple[str, ...],
    sessions: tuple[int, ...],
    placement: tuple[str, ...],
    only: tuple[str, ...],
    resume: bool,
    **pace: Any,
) -> None:
    """Measure whether the default is ever slower than no speculation and lookups alone, and keeps what drafts bring.

    A cell passes if the default reaches 0.98 of the better of plain and lookup, and 0.97 of drafts that are always used where
    those win by 5%. Each cell takes about 45 seconds, up to three minutes with a slow model; cells that follow each other and
    differ in the sessions only share their processes.
    """
    grid = _chosen(
        cells(parse_pairs(pair or DEFAULT_PAIRS), placement or tuple(PLACEMENTS), sessions or SESSIONS), only
    )
    if resume:
        report.resume()
    report.update(settings=pace)
    about = {"pace": pace} | {
        part: report.content[part] for part in ("date", "commit")
    }  # of a cell: a report may hold older ones
    with Deployments() as deployments:
        for cell in [cell for cell in grid if not _is_measured(report.content["results"].get(cell.name))]:
            found = attempt(cell.name, lambda cell=cell: measure_cell(cell, Pace(**pace), deployments, tell))  # type: ignore[misc]
            report.update(figures=_figures(cell.name, found), results={cell.name: about | asdict(cell) | found})
    show([HEADER, *(_row(name, one) for name, one in report.content["results"].items())], [
        f"in brackets: {CONFIDENCE:.0%} confidence intervals of the median ratio; DRAFT CPU: processor share of the drafters"
    ])  # fmt: skip


def _chosen(grid: list[Cell], only: tuple[str, ...]) -> list[Cell]:
    """Return the cells that are named, or all; raises ConfigError for a name that no cell has."""
    names = [cell.name for cell in grid]
    for name in only:
        if name not in names:
            raise ConfigError(f"there is no cell {name!r} among {', '.join(names)}")
    return [cell for cell in grid if not only or cell.name in only]


def _is_measured(found: dict[str, Any] | None) -> bool:
    """Return whether a cell has been measured; one that failed is measured again."""
    return found is not None and "error" not in found


def _figures(name: str, found: dict[str, Any]) -> dict[str, Figure]:
    rates = {f"{name} {who} tokens/s": figure("tokens/s", own) for who, own in found.get("rates", {}).items()}
    kinds = ("to_best", "forced_to_best", "to_forced")
    return rates | {f"{name} {kind}": figure("ratio", found[kind]["ratios"]) for kind in kinds if kind in found}


def _row(name: str, found: dict[str, Any]) -> tuple[object, ...]:
    if "error" in found:
        return (name, *[""] * (len(HEADER) - 2), "ERROR")
    medians = found["medians"]
    rates = [medians.get(who, "-") for who in ("plain", "lookup", "default", "forced")]
    ratios = [_ratio(found.get(kind)) for kind in ("to_best", "forced_to_best", "to_forced")]
    drafters = sum(share for who, share in found["cpu_share_of_default"].items() if who.startswith("draft"))
    return (name, *rates, *ratios, f"{drafters:.3f}", "ok" if passes(found) else "MISSED")


def passes(found: dict[str, Any]) -> bool:
    """Return whether a cell shows what was asked."""
    is_kept = "forced_to_best" not in found or (
        found["forced_to_best"]["median"] < FORCED_WINS or found["to_forced"]["median"] >= OF_FORCED
    )
    return bool(found["to_best"]["median"] >= LEAST and is_kept)


def _ratio(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    low, high = found["interval"]
    return f"{found['median']:.3f} [{low:.3f}, {high:.3f}]"
