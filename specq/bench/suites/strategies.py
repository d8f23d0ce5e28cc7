"""`specq bench strategies`: each strategy beside plain decoding and lookup alone."""

from __future__ import annotations

from typing import Any

from specq.bench.grid import strategy_table
from specq.bench.report import Report
from specq.bench.suite import suite
from specq.bench.suites.grids import grid_options, measure_grid
from specq.bench.variants import strategies


@suite("strategies")
@grid_options
def command(report: Report, **options: Any) -> None:
    """Measure each strategy beside plain decoding and lookup alone: acceptance, speed, and whether the text is the same."""
    measure_grid(report, strategies(), strategy_table, **options)
