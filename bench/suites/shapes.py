"""`specq bench shapes`: each shape of drafts beside plain decoding and lookup alone."""

from __future__ import annotations

from typing import Any

from bench.grid import shape_table
from bench.report import Report
from bench.suite import suite
from bench.suites.grids import grid_options, measure_grid
from bench.variants import shapes


@suite("shapes")
@grid_options
def command(report: Report, **options: Any) -> None:
    """Measure each shape of drafts beside plain decoding and lookup alone: speed, acceptance, and the verified trees."""
    measure_grid(report, shapes(), shape_table, **options)
