"""Weights & Biases: a report as a run of the project `specq` there.

This is the only file that imports wandb. Environment variables of wandb set the account (`WANDB_API_KEY`), and whether
runs stay on this machine (`WANDB_MODE=offline`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.report import Report
from specq.protocol import ConfigError


@contextmanager
def tracked(report: Report, group: str) -> Iterator[list[Path]]:
    """Yield a list for plots; when the block ends, log them and the report.

    Repetitions are steps, medians are the summary. The run begins before the measurement, so that a missing package or
    login is an error at once.
    """
    import wandb

    about = {name: value for name, value in report.content.items() if name not in ("figures", "results")}
    try:
        started = wandb.init(project="specq", group=group or None, job_type=about["suite"], config=about)
    except wandb.Error as error:
        raise ConfigError(f"Weights & Biases: {error}") from None
    with started as run:
        plots = list[Path]()
        yield plots
        figures = {name.replace("/", " per "): one for name, one in report.content["figures"].items()}
        for i in range(max((len(one["repeats"]) for one in figures.values()), default=0)):
            run.log({name: one["repeats"][i] for name, one in figures.items() if i < len(one["repeats"])})
        for path in plots:
            run.log({path.stem: wandb.Image(str(path))})
        run.summary.update({name: one["median"] for name, one in figures.items()})
