"""Options and progress messages of commands that wait for a broker and a verifier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from specq.cli.options import Seconds
from specq.models import could_be_target
from specq.protocol import ConfigError, did_you_mean

EVERY_S = 15.0  # between two lines about the same wait

F = TypeVar("F", bound=Callable[..., Any])


def wait_options(**kind: Any) -> Callable[[F], F]:
    """Add `--wait/--no-wait` and `--wait-seconds`; `kind`: further arguments of click's options."""

    def decorate(command: F) -> F:
        whether = click.option(
            "--wait/--no-wait",
            default=True,
            help="Wait for a broker and a verifier, or fail if none answers within --timeout-s.  [default: wait]",
            **kind,
        )
        how_long = click.option(
            "--wait-seconds",
            type=Seconds(0, 86_400),
            default=600.0,
            show_default=True,
            help="Maximum time to wait for broker and verifier, in seconds.",
            **kind,
        )
        return whether(how_long(command))

    return decorate


class WaitReport:
    """Prints what a client waits for, repeatedly until `stop`, and when the model is served.

    It is the client's `on_wait`. `look` returns a further note, or "". An exception of `look` ends the wait.
    """

    def __init__(self, wait_s: float, every_s: float = EVERY_S, look: Callable[[], str] = str) -> None:
        self._wait_s, self._every_s, self._look, self._started = wait_s, every_s, look, time.monotonic()
        self._what, self._is_over = "", threading.Event()

    def __call__(self, what: str) -> None:
        note = self._looked()
        is_first, self._what = not self._what, what
        click.echo(f"specq: waiting for {what}{note}, at most {self._wait_s:g} s (--no-wait: fail instead)", err=True)
        if is_first:
            threading.Thread(target=self._repeat, daemon=True).start()

    def _looked(self) -> str:
        """Return the further note in brackets, or ""."""
        try:
            note = self._look()
        except BaseException:
            self.stop()
            raise
        return f" ({note})" if note else ""

    def _repeat(self) -> None:
        while not self._is_over.wait(self._every_s):
            waited_s = time.monotonic() - self._started
            click.echo(f"specq: still waiting for {self._what}: {waited_s:.0f} of {self._wait_s:g} s", err=True)

    def stop(self) -> None:
        """Stop printing, since the wait is over."""
        self._is_over.set()

    def is_served(self, model: str) -> None:
        """Print that the model is served, if there was a wait."""
        self.stop()
        if self._what:
            click.echo(f"specq: {model} is served, after {time.monotonic() - self._started:.0f} s", err=True)


def served_instead(model: str, served: Sequence[str], address: str) -> str:
    """Return a note on what a broker serves instead of `model`.

    Returns "" if it serves no model yet, or `model` itself.

    Raises ConfigError if it serves other models and no verifier can have this one.
    """
    if not served or model in served:
        return ""
    hint = did_you_mean(model, served)
    note = f"served models: {', '.join(served)}" + (f"; {hint}" if hint else "")
    if not could_be_target(model):
        raise ConfigError(f"the broker at {address} does not serve the model {model!r}; {note}")
    return note
