"""A broker's report as series: each function reads one thing.

Rule: a report comes from outside. The broker and its workers may have other versions. A missing or malformed value
gives no series, and does not affect others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from specq.protocol import COUNTED_DEPTHS, PHASES

Report = dict[str, Any]
Labels = tuple[str, ...]


class Buckets(NamedTuple):
    """A histogram's value: (limit, number of values up to it) ascending, and the sum.

    The last number counts all values.
    """

    counts: list[tuple[str, float]]
    sum: float


class Total(NamedTuple):
    """A summary's value: the number and the sum."""

    num: float
    sum: float


Sample = tuple[Labels, Any]
Read = Callable[[Report], Iterator[Sample]]


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and math.isfinite(value) else None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[float]:
    """Return a list of numbers; empty for any other value."""
    is_good = isinstance(value, list) and all(_number(one) is not None for one in value)
    return list(value) if is_good else []


def _buckets(value: Any, limits: Sequence[float]) -> Buckets | None:
    """Return a histogram from a heartbeat; None if it has more places than limits."""
    found = _list(value)
    if not isinstance(value, list) or len(found) > len(limits) + 2:
        return None
    padded = found + [0.0] * (len(limits) + 2 - len(found))
    return Buckets(_cumulative(padded[1:], limits), padded[0])


def _cumulative(counts: Sequence[float], limits: Sequence[float]) -> list[tuple[str, float]]:
    names = [f"{limit:g}" for limit in limits]
    return list(zip([*names, "+Inf"], accumulate(counts), strict=True))


# --- of models --------------------------------------------------------------------------------------------------------


def of_rounds(name: str) -> Read:
    """Return a reader of the count with this name, of each model's rounds."""

    def read(report: Report) -> Iterator[Sample]:
        for model, counts in _object(report.get("rounds")).items():
            if (value := _number(_object(counts).get(name))) is not None:
                yield (model,), value

    return read


def accepted_lengths(report: Report) -> Iterator[Sample]:
    """Yield the histogram of accepted lengths of each model."""
    for model, counts in _object(report.get("rounds")).items():
        lengths, total = _list(_object(counts).get("accepted_lengths")), _number(_object(counts).get("accepted_tokens"))
        if len(lengths) == COUNTED_DEPTHS + 1 and total is not None:
            yield (model,), Buckets(_cumulative(lengths, range(COUNTED_DEPTHS)), total)


def accepted_by_position(report: Report) -> Iterator[Sample]:
    """Yield by model and position the number of drafted rounds that accepted a node there."""
    for model, counts in _object(report.get("rounds")).items():
        lengths = _list(_object(counts).get("accepted_lengths"))
        at_least = list(accumulate(reversed(lengths)))[::-1]  # [i]: rounds that accepted i or more
        for position, count in enumerate(at_least[1:]):
            if count:
                yield (model, str(position)), count


def of_loads(name: str) -> Read:
    """Return a reader of the number of each model's jobs in this state.

    Returns 0 for served models without such jobs.
    """

    def read(report: Report) -> Iterator[Sample]:
        loads = _object(report.get("loads"))
        for model in dict.fromkeys([*_names(report.get("models")), *loads]):
            yield (model,), _number(_object(loads.get(model)).get(name)) or 0

    return read


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def kv_use(report: Report) -> Iterator[Sample]:
    """Yield the share of each model's KV slots in use, over its verifiers."""
    slots, free = Counter[str](), Counter[str]()
    for _, worker in workers(report, "target"):
        model, room = worker.get("model"), _number(worker.get("kv_slots"))
        if isinstance(model, str) and room:
            slots[model] += int(room)
            free[model] += int(_number(worker.get("free_slots")) or 0)
    for model, room in slots.items():
        yield (model,), min(max(1 - free[model] / room, 0.0), 1.0)


# --- of workers -------------------------------------------------------------------------------------------------------


