"""The seconds of a forward pass on a CPU, as expected before any pass has run.

A pass reads all weights once, and multiplies each weight with every row. The slower of the two sets its time. The rates
are those of a core of a server of 2023, so the result may be wrong by a factor of two. Steps in service correct it
(`specq.verifier.models.step_time`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BYTES_S, MOST_BYTES_S = 18e9, 40e9  # bytes a second of a thread, and of all
FLOATS_S, INTEGERS_S = 45e9, 130e9  # multiplications a second of a thread
SHARPNESS = 4  # of the change from reading to multiplying; with infinity the slower of the two is the time


class PassWork(NamedTuple):
    """What a pass does.

    - num_bytes: bytes of the weights that it reads.
    - num_weights: multiplications of each row.
    - is_integer: whether products are those of integers.
    """

    num_bytes: int
    num_weights: int
    is_integer: bool = False

    def seconds(self, num_rows: Sequence[int], num_threads: int) -> list[float]:
        """Return the expected seconds of a pass for each number of rows."""
        reading_s = self.num_bytes / min(BYTES_S * num_threads, MOST_BYTES_S)
        row_s = self.num_weights / ((INTEGERS_S if self.is_integer else FLOATS_S) * num_threads)
        multiplying_s = row_s * np.array(num_rows, np.float64)
        found: list[float] = ((reading_s**SHARPNESS + multiplying_s**SHARPNESS) ** (1 / SHARPNESS)).tolist()
        return found
