"""The shapes of a drafted tree: how many children each of its nodes gets.

A node is named by its path of ranks below the committed context: () is the context, (0, 2) the third child of its first
child. With `BestFirst` the drafter chooses what to expand. Other shapes are fixed in advance, for comparison and users
who know their workload. A shape only bounds what is drafted. The scheduler chooses which nodes are verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specq.protocol import Speculation

DEFAULT_DEPTH = 5  # depth of candidates
SYNC_NODES = 8  # budget of a best-first tree that is sent as a whole

Path = tuple[int, ...]


class DraftShape(Protocol):
    """The bounds of a tree."""

    @property
    def max_depth(self) -> int: ...

    @property
    def fan_out(self) -> int:
        """The maximum number of children of every node; 0 if it depends on the node."""
        ...

    def num_children(self, path: Path, *, hit: bool) -> int:
        """Return the maximum number of children of a node; `hit`: the context was drafted before it was committed."""
        ...


@dataclass(frozen=True, slots=True)
class BestFirst:
    """The same number of children everywhere."""

    max_depth: int
    fan_out: int

    def num_children(self, path: Path, *, hit: bool) -> int:
        return self.fan_out


@dataclass(frozen=True, slots=True)
class Candidates:
    """`num_candidates` chains that differ from the first token on."""

    max_depth: int
    num_candidates: int
    fan_out = 0

    def num_children(self, path: Path, *, hit: bool) -> int:
        return 1 if path else self.num_candidates


class StaticTree:
    """A tree given by its paths (Cai et al. 2024, "Medusa").

    The set of paths is closed: a path includes its prefixes, and a child includes its earlier siblings.
    """

    fan_out = 0

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self.max_depth = max(map(len, paths))
        self._counts: dict[Path, int] = {}
        for path in paths:
            for i, rank in enumerate(path):
                self._counts[path[:i]] = max(self._counts.get(path[:i], 0), rank + 1)

    def num_children(self, path: Path, *, hit: bool) -> int:
        return self._counts.get(path, 0)


@dataclass(frozen=True, slots=True)
class FixedFanOuts:
    """A chain of `depth` tokens with guesses for each place where it may fail, and a chain below each guess.

    This is the speculation cache of SSD ("Speculative Speculative Decoding") as part of the tree. Entry i is the number
    of children of chain node i; 0 is the context. There is one list after a hit and one after a miss.
    """

    depth: int
    after_hit: tuple[int, ...]
    after_miss: tuple[int, ...]
    fan_out = 0

    @property
    def max_depth(self) -> int:
        return 2 * self.depth + 1

    def num_children(self, path: Path, *, hit: bool) -> int:
        fork = next((i for i, rank in enumerate(path) if rank), None)
        if fork is not None:
            return 1 if len(path) - fork <= self.depth else 0
        if len(path) > self.depth:
            return 0
        counts = self.after_hit if hit else self.after_miss
        return max(1, counts[len(path)]) if len(path) < len(counts) else 1


def shape_of(speculation: Speculation, *, fan_out: int, max_ahead: int) -> DraftShape:
    """Return the shape that a job asks for; the drafter's own `fan_out` and `max_ahead` are the defaults."""
    depth = min(speculation.max_depth or max_ahead, max_ahead)
    if speculation.tree:
        return StaticTree(speculation.tree)
    if speculation.num_candidates:
        return Candidates(min(speculation.max_depth or DEFAULT_DEPTH, max_ahead), speculation.num_candidates)
    if speculation.fan_out_hit or speculation.fan_out_miss:
        chain = min(speculation.max_depth or DEFAULT_DEPTH, max_ahead)
        miss = speculation.fan_out_miss or speculation.fan_out_hit
        return FixedFanOuts(chain, speculation.fan_out_hit or miss, miss)
    return BestFirst(depth, fan_out)


def budget_of(speculation: Speculation) -> int:
    """Return how many nodes, the likeliest ones, are expanded and sent; 0: all that are likely enough."""
    grows_at_once = speculation.mode == "sync" and not speculation.has_fixed_shape
    return speculation.max_nodes or (SYNC_NODES if grows_at_once else 0)
