"""How long draft workers take to answer verdicts. No clock: times are given."""

from __future__ import annotations

import math

MOST_S = 1.0  # an answer that takes longer is waited for no more


class RoundTrips:
    """How long drafts take to answer verdicts: of one commit at a time it is noted when the first draft comes that
    knows of it."""

    def __init__(self) -> None:
        self._session_id, self._length, self._at = -1, 0, -math.inf

    def commit(self, session_id: int, length: int, now: float) -> None:
        """Note a commit of a session that is drafted for, up to this length, unless another waits for its answer."""
        if self._session_id < 0 or now - self._at > MOST_S:
            self._session_id, self._length, self._at = session_id, length, now

    def answer(self, session_id: int, base_len: int, now: float) -> float | None:
        """Take in a draft below so many tokens; return the seconds since the commit that it answers, if it is the
        first."""
        if session_id != self._session_id or base_len < self._length:
            return None
        self._session_id = -1
        return now - self._at
