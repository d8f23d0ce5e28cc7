"""Progress of a task: on a terminal a line that is rewritten about once a second, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import click

TERMINAL_S, FILE_S = 1.0, 10.0  # between two lines
CLEAR = "\x1b[K"  # the rest of the line


class Progress:
    """The progress of one task after the other; the first line appears after a second."""

    def __init__(self, *, is_terminal: bool | None = None) -> None:
        """Begin to count. `is_terminal`: whether lines go to a terminal; None: detect it."""
        self._is_terminal = sys.stdout.isatty() if is_terminal is None else is_terminal
        self._next = time.monotonic() + TERMINAL_S

    def say(self, line: str) -> None:
        """Show the progress, unless it was shown just now."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + (TERMINAL_S if self._is_terminal else FILE_S)
        click.echo(f"{CLEAR}{line}\r" if self._is_terminal else line, nl=not self._is_terminal)

    def of_answers(self, num_prompts: int, num_new: int) -> Callable[[int], bool]:
        """Return a `goes_on` function for `decoding.generate` in an evaluation; it always returns True."""

        def goes_on(num_said: int) -> bool:
            self.say(f"the target answers {num_prompts} prompts: {num_said} of {num_new} tokens each")
            return True

        return goes_on

    def end(self, line: str) -> None:
        """Show the result in a line that stays."""
        click.echo(f"{CLEAR}{line}" if self._is_terminal else line)
