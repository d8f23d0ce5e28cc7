"""How many more tokens fit into KV memory that is handed out in blocks. Pure arithmetic."""

from __future__ import annotations

import numpy as np

from specq.protocol import IntpArray


def free_slots(num_free: int, block_size: int, slacks: IntpArray) -> int:
    """Return the most tokens that fit however they are divided among sessions.

    `num_free` blocks are free; session i has room for slacks[i] tokens in its own blocks, i64[n]. One token beyond a session's
    slack takes a block, and so does each `block_size` more; the answer is one less than the fewest that take too many.
    """
    if not len(slacks):
        return num_free * block_size
    costs = np.sort(slacks) + 1
    further = np.minimum(costs[1 : 1 + num_free], block_size)
    return int(costs[0] + further.sum()) + block_size * (num_free - len(further)) - 1
