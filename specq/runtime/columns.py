"""Rows of values as text in columns."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[object]]) -> str:
    """Return the rows as lines, each column as wide as its widest value. Numbers are right-aligned."""
    texts = [[str(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join(_line(row, text, widths) for row, text in zip(rows, texts, strict=True))


def _line(row: Sequence[object], texts: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        text.rjust(width) if isinstance(value, (int, float)) else text.ljust(width)
        for value, text, width in zip(row, texts, widths, strict=True)
    ]
    return "  ".join(cells).rstrip()
