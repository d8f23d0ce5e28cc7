"""Numbers of the suites' options."""

from __future__ import annotations

import math
from typing import Any

import click


class Finite(click.FloatRange):
    """A number within a range, in which neither NaN is, though it compares as if it were, nor infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number
