"""The seconds of each draft source in a step, and the results of its drafts.

The seconds are those in which the verifier waited for the source, and those of its scratch rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from specq.protocol import LANES, LEAST_OWN_LANE, REMOTE, Int64Array, UInt8Array
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.models.token_yield import NO_NODES, NUM_LEVELS, Judged
from specq.verifier.step.rounds import BIT_OF_LANE, Rounds

LANES_OF = {REMOTE: slice(LEAST_OWN_LANE)} | {name: slice(lane, lane + 1) for name, lane in LANES.items()}

BITS = {name: int(BIT_OF_LANE[lanes.start or 0]) for name, lanes in LANES_OF.items()}


def by_lane(lanes: UInt8Array, is_accepted: UInt8Array) -> Int64Array:
    """Return i64[256, 2]: verified and accepted nodes of each lane."""
    accepted = np.bincount(lanes[is_accepted.astype(bool)], minlength=256)
    return np.stack([np.bincount(lanes, minlength=256), accepted], 1)


def judged_of(rounds: Rounds, num_rounds: Mapping[str, int]) -> dict[str, Judged]:
    """Return the results of some sources' drafts. `num_rounds`: the number of sessions that each drafted for.

    A node that several sources have drafted counts for each of them.
    """
    if not len(rounds.nodes):
        return {name: Judged(count, NO_NODES, NO_NODES, NO_NODES) for name, count in num_rounds.items()}
    levels = np.minimum(rounds.levels, NUM_LEVELS - 1)
    places = np.arange(len(rounds)).repeat(rounds.num_nodes) * NUM_LEVELS + levels  # [nodes]
    by_any, by_all = int(np.bitwise_or.reduce(rounds.offers)), int(np.bitwise_and.reduce(rounds.offers))
    is_accepted, found = rounds.is_accepted.view(np.bool_), {}
    for name, count in num_rounds.items():
        bit = BITS.get(name, 0)
        if not by_any & bit:
            found[name] = Judged(count, NO_NODES, NO_NODES, NO_NODES)
            continue
        own = slice(None) if by_all & bit else (rounds.offers & bit).nonzero()[0]
        is_there = np.zeros((2, len(rounds), NUM_LEVELS), np.bool_)
        verified, accepted = is_there
        verified.ravel()[places[own]] = True
        accepted.ravel()[places[own][is_accepted[own]]] = True
        verified[:, 1:] &= accepted[:, :-1]
        nodes = np.bincount(levels[own], minlength=NUM_LEVELS).astype(np.float64)
        found[name] = Judged(count, nodes, *is_there.sum(1, dtype=np.float64))
    return found


class SourceClock:
    """Seconds and scratch rows of each source since the last `take`."""

    def __init__(self, names: Iterable[str]) -> None:
        self._seconds = dict.fromkeys(names, 0.0)
        self._num_scratch = dict.fromkeys(self._seconds, 0)

    @contextmanager
    def of(self, name: str, clock: Callable[[], float] | None) -> Iterator[None]:
        """Count the seconds of the block for a source; without a clock, count no time."""
        started = clock() if clock is not None else 0.0
        yield
        if clock is not None:
            self.add(name, clock() - started)

    def add(self, name: str, seconds: float, num_scratch: int = 0) -> None:
        """Add seconds and scratch rows to a source."""
        self._seconds[name] += seconds
        self._num_scratch[name] += num_scratch

    def take(self, num_rows: int, curve: StepCurve) -> dict[str, float]:
        """Return the seconds of each source, and start again from 0.

        They include the seconds of its scratch rows in a step of `num_rows` rows.
        """
        num_scratch = sum(self._num_scratch.values())
        row_s = (curve(num_rows) - curve(num_rows - num_scratch)) / num_scratch if num_scratch else 0.0
        found = {name: seconds + self._num_scratch[name] * row_s for name, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._num_scratch = dict.fromkeys(self._num_scratch, 0)
        return found
