"""`specq train METHOD`: a table of methods, each a command in a file of its own, imported only when it is called."""

from __future__ import annotations

import click

from specq.cli.groups import LazyGroup

METHODS = {
    "draft": "specq.cli.train_draft:draft",
    "eagle3": "specq.cli.train_eagle:eagle3",
    "medusa": "specq.cli.train_medusa:medusa",
    "pair": "specq.cli.train_pair:pair",
    "parallel": "specq.cli.train_parallel:parallel",
}
SUMMARIES = {
    "draft": "A small draft model for a target that exists.",
    "eagle3": "A layer that drafts from a target's hidden states and its own.",
    "medusa": "Heads that draft from a target's hidden states.",
    "pair": "A small target, and a draft distilled from it.",
    "parallel": "A draft model that foresees several tokens in one pass.",
}


@click.group(cls=LazyGroup, table=METHODS, summaries=SUMMARIES)
def train() -> None:
    """Train models: a draft or heads for a target, or both target and draft."""
