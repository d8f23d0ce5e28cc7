"""The figures of many services in short: quantiles, how many are too slow, and the worst."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tests.verifier.services.figures import Row

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 1.0)
BOUNDS = (0.98, 0.9, 0.85)
FOLLOW_S, FOLLOW_STEPS = 10.0, 100
NUM_WORST = 12


def summary(rows: Sequence[Row], before: Sequence[Row] = ()) -> str:
    """Return a table; `before`: rows of another controller, with which these are compared service by service."""
    lines = [f"{len({row.seed for row in rows})} services, {len(rows)} phases", "", _header()]
    lines += [
        _line("phase: controller / plain, after 2 s", [row.later / row.plain for row in rows]),
        _line("phase: controller / best fixed", _to_best(rows)),
        _line("  where plain decoding is best", _to_best(row for row in rows if row.best == "plain")),
        _line(
            "  where drafts bring half as much again", _to_best(row for row in rows if row.best_rate > 1.5 * row.plain)
        ),
        _line("service: controller / best fixed", [*_of_services(rows, "best_rate").values()]),
        _line("service: controller / plain, after 2 s", [*_of_services(rows, "plain").values()]),
        *_noise(rows),
        *_changes(rows),
        "",
        *_worst(rows),
    ]
    return "\n".join(lines + _beside(rows, before))


def _header() -> str:
    names = [*(f"{100 * one:.0f}%" for one in QUANTILES), "mean", *(f"<{bound}" for bound in BOUNDS)]
    return f"{'':40}" + "".join(f"{name:>8}" for name in names)


def _line(name: str, values: Sequence[float]) -> str:
    if not values:
        return f"{name:40}  none"
    found = [*np.quantile(values, QUANTILES), float(np.mean(values))]
    counts = [sum(value < bound for value in values) for bound in BOUNDS]
    return f"{name:40}" + "".join(f"{one:8.3f}" for one in found) + "".join(f"{one:8d}" for one in counts)


def _to_best(rows: Iterable[Row]) -> list[float]:
    return [row.controller / row.best_rate for row in rows]


def _of_services(rows: Sequence[Row], beside: str) -> dict[int, float]:
    """Return of each service what the controller brings in all, relative to `plain` or `best_rate` of each phase."""
    own: dict[int, float] = {}
    other: dict[int, float] = {}
    for row in rows:
        rate = row.later if beside == "plain" else row.controller
        own[row.seed] = own.get(row.seed, 0.0) + rate * row.seconds
        other[row.seed] = other.get(row.seed, 0.0) + getattr(row, beside) * row.seconds
    return {seed: own[seed] / other[seed] for seed in own}


def _noise(rows: Sequence[Row]) -> list[str]:
    """Return what chance does: one repeat beside the mean of the others."""
    num_repeats = len(rows[0].rates)
    totals: dict[int, list[float]] = {}
    for row in rows:
        own = totals.setdefault(row.seed, [0.0] * num_repeats)
        totals[row.seed] = [total + rate * row.seconds for total, rate in zip(own, row.rates, strict=True)]
    if num_repeats < 2:
        return []
    others = [one * (num_repeats - 1) / (sum(own) - one) for own in totals.values() for one in own]
    return [_line("service: one repeat / the others", others)]


def _changes(rows: Iterable[Row]) -> list[str]:
    """Return how soon changes were followed: 90% of the best rate after them."""
    lines = []
    for name, chosen in (
        ("first phases", [row for row in rows if not row.phase]),
        ("changes, best is plain", [row for row in rows if row.phase and row.best == "plain"]),
        ("changes, best drafts", [row for row in rows if row.phase and row.best != "plain"]),
    ):
        if not chosen:
            continue
        late = [row for row in chosen if not is_in_time(row)]
        never = sum(row.followed_s < 0 for row in chosen)
        seconds = [row.followed_s if row.followed_s >= 0 else row.seconds for row in chosen]
        median, most = np.quantile(seconds, (0.5, 0.95))
        lines.append(
            f"{name}: {len(chosen)}, 90% of the best after {median:.1f} s (95% quantile {most:.1f} s), "
            f"{len(late)} later than 10 s and 100 steps, {never} of them not in their phase"
        )
    return lines


def is_in_time(row: Row) -> bool:
    """Return whether a change was followed within 10 s or 100 steps, whichever is longer."""
    return row.followed_s >= 0 and (row.followed_s <= FOLLOW_S or row.followed_steps <= FOLLOW_STEPS)


def _worst(rows: Sequence[Row]) -> list[str]:
    lines = ["worst phases: seed.phase kind, sessions, best: to the best, to plain, followed after"]
    for row in sorted(rows, key=lambda row: row.controller / row.best_rate)[:NUM_WORST]:
        after = f"{row.followed_s:.1f} s" if row.followed_s >= 0 else f"not in {row.seconds:.0f} s"
        lines.append(
            f"  {row.seed}.{row.phase} {row.kind}, {row.sessions}, {row.best}: "
            f"{row.controller / row.best_rate:.3f}, {row.later / row.plain:.3f}, {after}"
        )
    return lines


def _beside(rows: Sequence[Row], before: Sequence[Row]) -> list[str]:
    if not before:
        return []
    now, then = _of_services(rows, "best_rate"), _of_services(before, "best_rate")
    ratios = {seed: now[seed] / then[seed] for seed in now if seed in then}
    worst = sorted(ratios, key=ratios.__getitem__)[:NUM_WORST]
    values = [*ratios.values()]
    share = sum(value >= 0.98 for value in values) / len(values)
    return [
        "",
        _header(),
        _line("service: controller / the one before", values),
        f"at least 0.98 of the one before in {100 * share:.0f}%; worst: "
        + ", ".join(f"{seed} {ratios[seed]:.3f}" for seed in worst),
    ]
