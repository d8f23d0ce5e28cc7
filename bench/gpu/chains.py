"""Chains of draft steps, and single passes."""

from __future__ import annotations

from bench import chain_steps
from bench.gpu.parts import Found, Task
from bench.report import Figure, figure


def measure(task: Task) -> Found:
    """Time chains by sessions; of one session also sampled, and with three children at each level."""
    settings = [
        (1, 0.0, 1),
        (1, 0.8, 1),
        (1, 0.0, 3),
        *((sessions, 0.0, 1) for sessions in task.sessions if sessions > 1),
    ]
    figures: dict[str, Figure] = {}
    for sessions, temperature, width in settings:
        times = chain_steps.times(task.pair.drafter, sessions, temperature=temperature, width=width)
        name = f"S={sessions} T={temperature} F={width}"
        figures |= {f"{name}, {kind}": figure("ms", found) for kind, found in times.items()}
    return Found(figures)
