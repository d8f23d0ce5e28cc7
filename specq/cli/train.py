"""`specq train METHOD`: a table of methods, each a command of `train_methods.py`, imported only when called."""

from __future__ import annotations

import click

from specq.cli.groups import LazyGroup
from specq.runtime import wait_asleep

METHODS = {
    "block": "specq.cli.train_methods:block",
    "draft": "specq.cli.train_methods:draft",
    "eagle3": "specq.cli.train_methods:eagle3",
    "medusa": "specq.cli.train_methods:medusa",
    "pair": "specq.cli.train_methods:pair",
    "parallel": "specq.cli.train_methods:parallel",
}
SUMMARIES = {
    "block": "Train a block drafter on a target's hidden states.",
    "draft": "Train a small draft model for an existing target.",
    "eagle3": "Train an EAGLE-3 head on a target's hidden states.",
    "medusa": "Train Medusa heads on a target's hidden states.",
    "pair": "Train a small target, and distil a draft from it.",
    "parallel": "Train a draft model that predicts several tokens in one pass.",
}


@click.group(cls=LazyGroup, table=METHODS, summaries=SUMMARIES)
def train() -> None:
    """Train a draft model or heads for a target, or both target and draft."""
    wait_asleep()  # before a method imports torch
