"""Where stop strings begin and end in a text that grows.

Rule: what a character costs hardly depends on how many strings there are, or on how long they are: they are searched as in
a sorted list, never one after the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable


class StopStrings:
    """Some strings; empty ones are left out. `begun` follows a text character by character, `ended` asks what it said."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._ordered = tuple(sorted({string for string in strings if string}))
        self._last = frozenset(string[-1] for string in self._ordered)

    def begun(self, before: str, character: str) -> str:
        """Return the longest end of a text with which a stop string begins, given that of the text before a character."""
        end = before + character
        while end and not self._begins(end):
            end = end[1:]
        return end

    def ended(self, end: str) -> int:
        """Return the length of the longest stop string with which a text ends, given what `begun` said of it; or 0."""
        if end[-1:] not in self._last or not end.endswith(self._ordered):
            return 0
        return max(len(string) for string in self._ordered if end.endswith(string))

    def _begins(self, text: str) -> bool:
        """Return whether a stop string begins with a text: if any does, then the first that is not below it in order."""
        place = bisect_left(self._ordered, text)
        return place < len(self._ordered) and self._ordered[place].startswith(text)
