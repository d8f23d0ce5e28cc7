"""`specq bench strategies`: each strategy beside plain decoding and lookup alone."""

from __future__ import annotations

from typing import Any

from bench.grid import strategy_table
from bench.report import Report
from bench.suite import suite
from bench.suites.grids import grid_options, measure_grid
from bench.variants import strategies


@suite("strategies")
@grid_options
def command(report: Report, **options: Any) -> None:
    """Measure each strategy beside plain decoding and lookup alone: acceptance, speed, and whether the text is the same."""
    measure_grid(report, strategies(), strategy_table, **options)
