"""What the commands of `specq train` share: they run one stage of a table, or all in order."""

from __future__ import annotations

from collections.abc import Mapping

import click

from specq.runtime import resolve

ALL_STAGES = "all"


def run_stages(stage: str, stages: Mapping[str, str], settings: object) -> None:
    """Run a stage, or with ALL_STAGES each of the table, with these settings."""
    for name in stages if stage == ALL_STAGES else [stage]:
        click.echo(f"== {name}")
        resolve("stage", stages, name)(settings)
