"""Commands that wait for a broker and a verifier: their options, and what they say meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from specq.cli.options import Seconds

F = TypeVar("F", bound=Callable[..., Any])


def wait_options(**kind: Any) -> Callable[[F], F]:
    """Add `--wait/--no-wait` and `--wait-seconds`; `kind`: further arguments of click's options."""

    def decorate(command: F) -> F:
        whether = click.option(
            "--wait/--no-wait",
            default=True,
            help="Wait for a broker and a verifier, or fail if they are not there.",
            **kind,
        )
        how_long = click.option(
            "--wait-seconds",
            type=Seconds(0, 86_400),
            default=600.0,
            show_default=True,
            help="How long to wait for them.",
            **kind,
        )
        return whether(how_long(command))

    return decorate


class WaitReport:
    """Says what a client waits for, as its `on_wait`, and when the model is there."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s, self._started, self._has_said = wait_s, time.monotonic(), False

    def __call__(self, what: str) -> None:
        self._has_said = True
        click.echo(f"specq: waiting for {what}, at most {self._wait_s:g} s (--no-wait: fail instead)", err=True)

    def is_served(self, model: str) -> None:
        """Say so, if it had to be waited for."""
        if self._has_said:
            click.echo(f"specq: {model} is served, after {time.monotonic() - self._started:.0f} s", err=True)
