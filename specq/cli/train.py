"""`specq train METHOD`: a table of methods, each a command in a file of its own, imported only when it is called."""

from __future__ import annotations

import click

from specq.cli.groups import LazyGroup

METHODS = {"draft": "specq.cli.train_draft:draft", "pair": "specq.cli.train_pair:pair"}
SUMMARIES = {
    "draft": "A small draft model for a target that exists.",
    "pair": "A small target, and a draft distilled from it.",
}


@click.group(cls=LazyGroup, table=METHODS, summaries=SUMMARIES)
def train() -> None:
    """Train models: a draft for a target, or both."""
