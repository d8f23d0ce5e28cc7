"""Messages from the keyboard: one line or several.

Several lines are between triple quotes, or each but the last ends with a backslash.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

QUOTES = '"""'
PROMPT, MORE = "> ", ". "

ReadLine = Callable[[str], str]


def read_message(read_line: ReadLine) -> str:
    """Read a message; raise EOFError at the input's end, and KeyboardInterrupt as `read_line` does."""
    line = read_line(PROMPT)
    if line.startswith(QUOTES):
        return _until_quotes(line.removeprefix(QUOTES), read_line)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read_line(MORE))
    return "\n".join(lines)


def _until_quotes(line: str, read_line: ReadLine) -> str:
    lines = [line]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(read_line(MORE))
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines)


def with_history() -> ReadLine:
    """Return `input`; with readline, arrow keys recall earlier lines. The lines are not stored."""
    with contextlib.suppress(ImportError):
        import readline

        readline.set_auto_history(True)
    return input
