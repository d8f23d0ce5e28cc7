"""Open sessions as arrays, so that steps handle a single session only on changes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.protocol import BoolArray, EngineError, Int32Array, IntpArray
from specq.verification import Judgements, StepBatch, places_in_runs

FIRST_PLACES = 64
FIRST_UNSAID = 32  # of a session: its request receives the tokens when it needs another block
ARRAYS = ("computed", "lengths", "rooms", "last_tokens", "is_taken", "openings", "unsaid", "num_unsaid")


class SessionTable:
    """The state of open sessions, by place. After a session ends, another one may use its place.

    - computed: i64[places], tokens that have KV, including those of steps in flight.
    - lengths: i64[places], tokens of the transcript, including one that is not known yet.
    - rooms: i64[places], tokens that fit into the session's blocks of KV memory.
    - last_tokens: i32[places], the transcript's last token that the host knows.
    - is_taken: bool[places], whether the place has a session.
    - openings: i64[places], running number of the session's opening. A free place keeps the number of its last session.
    - unsaid: i32[places, any], tokens of the transcript that vLLM's request has not received yet.
    - num_unsaid: i64[places], the number of these tokens.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._free: list[int] = []
        self.computed: IntpArray = np.zeros(0, np.intp)
        self.lengths: IntpArray = np.zeros(0, np.intp)
        self.rooms: IntpArray = np.zeros(0, np.intp)
        self.last_tokens: Int32Array = np.zeros(0, np.int32)
        self.is_taken: BoolArray = np.zeros(0, np.bool_)
        self.openings: IntpArray = np.zeros(0, np.intp)
        self.unsaid: Int32Array = np.zeros((0, FIRST_UNSAID), np.int32)
        self.num_unsaid: IntpArray = np.zeros(0, np.intp)
        self._num_opened = 0

    def __contains__(self, session_id: int) -> bool:
        return session_id in self._places

    def add(self, session_id: int, token_ids: Int32Array, num_computed: int, room: int) -> int:
        """Add a new session with this transcript; return its place."""
        assert session_id not in self._places
        if not self._free:
            self._grow()
        place = self._places[session_id] = self._free.pop()
        self.computed[place], self.rooms[place], self.last_tokens[place] = num_computed, room, token_ids[-1]
        self.lengths[place] = len(token_ids)
        self.openings[place] = self._num_opened = self._num_opened + 1
        self.is_taken[place], self.num_unsaid[place] = True, 0
        return place

    def remove(self, session_id: int) -> int | None:
        """Forget a session; return its place, None if it is unknown."""
        place = self._places.pop(session_id, None)
        if place is not None:
            self.is_taken[place] = False
            self._free.append(place)
        return place

    def find(self, session_ids: Sequence[int]) -> IntpArray:
        """Return the places of sessions, i64[n]. Raises EngineError for one that is not open."""
        try:
            return np.array([self._places[session_id] for session_id in session_ids], np.intp)
        except KeyError as error:
            raise EngineError(f"session {error.args[0]} is not open") from None

    def are_open(self, places: IntpArray, openings: IntpArray) -> BoolArray:
        """Return bool[n]: which sessions are still open, given by their places and openings."""
        found: BoolArray = self.is_taken[places] & (self.openings[places] == openings)
        return found

    def take_unsaid(self, place: int) -> list[int]:
        """Return the tokens that a session's request has not received. Mark them as sent."""
        found: list[int] = self.unsaid[place, : self.num_unsaid[place]].tolist()
        self.num_unsaid[place] = 0
        return found

    def slacks(self) -> IntpArray:
        """Return how many more tokens fit into the blocks of each open session, i64[n]."""
        found: IntpArray = (self.rooms - self.computed)[self.is_taken]
        return found

    @property
    def num_pending(self) -> int:
        """Return how many tokens of open sessions have no KV yet."""
        return int((self.lengths - self.computed)[self.is_taken].sum())

    def are_next(self, batch: StepBatch, places: IntpArray) -> BoolArray:
        """Return bool[n]: which steps are judged and compute only their last token, as most do."""
        are_next: BoolArray = batch.is_judged & (batch.num_tokens == 1) & (batch.base_lens == self.lengths[places])
        at = are_next.nonzero()[0]
        is_last = batch.token_ids[(batch.ends - batch.sizes)[at]] == self.last_tokens[places[at]]
        if batch.fed_by is not None:
            is_last |= batch.fed_by[at] >= 0
        are_next[at] = is_last
        return are_next

    def launch(self, batch: StepBatch, places: IntpArray, *, feeds: bool) -> None:
        """Record what a step computes. If it feeds the next step, each judged session also gets one token."""
        self.computed[places] += batch.num_tokens
        self.lengths[places[batch.is_judged]] += feeds

    def revert(self, batch: StepBatch, places: IntpArray, is_open: BoolArray, *, feeds: bool) -> None:
        """Undo `launch` for the sessions that are still open, bool[n]."""
        self.computed[places[is_open]] -= batch.num_tokens[is_open]
        self.lengths[places[is_open & batch.is_judged]] -= feeds

    def commit(
        self, batch: StepBatch, places: IntpArray, is_open: BoolArray, judgements: Judgements, *, feeds: bool
    ) -> None:
        """Record the tokens of a launched step, for sessions that are still open.

        There is one judgement for each judged step, in order.
        """
        kept = is_open[batch.is_judged]
        judged, num_tokens = places[batch.is_judged][kept], judgements.num_tokens[kept]
        self.computed[judged] += np.maximum(num_tokens - 1, 0)  # the correction has no KV yet
        self.lengths[judged] += num_tokens - feeds
        self._note_said(judged, num_tokens, judgements.token_ids[kept.repeat(judgements.num_tokens)])
        has_said = num_tokens > 0
        lasts = judgements.num_tokens.cumsum()[kept][has_said] - 1
        self.last_tokens[judged[has_said]] = judgements.token_ids[lasts]

    def _note_said(self, places: IntpArray, counts: IntpArray, token_ids: Int32Array) -> None:
        """Keep the sessions' new tokens for their requests: counts i64[n] of each, token_ids i32[all]."""
        at, of_each = self.num_unsaid[places], places
        ends = self.num_unsaid[places] = at + counts
        more = int(ends.max(initial=0)) - self.unsaid.shape[1]
        if more > 0:
            self.unsaid = np.pad(self.unsaid, ((0, 0), (0, max(more, self.unsaid.shape[1]))))
        if len(token_ids) != len(places) or not counts.all():
            at, of_each = at.repeat(counts) + places_in_runs(counts), places.repeat(counts)
        self.unsaid[of_each, at] = token_ids

    def _grow(self) -> None:
        size = len(self.computed)
        more = max(FIRST_PLACES, size)
        for name in ARRAYS:
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)]))
        self._free = list(range(size + more - 1, size - 1, -1))
