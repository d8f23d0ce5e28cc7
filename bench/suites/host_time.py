"""`specq bench host-time`: the cost of a step on the host, by sessions and drafts."""

from __future__ import annotations

from statistics import median

import click

from bench.report import Report, figure, show
from bench.suite import COUNT, option, repeatable, suite


@suite("host-time")
@repeatable("--sessions", COUNT, (1, 8, 32, 128, 512), "Number of sessions.")
@repeatable("--drafts", click.IntRange(0), (0, 4), "Drafted tokens of each session.")
@option("--repeats", COUNT, 200, "Number of counted steps of each kind.")
def command(report: Report, *, sessions: tuple[int, ...], drafts: tuple[int, ...], repeats: int) -> None:
    """Time steps of a verifier with a free forward pass: what remains is the host's work, phase by phase."""
    from bench.host_time import PHASES, measure  # here, because `--help` needs no torch

    report.update(settings={"sessions": sessions, "drafts": drafts, "repeats": repeats})
    rows: list[tuple[object, ...]] = [("SESSIONS", "DRAFTS", "TOKENS", "MS", *(phase.upper() for phase in PHASES))]
    for num_sessions, num_drafts, times, num_tokens in measure(sessions, drafts, repeats):
        kind = f"S={num_sessions} K={num_drafts}"
        figures = {f"{kind} {phase}": figure("ms", ms) for phase, ms in times.items()}
        report.update(figures=figures, results={f"{kind} tokens": num_tokens})
        shown = [f"{median(times[phase]):.3f}" for phase in ("in all", *PHASES)]
        rows.append((num_sessions, num_drafts, f"{num_tokens:.2f}", *shown))
    show(rows, ["milliseconds a step, medians; tokens: committed by a session's step"])
