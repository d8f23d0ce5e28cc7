"""What a drafter has learned over all its sessions."""

from __future__ import annotations

from dataclasses import dataclass, field

from specq.drafting.calibration import Calibration

MOST_BARREN = 5  # after so many passes in vain, one is made every 2**5 verdicts


@dataclass(slots=True)
class AcceptanceStats:
    """What a drafter has learned over all its sessions: how good its proposer is, and whether drafting is of use.

    num_barren counts the passes in a row that found nothing worth sending.
    """

    calibration: Calibration = field(default_factory=Calibration)
    num_misses: int = 0

    def count(self, *, fruitful: bool) -> int:
        """Count a pass; return how many verdicts to sit out: none after a good one, else twice as many each time."""
        self.num_misses = 0 if fruitful else min(self.num_misses + 1, MOST_BARREN)
        return self.rest

    @property
    def rest(self) -> int:
        return int(2**self.num_misses) - 1
