"""What the suites `strategies` and `shapes` share: options, the measuring, the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from bench.figures import Row
from bench.grid import NOTES, run_grid
from bench.pairs import parse_pairs
from bench.report import Figure, Report, figure, show, tell
from bench.settings import Settings
from bench.suite import options, serving_options
from bench.variants import Variant
from specq.runtime import Number
from specq.samples import shipped

TEMPERATURES = (0.0, 0.8)
Cell = dict[str, Any]

grid_options = options(
    serving_options,
    click.option(
        "--temperature",
        type=Number(0),
        multiple=True,
        help="0 is greedy; may be repeated.  [default: 0, 0.8]",
    ),
    click.option(
        "--pair",
        multiple=True,
        metavar="NAME=TARGET,DRAFT",
        help="Models to compare on; may be repeated; DRAFT may be weak, weak:NOISE or random.  [default: tiny and weak]",
    ),
)


def measure_grid(
    report: Report,
    variants: Sequence[Variant],
    make_table: Callable[[Sequence[Cell]], list[Row]],
    *,
    dataset: tuple[str, ...],
    numseqs: int,
    pair: tuple[str, ...],
    temperature: tuple[float, ...],
    **given: Any,
) -> None:
    """Measure the variants on all pairs at all temperatures; report and print the cells."""
    settings = Settings(datasets=dataset or tuple(shipped()), num_prompts=numseqs, **given)
    result = run_grid(parse_pairs(pair), variants, temperature or TEMPERATURES, settings, tell)
    cells = result["cells"]
    report.update(settings=result.pop("settings"), figures=_figures(cells), results=result)
    differs = any(cell["same_text"] is None for cell in cells)
    show(make_table(cells), [f"in distribution: {NOTES['in_distribution']}"] if differs else [])


def _figures(cells: Sequence[Cell]) -> dict[str, Figure]:
    return {
        f"{cell['pair']} T={cell['temperature']:g} {cell['variant']} tokens/s": figure(
            "tokens/s", cell["tokens_per_second"]["repeats"]
        )
        for cell in cells
    }
