"""The counters of verifiers and workers.

`SessionStats` has the counts of a session that only a verifier can make. The last `Tokens` of a job carries them.

Workers count from their start on, and their heartbeats carry the counts. The broker keeps the newest and shows them in
its report. The gateway converts these to Prometheus series. A value is one of:

- a number: a count or a measure.
- a list: numbers by place. Trailing zeros may be left out.
- an object: numbers or lists by the value of a label.

A histogram is a list. First comes the sum of the observed values. Then comes the count of each bin: values up to the
first limit, above it up to the second, ..., above all.

Rule: versions agree on names. A receiver ignores unknown names. A name never changes its meaning, and a histogram never
changes its limits. The bound limits only the amount of data.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from specq.protocol.bounds import MAX_INT64, MAX_NODES


@dataclass(slots=True)
class SessionStats:
    """Counts that only the verifier can make.

    - `drafted`: nodes that arrived.
    - `stale`: nodes that the transcript contradicted.
    - `orphans`: nodes with an unknown parent.
    - `hits`, `misses`: rounds that began with live nodes, and without.
    - `drafted_rounds`: rounds that verified nodes.
    - `leaves`, `depths`: sums over these rounds of their trees' leaves and depths. They are N and K for N candidates of
      K tokens.
    - `min_accept_probs`: sum over rounds of `Verdict.min_accept_prob`.
    - `positions`: [i] is [verified, accepted] nodes at depth i + 1.
    """

    drafted: int = 0
    stale: int = 0
    orphans: int = 0
    hits: int = 0
    misses: int = 0
    drafted_rounds: int = 0
    leaves: int = 0
    depths: int = 0
    min_accept_probs: int = 0
    positions: list[list[int]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return all counts by name, as JSON-able copies."""
        counts = {name: getattr(self, name) for name in self.__slots__}
        return counts | {"positions": [list(pair) for pair in self.positions]}


class RenamedCounts(dict[str, Any]):
    """Counts by name. A name of the previous version is an alias, with a warning."""

    OLD: ClassVar[dict[str, str]] = {"worth": "min_accept_prob", "worths": "min_accept_probs"}

    def __missing__(self, name: str) -> Any:
        if self.OLD.get(name) not in self:
            raise KeyError(name)
        warnings.warn(
            f"{name} is now {self.OLD[name]}; the next version does not accept the old name",
            FutureWarning,
            stacklevel=2,
        )
        return self[self.OLD[name]]

    @classmethod
    def renamed(cls, counts: dict[str, Any]) -> dict[str, Any]:
        """Return counts that the previous version may have stored, under their present names."""
        return {cls.OLD.get(name, name): value for name, value in counts.items()}


class StatsBound:
    """The bound of the result of `SessionStats.to_dict`, or of a part."""

    allowed = "counts that `specq.protocol.stats` names, from 0 to 2**63 - 1"
    _COUNTS: ClassVar[set[str]] = {f.name for f in fields(SessionStats) if f.name != "positions"}

    def admits(self, value: dict[str, Any]) -> bool:
        counts = [value[name] for name in self._COUNTS & value.keys()]
        positions = value.get("positions", [])
        if type(positions) is not list or len(positions) > MAX_NODES or value.keys() - self._COUNTS - {"positions"}:
            return False
        pairs = all(type(pair) is list and len(pair) == 2 for pair in positions)
        return pairs and all(map(_is_count, [*counts, *(number for pair in positions for number in pair)]))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT64


SESSION_STATS = StatsBound()


# Limits of histograms. Seconds are counted as microseconds, so that all sums are whole numbers.
STEP_LIMITS_US = (
    *(10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000),
    *(1_000_000, 2_500_000, 5_000_000, 10_000_000),
)
ROW_LIMITS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

PHASES = ("wait", "plan", "forward", "judge", "host")  # of a step, in order; `host` is the time before the next step
COUNTED_DEPTHS = 32  # nodes at greater depths count with the last

MOST_ENTRIES, MOST_NAME = 1000, 100


class WorkerMetricsBound:
    """The bound of `Heartbeat.metrics`."""

    allowed = (
        f"an object of finite 64-bit numbers, lists of them, and objects of these, with at most {MOST_ENTRIES} names "
        f"and numbers in all, and names of at most {MOST_NAME} characters"
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
