"""A broker runs, but serves other models than the one that `specq chat` was asked for: the user chooses."""

from __future__ import annotations

from collections.abc import Sequence

import click

from specq.cli.standard_input import is_terminal
from specq.cli.waiting import served_instead
from specq.protocol import ConfigError


def choose(model: str, served: Sequence[str], address: str) -> str:
    """Return which of the served models to use; "" to start processes for `model`.

    Raises click.Abort for a user who gives up. Raises ConfigError where standard input is no terminal, and where no
    verifier could have a model of this name.
    """
    note = served_instead(model, served, address)
    if not is_terminal():
        raise ConfigError(
            f"the model {model!r} is not served by the broker at {address}; {note}. Use one: --model {served[0]}. "
            f"Or start {model} beside it: specq up --model {model} --broker tcp://127.0.0.1:PORT, then specq chat with "
            "the same --broker"
        )
    choices = [
        f"start {model} for this chat, in processes that share this machine with those of the broker",
        *(f"chat with {name}, which is served" for name in served),
        "give up",
    ]
    click.echo(f"specq: the model {model!r} is not served by the broker at {address}; {note}", err=True)
    for number, text in enumerate(choices, 1):
        click.echo(f"  {number}  {text}", err=True)
    said: int = click.prompt("Which", type=click.IntRange(1, len(choices)), err=True)
    if said == len(choices):
        raise click.Abort
    return ["", *served][said - 1]
