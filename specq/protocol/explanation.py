"""The fate of drafts in each round, for a job that asks for it: rejected nodes, and the times of rounds.

Rule: an explanation is a hint, as drafts are. No text depends on it, and the journal does not store it. Inconsistent
data is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from specq.protocol.arrays import Float32Array, Int32Array, UInt8Array
from specq.protocol.bounds import MAX_INT32
from specq.protocol.origins import ORIGIN_OF_LANE, ORIGINS

MAX_ROUNDS, MAX_REJECTED = 256, 4096  # kept per job; older ones are forgotten


class RejectedDraft(NamedTuple):
    """A draft that was verified and not accepted.

    - `place`: the index of its position among the generated tokens, from 0.
    - `parent`: the index of its parent among the rejected drafts of its message. -1: the text before it.
    - `origin`: its source, a name of `ORIGINS`.
    - `accept_prob`: the predicted probability of its acceptance given its parent.
    """

    place: int
    token_id: int
    parent: int
    origin: str
    accept_prob: float


class RoundTime(NamedTuple):
    """The times of a round, in microseconds.

    - `place`: the place of its first token.
    - `step_us`: the duration of the step.
    - `wait_us`: how long its oldest draft had waited.
    """

    place: int
    step_us: int
    wait_us: int


class CarriesNodes(Protocol):
    """A `Verdict`: see there."""

    @property
    def us(self) -> tuple[int, ...]: ...
    @property
    def mask(self) -> UInt8Array: ...
    @property
    def node_lanes(self) -> UInt8Array: ...
    @property
    def node_tokens(self) -> Int32Array: ...
    @property
    def node_parents(self) -> Int32Array: ...
    @property
    def node_probs(self) -> Float32Array: ...


class CarriesRejected(Protocol):
    """A `Tokens`: see there."""

    @property
    def rounds(self) -> Int32Array: ...
    @property
    def rejected(self) -> Int32Array: ...
    @property
    def rejected_probs(self) -> Float32Array: ...


class Explanation:
    """The latest rounds of one job."""

    __slots__ = ("_num_rejected", "_rounds")

    def __init__(self) -> None:
        self._rounds: deque[tuple[RoundTime, list[RejectedDraft]]] = deque()
        self._num_rejected = 0

    def add(self, verdict: CarriesNodes, place: int) -> None:
        """Add a round whose first token has this place."""
        rejected = rejected_of(verdict, place)
        self._rounds.append((RoundTime(place, *(min(us, MAX_INT32) for us in verdict.us or (0, 0))), rejected))
        self._num_rejected += len(rejected)
        while len(self._rounds) > MAX_ROUNDS or self._num_rejected > MAX_REJECTED:
            self._num_rejected -= len(self._rounds.popleft()[1])

    def arrays(self, start: int, end: int) -> dict[str, Any]:
        """Return the fields of `Tokens` for the rounds that begin at places in [start, end)."""
        wanted = [one for one in self._rounds if start <= one[0].place < end]
        if not wanted:
            return {}
        rows, probs = list[tuple[int, int, int, int]](), list[float]()
        for _, rejected in wanted:
            first = len(rows)
            rows += [_row(draft, first) for draft in rejected]
            probs += [draft.accept_prob for draft in rejected]
        return {
            "rounds": np.array([time for time, _ in wanted], np.int32).reshape(-1),
            "rejected": np.array(rows, np.int32).reshape(-1),
            "rejected_probs": np.array(probs, np.float32),
        }

    def clear(self) -> None:
        """Forget all rounds."""
        self._rounds.clear()
        self._num_rejected = 0


def _row(draft: RejectedDraft, first: int) -> tuple[int, int, int, int]:
    parent = draft.parent + first if draft.parent >= 0 else -1
    return draft.place, draft.token_id, parent, ORIGINS.index(draft.origin)


def rejected_of(verdict: CarriesNodes, place: int) -> list[RejectedDraft]:
    """Return the rejected nodes of a verdict, or an empty list if its node arrays do not fit together."""
    mask, parents = verdict.mask.tolist(), verdict.node_parents.tolist()
    said = verdict.node_tokens, verdict.node_parents, verdict.node_probs, verdict.node_lanes
    if any(len(values) != len(mask) for values in said) or not _come_first(parents):
        return []
    origins = ORIGIN_OF_LANE[verdict.node_lanes].tolist()
    found, places, depths = list[RejectedDraft](), dict[int, int](), list[int]()
    nodes = zip(mask, parents, verdict.node_tokens.tolist(), origins, verdict.node_probs.tolist(), strict=True)
    for node, (is_accepted, parent, token, origin, prob) in enumerate(nodes):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        if not is_accepted:
            places[node] = len(found)
            found.append(RejectedDraft(place + depths[node], token, places.get(parent, -1), ORIGINS[origin], prob))
    return found


def read_rejected(message: CarriesRejected) -> tuple[tuple[RejectedDraft, ...], tuple[RoundTime, ...]]:
    """Return a message's rejected drafts and round times. Both are empty if its arrays do not fit together."""
    if not (message.rejected.size or message.rejected_probs.size or message.rounds.size):
        return (), ()
    rows, probs, times = message.rejected.tolist(), message.rejected_probs.tolist(), message.rounds.tolist()
    if len(rows) != 4 * len(probs) or len(times) % 3 or min([*rows[::4], *rows[1::4], *times], default=0) < 0:
        return (), ()
    if not _come_first(rows[2::4]) or not all(0 <= code < len(ORIGINS) for code in rows[3::4]):
        return (), ()
    columns = zip(rows[::4], rows[1::4], rows[2::4], rows[3::4], probs, strict=True)
    rejected = [
        RejectedDraft(place, token, parent, ORIGINS[code], prob) for place, token, parent, code, prob in columns
    ]
    return tuple(rejected), tuple(map(RoundTime, times[::3], times[1::3], times[2::3]))


def _come_first(parents: Iterable[int]) -> bool:
    return all(-1 <= parent < place for place, parent in enumerate(parents))
