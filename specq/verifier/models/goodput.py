"""The rule for every choice about drafts and their verification: the most expected tokens per expected second."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specq.protocol import Float64Array


def best_by_goodput(tokens: npt.ArrayLike, seconds: npt.ArrayLike) -> tuple[int, float]:
    """Return the index of the choice with the most tokens a second (the first of equals), and its tokens a second."""
    goodput: Float64Array = np.asarray(tokens, np.float64) / np.asarray(seconds, np.float64)
    best = int(np.argmax(goodput))
    return best, float(goodput[best])
