"""What a drafter has learned over all its sessions: how good its proposer is, and whether drafting is of use."""

from __future__ import annotations

from dataclasses import dataclass, field

from specq.verification import Calibration

MAX_MISSES = 5  # after this many misses in a row, one pass is made every 2**5 verdicts


@dataclass(slots=True)
class AcceptanceStats:
    """The statistics of sessions of one kind.

    A miss is a pass that found nothing likely enough to be sent; `num_misses` counts those in a row. `is_silenced`: whether the newest
    verdict asked for more than any node can promise.
    """

    calibration: Calibration = field(default_factory=Calibration)
    num_misses: int = 0
    is_silenced: bool = False

    def count_pass(self, *, is_miss: bool) -> int:
        """Count a pass; return the backoff."""
        self.num_misses = min(self.num_misses + 1, MAX_MISSES) if is_miss else 0
        return self.backoff

    @property
    def backoff(self) -> int:
        """How many verdicts to wait for before the next pass: none after a good one, about twice as many after each miss."""
        return int(2**self.num_misses) - 1
