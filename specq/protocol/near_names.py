"""What an error says of a name that is unknown: the known one that it is like, and all that are known."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

MOST_CHARACTERS = 64  # of a name that is compared: a comparison takes time with the square of them
ALIKE = 0.6  # of two names; 1: the same


def did_you_mean(name: str, known: Iterable[str], alike: float = ALIKE, most: int = 1) -> str:
    """Return "did you mean 'x' or 'y'?" for the `most` known names that are most like this one; "" where none is."""
    near = get_close_matches(name[:MOST_CHARACTERS], list(known), n=most, cutoff=alike)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def known_names(name: str, known: Collection[str], alike: float = ALIKE) -> str:
    """Return the end of what is said of a name that is none: the one that it is like, and all that there are."""
    hint = did_you_mean(name, known, alike)
    return f"{hint}{' ' if hint else ''}known are {', '.join(known) or 'none'}"
