"""How many more tokens fit into KV memory that is handed out in blocks. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specq.protocol import IntpArray


def free_slots(num_free: int, block_size: int, slacks: IntpArray) -> int:
    """Return the most tokens that fit however they are divided among sessions.

    `num_free` blocks are free; session i has room for slacks[i] tokens in its own blocks, i64[n]. One token beyond a
        session's
    slack takes a block, and so does each `block_size` more; the answer is one less than the fewest that take too many.
    """
    if len(slacks) > num_free + 1:  # one block too many is taken by the sessions with the least slack
        slacks = np.partition(slacks, num_free)[: num_free + 1]
    return Slacks.of(block_size, slacks).free_slots(num_free)


@dataclass(slots=True)
class Slacks:
    """What of sessions' slacks is needed for `free_slots` while as many blocks are free as there are sessions, less
    one. Sessions can be added.

    least      the least slack
    num_saved  by how many tokens the first blocks of all sessions cost less than `block_size` each
    """

    block_size: int
    count: int
    least: int
    num_saved: int

    @classmethod
    def of(cls, block_size: int, slacks: IntpArray) -> Slacks:
        """Return them for sessions with these slacks, i64[n]."""
        count = len(slacks)
        num_saved = int(np.maximum(block_size - 1 - slacks, 0).sum())
        return cls(block_size, count, int(slacks.min()) if count else 0, num_saved)

    def add(self, slack: int) -> None:
        """Take in another session."""
        self.least = min(self.least, slack) if self.count else slack
        self.count += 1
        self.num_saved += max(self.block_size - 1 - slack, 0)

    def free_slots(self, num_free: int) -> int:
        """Return what the function of this name does."""
        assert self.count <= num_free + 1
        if not self.count:
            return num_free * self.block_size
        return num_free * self.block_size + max(self.least, self.block_size - 1) - self.num_saved
