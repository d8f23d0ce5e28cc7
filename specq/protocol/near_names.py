"""What an error says of a name that is unknown, but like one that there is."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MOST_CHARACTERS = 64  # of a name that is compared: a comparison takes time with the square of them
ALIKE = 0.6  # of two names; 1: the same


def did_you_mean(name: str, known: Iterable[str], alike: float = ALIKE) -> str:
    """Return "did you mean 'x'?" for the known name that is most like this one; "" where none is as much alike."""
    near = get_close_matches(name[:MOST_CHARACTERS], list(known), n=1, cutoff=alike)
    return f"did you mean {near[0]!r}?" if near else ""
