"""What contestants found, {variant: {sessions: figures}}, as rows for the screen and as figures for the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specq.bench.report import Figure, figure

Row = tuple[object, ...]
Found = dict[str, Any]
HEADER: Row = ("CONTESTANT", "VARIANT", "SESSIONS", "TOKENS/S", "PER USER", "L", "STEP MS")


def rows(name: str, found: Found) -> list[Row]:
    """Return a row for each variant and number of sessions."""
    return [
        (name, variant, sessions, one["tokens_per_second"], round(one["tokens_per_second"] / int(sessions), 1),
         one.get("mean_accepted_length", ""), one.get("step_ms", ""))
        for variant, sessions, one in _each(found) if "tokens_per_second" in one
    ]  # fmt: skip


def figures(name: str, found: Found) -> dict[str, Figure]:
    """Return rates, and the step times of models by themselves."""
    rates = {
        f"{name} {variant} S={sessions}": figure("tokens/s", one["rates"])
        for variant, sessions, one in _each(found)
        if "rates" in one
    }
    steps = {
        f"{name} {variant} {key}": figure("ms", [one["step_ms"]])
        for variant, key, one in _each(found)
        if "rates" not in one
    }
    return rates | steps


def _each(found: Found) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (variant, sessions, figures); a contestant that failed has none."""
    for variant, by_sessions in found.items():
        if isinstance(by_sessions, dict):
            yield from ((variant, sessions, one) for sessions, one in by_sessions.items())
