"""Compute how many more tokens fit into KV memory that is allocated in blocks. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specq.protocol import IntpArray

BLOCKS_AHEAD = 2  # that a session gets before it needs them; the second one costs half as much host time


def free_slots(num_free: int, block_size: int, slacks: IntpArray) -> int:
    """Return the most tokens that always fit, however they are divided among sessions.

    `num_free` blocks are free. Session i has room for slacks[i] tokens in its own blocks, i64[n]. One token beyond a
    session's slack takes a block. Each further `block_size` tokens take another block. The result is one less than the
    smallest number of tokens that may not fit.
    """
    if len(slacks) > num_free + 1:  # the sessions with the least slack already take one block too many
        slacks = np.partition(slacks, num_free)[: num_free + 1]
    return Slacks.of(block_size, slacks).free_slots(num_free)


def next_to_grow(slacks: IntpArray, block_size: int, most: int) -> IntpArray:
    """Return the places of the at most `most` sessions that need their next block soonest, i64[any].

    slacks: i64[n], as in `free_slots`. Sessions with room for a whole block are left out.
    """
    near: IntpArray = (slacks < block_size).nonzero()[0]
    return near[slacks[near].argsort(kind="stable")[:most]]


@dataclass(slots=True)
class Slacks:
    """The summary of session slacks that `free_slots` needs. Sessions can be added.

    It is valid while `count` <= free blocks + 1.

    - least: the least slack.
    - num_saved: tokens saved because first blocks cost less than `block_size` each.
    """

    block_size: int
    count: int
    least: int
    num_saved: int

    @classmethod
    def of(cls, block_size: int, slacks: IntpArray) -> Slacks:
        """Return the summary for sessions with these slacks, i64[n]."""
        count = len(slacks)
        num_saved = int(np.maximum(block_size - 1 - slacks, 0).sum())
        return cls(block_size, count, int(slacks.min()) if count else 0, num_saved)

    def add(self, slack: int) -> None:
        """Add another session."""
        self.least = min(self.least, slack) if self.count else slack
        self.count += 1
        self.num_saved += max(self.block_size - 1 - slack, 0)

    def free_slots(self, num_free: int) -> int:
        """Return the result of the function `free_slots` for these sessions."""
        assert self.count <= num_free + 1
        if not self.count:
            return num_free * self.block_size
        return num_free * self.block_size + max(self.least, self.block_size - 1) - self.num_saved
