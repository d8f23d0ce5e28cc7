"""The figures of a verifier's steps in service: means of its own counts, in a simulation as in a real process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specq.protocol import PHASES

Metrics = Mapping[str, Any]  # as `Heartbeat.metrics`, with the heartbeat's number of steps as `steps`
ENGINE = ("forward", "judge")  # the phases in which the engine computes; the others are the host's


def since(before: Metrics, after: Metrics) -> dict[str, Any]:
    """Return the figures of the steps between two states, in milliseconds and counts a step.

    step_ms       time in the engine.
    host_ms       time between, for drafts, messages and bookkeeping.
    used          the sources that are in use afterwards.
    sent, judged  nodes in all, by source.
    """
    num_steps = after["steps"] - before["steps"]
    sums = {name: _less(after["step_us"], before["step_us"], name)[0] / 1e3 for name in PHASES}
    each = {name: round(ms / max(num_steps, 1), 4) for name, ms in sums.items()}
    return {
        "num_steps": num_steps,
        "step_ms": round(sum(each[name] for name in ENGINE), 4),
        "host_ms": round(sum(ms for name, ms in each.items() if name not in ENGINE), 4),
        "phases_ms": each,
        "rows": round(_less(after, before, "step_rows")[0] / max(num_steps, 1), 3),
        "sent": {name: count - before["sent"].get(name, 0) for name, count in after["sent"].items()},
        "judged": {name: _less(after["judged"], before["judged"], name) for name in after["judged"]},
        "used": next((name for name, (is_used, _) in after["choices"].items() if is_used), ""),
    }


def _less(after: Metrics, before: Metrics, name: str) -> list[int]:
    """Return the numbers of a name minus those before; lists may lack zeros at their ends."""
    new, old = _numbers(after, name), _numbers(before, name)
    old += [0] * (len(new) - len(old))
    return [a - b for a, b in zip(new, old, strict=False)] or [0]


def _numbers(metrics: Metrics, name: str) -> list[int]:
    values: Sequence[int] = metrics.get(name, ())
    return list(values)
