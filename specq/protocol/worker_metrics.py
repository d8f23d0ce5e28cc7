"""What a worker counts from its start on, as its heartbeats carry it: the broker keeps the newest and shows it in its
report, of which the gateway makes Prometheus' series.

    a number    a count or a measure
    a list      numbers by place; those at the end that are 0 may be left out
    an object   numbers or lists by the value of a label

A histogram is a list: the sum of what was observed, then how often a value was at most the first limit, the second,
..., beyond all.

Rule: names are what versions agree on. A receiver leaves alone what it does not know; a name never changes its meaning,
limits of a histogram included. The bound limits only how much there may be.
"""

from __future__ import annotations

import math
from typing import Any

from specq.protocol.bounds import MAX_INT64

# Limits of histograms. Seconds are counted as microseconds, so that all sums are whole numbers.
STEP_LIMITS_US = (
    *(10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000),
    *(1_000_000, 2_500_000, 5_000_000, 10_000_000),
)
ROW_LIMITS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

PHASES = ("wait", "plan", "forward", "judge", "host")  # of a step, in their order; `host` lies before the next one
COUNTED_DEPTHS = 32  # nodes at greater depths are counted with the last

MOST_ENTRIES, MOST_NAME = 1000, 100


class WorkerMetricsBound:
    """The bound of `Heartbeat.metrics`."""

    allowed = (
        f"an object of finite 64-bit numbers, lists of them, and objects of these, with at most {MOST_ENTRIES} names and numbers in all, "
        f"and names of at most {MOST_NAME} characters"
    )

    def admits(self, value: dict[str, Any]) -> bool:
        inner = [labels for labels in value.values() if type(labels) is dict]
        values = [one for labels in (value, *inner) for one in labels.values() if type(one) is not dict]
        numbers = [number for one in values for number in (one if type(one) is list else (one,))]
        names = [name for labels in (value, *inner) for name in labels]
        is_flat = not any(type(one) is dict for labels in inner for one in labels.values())
        is_small = len(numbers) + len(names) <= MOST_ENTRIES and all(len(name) <= MOST_NAME for name in names)
        return is_flat and is_small and all(map(_is_number, numbers))


def _is_number(value: object) -> bool:
    if type(value) is int:
        return -MAX_INT64 <= value <= MAX_INT64
    return type(value) is float and math.isfinite(value)


WORKER_METRICS = WorkerMetricsBound()