def workers(report: Report, role: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the workers of a role ("": any) with unique names.

    If several workers have one name, their incarnation is added, in any order. An old broker does not report it; then
    they are numbered.
    """
    said = report.get("workers")
    found = [_object(worker) for worker in (said if isinstance(said, list) else ())]
    names, seen = Counter(_named(worker) for worker in found), Counter[str]()
    for worker in found:
        name, incarnation = _named(worker), worker.get("incarnation")
        if names[name] > 1 and type(incarnation) is int:
            name = f"{name} ({incarnation:x})"
        seen[name] += 1
        if role in ("", worker.get("role")):
            yield name if seen[name] == 1 else f"{name} ({seen[name]})", worker


def _named(worker: dict[str, Any]) -> str:
    return str(worker.get("name", ""))


def worker_info(report: Report) -> Iterator[Sample]:
    for name, worker in workers(report):
        yield (name, *(str(worker.get(key, "")) for key in ("role", "model", "engine"))), 1


def worker_ready(report: Report) -> Iterator[Sample]:
    for name, worker in workers(report):
        yield (name,), float(worker.get("state") == "ready")


def of_workers(name: str, role: str = "") -> Read:
    """Return a reader of the broker's value with this name for each worker."""

    def read(report: Report) -> Iterator[Sample]:
        for worker, said in workers(report, role):
            if (value := _number(said.get(name))) is not None:
                yield (worker,), value

    return read


def _counted(report: Report, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each worker's count with this name; workers without it are left out."""
    for worker, said in workers(report):
        metrics = _object(said.get("metrics"))
        if name in metrics:
            yield worker, metrics[name]


def of_metrics(name: str) -> Read:
    """Return a reader of the workers' number with this name."""

    def read(report: Report) -> Iterator[Sample]:
        for worker, value in _counted(report, name):
            if (number := _number(value)) is not None:
                yield (worker,), number

    return read


def by_label(name: str, place: int = -1) -> Read:
    """Return a reader of the workers' numbers with this name, by a label's values.

    place  which of several numbers to take.
    """

    def read(report: Report) -> Iterator[Sample]:
        for worker, values in _counted(report, name):
            for label, value in _object(values).items():
                numbers = _list(value if place >= 0 else [value])
                if len(numbers) > max(place, 0):
                    yield (worker, label), numbers[max(place, 0)]

    return read


def by_depth(name: str) -> Read:
    """Return a reader of the workers' numbers with this name by depth, from 1 on."""

    def read(report: Report) -> Iterator[Sample]:
        for worker, values in _counted(report, name):
            for depth, value in enumerate(_list(values)[:COUNTED_DEPTHS], 1):
                yield (worker, str(depth)), value

    return read


def histogram(name: str, limits: Sequence[int]) -> Read:
    """Return a reader of the workers' histograms with this name."""

    def read(report: Report) -> Iterator[Sample]:
        for worker, value in _counted(report, name):
            if (buckets := _buckets(value, limits)) is not None:
                yield (worker,), buckets

    return read


def step_seconds(limits_us: Sequence[int]) -> Read:
    """Return a reader of the histograms of the phases of steps."""
    limits = [limit / 1e6 for limit in limits_us]

    def read(report: Report) -> Iterator[Sample]:
        for worker, values in _counted(report, "step_us"):
            for phase in PHASES:
                if (buckets := _buckets(_object(values).get(phase), limits)) is not None:
                    yield (worker, phase), Buckets(buckets.counts, buckets.sum / 1e6)

    return read


# --- of the broker ----------------------------------------------------------------------------------------------------


def of_counts(*names: str) -> Read:
    """Return a reader of event counts; several names are the values of a label."""

    def read(report: Report) -> Iterator[Sample]:
        counts = report.get("counts")
        for name in names if isinstance(counts, dict) else ():
            yield (name,) * (len(names) > 1), _number(_object(counts).get(name)) or 0

    return read


def jobs_ended(report: Report) -> Iterator[Sample]:
    for name, value in _object(report.get("counts")).items():
        number = _number(value)
        if name.startswith("finished_") and number is not None:
            yield (name.removeprefix("finished_"),), number


def of_journal(name: str) -> Read:
    """Return a reader of the broker's value for its journal with this name."""

    def read(report: Report) -> Iterator[Sample]:
        if (value := _number(_object(report.get("journal")).get(name))) is not None:
            yield (), value

    return read


def journal_commits(report: Report) -> Iterator[Sample]:
    journal = _object(report.get("journal"))
    count, seconds = _number(journal.get("commits")), _number(journal.get("commit_seconds"))
    if count is not None and seconds is not None:
        yield (), Total(count, seconds)


def journal_trouble(report: Report) -> Iterator[Sample]:
    journal = _object(report.get("journal"))
    if "trouble" in journal:
        yield (), float(bool(journal["trouble"]))


def is_up(report: Report) -> Iterator[Sample]:
    yield (), float(bool(report))
