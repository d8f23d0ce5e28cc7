"""The seconds of forward passes on a CPU, as expected from one pass.

A pass reads all weights once, and multiplies each weight with every row. The slower of the two sets its time. The rates
are those of a core of a server of 2023. Others are faster or slower at both. So the time of one pass scales the result.
Steps in service correct the rest (`specq.verifier.models.step_time`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MOST_BYTES_S = 40e9  # bytes a second of all threads


class _Rates(NamedTuple):
    """What a thread does in a second.

    - num_bytes: bytes that it reads, and expands if they are quantised.
    - num_products: multiplications.
    - sharpness: of the change from reading to multiplying. With infinity the slower of the two is the time.
    """

    num_bytes: float
    num_products: float
    sharpness: float


FLOATS, INTEGERS = _Rates(15e9, 48e9, 2.0), _Rates(18e9, 130e9, 4.0)


class PassWork(NamedTuple):
    """What a pass does.

    - num_bytes: bytes of the weights that it reads.
    - num_weights: multiplications of each row.
    - is_integer: whether products are those of integers.
    """

    num_bytes: int
    num_weights: int
    is_integer: bool = False

    def seconds(self, num_rows: Sequence[int], num_threads: int, one_row_s: float) -> list[float]:
        """Return the expected seconds of a pass for each number of rows, where one row takes `one_row_s`."""
        rates = INTEGERS if self.is_integer else FLOATS
        reading_s = self.num_bytes / min(rates.num_bytes * num_threads, MOST_BYTES_S)
        row_s = self.num_weights / (rates.num_products * num_threads)
        each = np.array([1, *num_rows], np.float64)
        times = (reading_s**rates.sharpness + (row_s * each) ** rates.sharpness) ** (1 / rates.sharpness)
        found: list[float] = (times[1:] * (one_row_s / times[0])).tolist()
        return found
