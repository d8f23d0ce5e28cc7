"""The rule by which everything is chosen that drafts or verifies: most expected tokens by expected seconds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specq.protocol import Float64Array


def best_by_goodput(tokens: npt.ArrayLike, seconds: npt.ArrayLike) -> tuple[int, float]:
    """Return which of some choices brings most tokens a second, the first of several, and how many."""
    goodput: Float64Array = np.asarray(tokens, np.float64) / np.asarray(seconds, np.float64)
    best = int(np.argmax(goodput))
    return best, float(goodput[best])
