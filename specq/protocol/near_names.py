"""What an error says of a name that is unknown: the known one that it is like, and all that are known."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

MOST_CHARACTERS = 64  # of a name that is compared: a comparison takes time with the square of them
ALIKE = 0.6  # of two names; 1: the same


def did_you_mean(name: str, known: Iterable[str], alike: float = ALIKE) -> str:
    """Return "did you mean 'x'?" for the known name that is most like this one; "" where none is as much alike."""
    near = get_close_matches(name[:MOST_CHARACTERS], list(known), n=1, cutoff=alike)
    return f"did you mean {near[0]!r}?" if near else ""


def known_names(name: str, known: Collection[str], alike: float = ALIKE) -> str:
    """Return the end of what is said of a name that is none: the one that it is like, and all that there are."""
    hint = did_you_mean(name, known, alike)
    return f"{hint}{' ' if hint else ''}known are {', '.join(known) or 'none'}"
