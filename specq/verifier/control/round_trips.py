"""The seconds that draft workers take to answer verdicts. No clock: times are arguments."""

from __future__ import annotations

import math

MOST_S = 1.0  # seconds after which an answer is not awaited any longer


class RoundTrips:
    """The seconds from a commit to the first draft that knows it, measured for one commit at a time."""

    def __init__(self) -> None:
        self._session_id, self._length, self._at = -1, 0, -math.inf

    def commit(self, session_id: int, length: int, now: float) -> None:
        """Note a commit up to `length` tokens of a session with drafters, unless another commit awaits its answer."""
        if self._session_id < 0 or now - self._at > MOST_S:
            self._session_id, self._length, self._at = session_id, length, now

    def answer(self, session_id: int, base_len: int, now: float) -> float | None:
        """Return the seconds since the commit, if a draft behind `base_len` tokens is the first answer to it."""
        if session_id != self._session_id or base_len < self._length:
            return None
        self._session_id = -1
        return now - self._at
