"""Open sessions as arrays, so that a step of many asks each only for what differs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.protocol import BoolArray, EngineError, Int32Array, IntpArray
from specq.verification import Judgements, StepBatch

FIRST_PLACES = 64


class SessionTable:
    """What is known of open sessions, by place. A place is another session's once its own has ended.

    computed     i64[places]: tokens that have KV, or will have it when the steps in flight are done
    lengths      i64[places]: tokens of the transcript, one that is not known yet included; num_prompt i64[places]: those of them that the session was opened with
    rooms        i64[places]: tokens that fit into the blocks of KV memory that the session holds
    last_tokens  i32[places]: the transcript's last token that the host knows
    is_taken     bool[places]: a session is there
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._free: list[int] = []
        self.computed: IntpArray = np.zeros(0, np.intp)
        self.lengths: IntpArray = np.zeros(0, np.intp)
        self.num_prompt: IntpArray = np.zeros(0, np.intp)
        self.rooms: IntpArray = np.zeros(0, np.intp)
        self.last_tokens: Int32Array = np.zeros(0, np.int32)
        self.is_taken: BoolArray = np.zeros(0, np.bool_)

    def __contains__(self, session_id: int) -> bool:
        return session_id in self._places

    def add(self, session_id: int, token_ids: Int32Array, num_computed: int, room: int) -> int:
        """Take in a session with this transcript, which is not there yet; return its place."""
        assert session_id not in self._places
        if not self._free:
            self._grow()
        place = self._places[session_id] = self._free.pop()
        self.computed[place], self.rooms[place], self.last_tokens[place] = num_computed, room, token_ids[-1]
        self.lengths[place] = self.num_prompt[place] = len(token_ids)
        self.is_taken[place] = True
        return place

    def remove(self, session_id: int) -> int | None:
        """Forget a session; return the place that it had, None if it is unknown."""
        place = self._places.pop(session_id, None)
        if place is not None:
            self.is_taken[place] = False
            self._free.append(place)
        return place

    def find(self, session_ids: Sequence[int]) -> IntpArray:
        """Return the places of sessions, i64[n]; EngineError for one that is not open."""
        try:
            return np.array([self._places[session_id] for session_id in session_ids], np.intp)
        except KeyError as error:
            raise EngineError(f"session {error.args[0]} is not open") from None

    def slacks(self) -> IntpArray:
        """Return how many more tokens fit into the blocks of each open session, i64[n]."""
        found: IntpArray = (self.rooms - self.computed)[self.is_taken]
        return found

    def are_next(self, batch: StepBatch, places: IntpArray) -> BoolArray:
        """Return bool[n]: which steps are judged and compute their transcript's last token alone, as most do."""
        are_next: BoolArray = batch.is_judged & (batch.num_tokens == 1) & (batch.base_lens == self.lengths[places])
        at = are_next.nonzero()[0]
        is_last = batch.token_ids[(batch.ends - batch.sizes)[at]] == self.last_tokens[places[at]]
        if batch.fed_by is not None:
            is_last |= batch.fed_by[at] >= 0
        are_next[at] = is_last
        return are_next

    def launch(self, batch: StepBatch, places: IntpArray, *, feeds: bool) -> None:
        """Note what a step computes, and, if it feeds the next one, that each judged session says one token."""
        self.computed[places] += batch.num_tokens
        self.lengths[places[batch.is_judged]] += feeds

    def revert(self, batch: StepBatch, places: IntpArray, is_open: BoolArray, *, feeds: bool) -> None:
        """Forget what `launch` has noted of those sessions that are open still, bool[n]."""
        self.computed[places[is_open]] -= batch.num_tokens[is_open]
        self.lengths[places[is_open & batch.is_judged]] -= feeds

    def commit(
        self, batch: StepBatch, places: IntpArray, is_open: BoolArray, judgements: Judgements, *, feeds: bool
    ) -> None:
        """Note what was said in a step that was launched, by those that are open still: one judgement for each judged step, in order."""
        kept = is_open[batch.is_judged]
        judged, num_tokens = places[batch.is_judged][kept], judgements.num_tokens[kept]
        self.computed[judged] += np.maximum(num_tokens - 1, 0)  # the correction has no KV yet
        self.lengths[judged] += num_tokens - feeds
        has_said = num_tokens > 0
        lasts = judgements.num_tokens.cumsum()[kept][has_said] - 1
        self.last_tokens[judged[has_said]] = judgements.token_ids[lasts]

    def _grow(self) -> None:
        size = len(self.computed)
        more = max(FIRST_PLACES, size)
        for name in ("computed", "lengths", "num_prompt", "rooms", "last_tokens", "is_taken"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(more, array.dtype)]))
        self._free = list(range(size + more - 1, size - 1, -1))
