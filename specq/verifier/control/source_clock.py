"""What each source of drafts took, step by step: the seconds in which it was waited for, and those of its rows; and
what it brought."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from specq.protocol import LANES, LEAST_OWN_LANE, REMOTE, Int64Array, UInt8Array
from specq.verifier.control.source_yields import Yield
from specq.verifier.control.step_curve import StepCurve
from specq.verifier.step.commit import Rounds

LANES_OF = {REMOTE: slice(LEAST_OWN_LANE)} | {name: slice(lane, lane + 1) for name, lane in LANES.items()}
NO_NODES: Int64Array = np.zeros((256, 2), np.int64)


def by_lane(lanes: UInt8Array, is_accepted: UInt8Array) -> Int64Array:
    """Return i64[256, 2]: verified and accepted nodes of each lane."""
    accepted = np.bincount(lanes[is_accepted.astype(bool)], minlength=256)
    return np.stack([np.bincount(lanes, minlength=256), accepted], 1)


class SourceClock:
    """Seconds and scratch rows of each source since the last step was taken in."""

    def __init__(self, names: Iterable[str]) -> None:
        self._seconds = dict.fromkeys(names, 0.0)
        self._num_scratch = dict.fromkeys(self._seconds, 0)

    @contextmanager
    def of(self, name: str, clock: Callable[[], float] | None) -> Iterator[None]:
        """Count what a source takes meanwhile; without a clock nothing."""
        started = clock() if clock is not None else 0.0
        yield
        if clock is not None:
            self.add(name, clock() - started)

    def add(self, name: str, seconds: float, num_scratch: int = 0) -> None:
        """Count seconds and scratch rows of a source."""
        self._seconds[name] += seconds
        self._num_scratch[name] += num_scratch

    def yields(self, rounds: Rounds, num_rows: int, curve: StepCurve) -> dict[str, Yield]:
        """Return what each source took and brought in a step of so many rows, and begin anew."""
        judged = by_lane(rounds.lanes, rounds.is_accepted) if len(rounds.lanes) else NO_NODES
        nodes = {
            name: judged[own].sum(0).tolist() if name in self._seconds else (0, 0) for name, own in LANES_OF.items()
        }
        rows = {name: count + nodes.get(name, (0, 0))[0] for name, count in self._num_scratch.items()}
        num_more = sum(rows.values())
        row_s = (curve.profiled(num_rows) - curve.profiled(num_rows - num_more)) / num_more if num_more else 0.0
        found = {
            name: Yield(seconds + rows[name] * row_s, nodes.get(name, (0, 0))[1])
            for name, seconds in self._seconds.items()
        }
        for name in self._seconds:
            self._seconds[name], self._num_scratch[name] = 0.0, 0
        return found
