"""How many more tokens fit into KV memory that is handed out in blocks. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence


def free_slots(num_free: int, block_size: int, slacks: Sequence[int]) -> int:
    """Return the most tokens that fit however they are divided among sessions.

    `num_free` blocks are free; session i has room for slacks[i] tokens in its own blocks. One token beyond a session's
    slack takes a block, and so does each `block_size` more; the answer is one less than the fewest that take too many.
    """
    if not slacks:
        return num_free * block_size
    cheapest, *others = sorted(slack + 1 for slack in slacks)
    further = [min(cost, block_size) for cost in others[:num_free]]
    return cheapest + sum(further) + block_size * (num_free - len(further)) - 1
