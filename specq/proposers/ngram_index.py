"""Prompt lookup: what followed the last tokens when they stood in the text before (Saxena 2023, "Prompt Lookup Decoding").

No model, and next to no time. Each pair of tokens is indexed by where it was followed by what; of the places that end
like the text does, the longest match wins, and among equals the most recent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MIN_MATCH = 2
MAX_MATCH = 8  # longer matches count as this long
MAX_PLACES = 8  # of a pair that are remembered, the most recent
# By length of match, the predicted probability that what followed follows again; a lane's calibration corrects it.
PREDICTED = {2: 0.3, 3: 0.5, 4: 0.6, 5: 0.7, 6: 0.8, 7: 0.85, 8: 0.9}


class NgramIndex:
    """The places of each pair of tokens in a text that grows; `token_ids` is shared with its owner, who appends to it."""

    __slots__ = ("_indexed", "_places", "token_ids")

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self._places: dict[tuple[int, int], list[int]] = {}  # pair -> positions of what followed it
        self._indexed = MIN_MATCH

    def matches(self, beyond: Sequence[int] = ()) -> list[tuple[int, int]]:
        """Return (length of match, position of what followed), best first, for the text and some tokens beyond it."""
        self._grow()
        tail = [*self.token_ids[-MAX_MATCH:], *beyond][-MAX_MATCH:]
        if len(tail) < MIN_MATCH:
            return []
        places = self._places.get((tail[-2], tail[-1]), ())
        return sorted(((self._match(tail, place), place) for place in places), reverse=True)

    def chain(self, num_tokens: int) -> tuple[list[int], float]:
        """Return (tokens, log-probability that each is right given those before it); no tokens if nothing matches.

        What runs past the end of the text goes on with itself, as a text that repeats does.
        """
        found = self.matches()
        if not found:
            return [], 0.0
        length, place = found[0]
        end, chain = len(self.token_ids), list[int]()
        for i in range(place, place + num_tokens):
            chain.append(self.token_ids[i] if i < end else chain[i - end])
        return chain, math.log(PREDICTED[length])

    def followers(self, beyond: Sequence[int], count: int) -> list[tuple[int, float]]:
        """Return up to `count` different (token, log-probability) that may follow the text and some tokens beyond it."""
        found: dict[int, float] = {}
        left = 1.0
        for length, place in self.matches(beyond):
            token = self.token_ids[place]
            if token not in found and len(found) < count:
                found[token] = math.log(max(PREDICTED[length] * left, 1e-6))
                left *= 1.0 - PREDICTED[length]
        return list(found.items())

    def _match(self, tail: Sequence[int], place: int) -> int:
        """Return how many tokens before a place agree with the tail."""
        length = MIN_MATCH
        while length < len(tail) and length < place and self.token_ids[place - 1 - length] == tail[-1 - length]:
            length += 1
        return length

    def _grow(self) -> None:
        """Index what has been appended."""
        tokens = self.token_ids
        for place in range(self._indexed, len(tokens)):
            places = self._places.setdefault((tokens[place - 2], tokens[place - 1]), [])
            places.append(place)
            del places[:-MAX_PLACES]
        self._indexed = max(self._indexed, len(tokens))
