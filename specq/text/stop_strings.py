"""Where stop strings begin and end in a growing text.

Rule: the cost per character hardly depends on the number of strings or on their lengths. The strings are searched as a
sorted list, never one after another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

_TEXT, _HIDDEN = "t", "h"


class StopSearch:
    """The search for some strings in characters that come one by one. Empty strings are ignored.

    Some characters are not part of the visible text. They are not counted.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._ordered = tuple(sorted({string for string in strings if string}))
        self._last = frozenset(string[-1] for string in self._ordered)
        self._begun = ""  # the longest end of the text with which a stop string begins
        self._kinds = ""  # of each of its characters
        self._saved = "", ""

    def __bool__(self) -> bool:
        return bool(self._ordered)

    def push(self, character: str, *, is_text: bool = True) -> bool:
        """Add a character; return whether a stop string ends with it."""
        end = self._begun + character
        while end and not self._begins(end):
            end = end[1:]
        kinds = self._kinds + (_TEXT if is_text else _HIDDEN)
        self._begun, self._kinds = end, kinds[len(kinds) - len(end) :]
        return character in self._last and end.endswith(self._ordered)

    @property
    def num_held(self) -> int:
        """How many characters at the end of the text may belong to a stop string."""
        return self._kinds.count(_TEXT)

    @property
    def ended(self) -> str:
        """The longest stop string that ends with the text, or ""."""
        return max((string for string in self._ordered if self._begun.endswith(string)), key=len, default="")

    @property
    def num_ended(self) -> int:
        """How many characters of the text belong to `ended`."""
        return self._kinds.count(_TEXT, len(self._kinds) - len(self.ended))

    def save(self) -> None:
        """Save the position in the text to which `restore` returns."""
        self._saved = self._begun, self._kinds

    def restore(self) -> None:
        """Forget all characters since `save`."""
        self._begun, self._kinds = self._saved

    def _begins(self, text: str) -> bool:
        """Return whether a stop string begins with a text.

        If any does, it is the first string in order that is not below the text.
        """
        place = bisect_left(self._ordered, text)
        return place < len(self._ordered) and self._ordered[place].startswith(text)
