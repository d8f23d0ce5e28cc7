"""Rows of an EAGLE-3 head in tensors: rows of texts, whose keys and values are kept, and levels of trees.

Trees leave nothing in the cache. This module neither waits for a device nor reads its values. So all of it may be
recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from specq.drafting.eagle3.levels import Level
from specq.drafting.eagle3.loading import EagleHead
from specq.drafting.eagle3.network import EagleNetwork
from specq.drafting.head_layers import attend_to
from specq.drafting.trees.cache import StateCache

# Logits [b, rows, columns] of a level, its number, the count -> tokens and log-probabilities, [b, rows, count] each.
Rank = Callable[[torch.Tensor, int, int], tuple[torch.Tensor, torch.Tensor]]


class TextRows(NamedTuple):
    """Rows of b texts, as a grid.

    places             [b]: the texts' places in the cache.
    states             [b, rows, hidden]: the state before each row's token.
    token_ids, positions   [b, rows].
    row_places, slots  [b, rows]: where each row is kept in the cache.
    is_seen            bool[b, rows, n]: which slots of its text each row sees, itself included.
    """

    places: torch.Tensor
    states: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    row_places: torch.Tensor
    slots: torch.Tensor
    is_seen: torch.Tensor


def compute_rows(network: EagleNetwork, cache: StateCache, rows: TextRows) -> torch.Tensor:
    """Compute rows and store their keys and values; return their output, [b, rows, hidden]."""

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int = 0) -> torch.Tensor:
        own = slice(layer * keys.shape[2], (layer + 1) * keys.shape[2])
        cache.write(rows.row_places.flatten(), rows.slots.flatten(), keys.flatten(0, 1), values.flatten(0, 1), own)
        return attend_to(queries, *cache.read(rows.places, rows.is_seen.shape[2], heads=own), rows.is_seen)

    rotations = network.rotations(rows.positions, rows.states.dtype)
    found: torch.Tensor = network(rows.states, rows.token_ids, rotations, attend, rows.positions)
    return found


class Roots(NamedTuple):
    """Contexts of b trees: places in the cache, lengths there, and the position of the token behind each, [b].

    They have at most `num_rows` rows.
    """

    places: torch.Tensor
    lengths: torch.Tensor
    ends: torch.Tensor
    num_rows: int


def grow(
    head: EagleHead, cache: StateCache, roots: Roots, levels: list[Level], rank: Rank, floor: float | None
) -> torch.Tensor:
    """Grow trees; return i32[4, b, n] of their nodes, ancestors first.

    The four values are tokens, parents, bits of log-probabilities and of cumulative ones. If the sizes of levels are
    given, the lines of the nodes follow, as in `DeviceNodes`: i32[4 + levels, b, n] in all.

    floor  growth stops where all further nodes would be less likely. This check waits for the device. None: all levels
           are computed.
    """
    trees = _Trees(head, cache, roots, sum(level.num_rows for level in levels[1:]))
    found = []
    for depth, level in enumerate(levels):
        tokens, scores = rank(trees.logits(), depth, level.num_ranked)
        nodes = trees.add(level, tokens.flatten(1), scores.flatten(1))
        if level.num_kept is not None:
            nodes = nodes.likeliest(level.num_kept)
        found.append(nodes.packed)
        if depth + 1 == len(levels):
            break
        chosen = nodes.choose(level, levels[depth + 1].num_rows)
        if floor is not None and float(nodes.reach.gather(1, chosen).max()) < floor:
            break
        trees.expand(nodes, chosen)
    nodes_of_all = torch.cat(found, 2)
    return nodes_of_all if levels[0].num_kept is None else torch.cat([nodes_of_all, _lines(nodes_of_all[1], levels)])


def _lines(parents: torch.Tensor, levels: list[Level]) -> torch.Tensor:
    """Return i32[levels, b, n]: the lines of nodes, given their parents i32[b, n]; see `DeviceNodes`."""
    found, first, num_levels = list[torch.Tensor](), 0, len(levels)
    for depth, level in enumerate(levels):
        own = torch.arange(first, first + level.num_nodes, dtype=torch.int32, device=parents.device)
        lines = own.expand(num_levels, len(parents), -1).clone()
        if depth:
            above = found[-1]
            places = parents[:, first : first + level.num_nodes].long() - (first - above.shape[2])
            lines[:depth] = above[:depth].gather(2, places.expand(depth, -1, -1))
        found.append(lines)
        first += level.num_nodes
    return torch.cat(found, 2)


class _Nodes(NamedTuple):
    """Nodes of a level: tokens, scores, reach, parents, and the rows before them, [b, n]."""

    tokens: torch.Tensor
    scores: torch.Tensor
    reach: torch.Tensor
    parents: torch.Tensor
    behind: torch.Tensor

    def likeliest(self, count: int) -> _Nodes:
        """Return the `count` likeliest nodes, likeliest first."""
        reach, which = self.reach.topk(count, 1)
        tokens, scores, parents, behind = (
            each.gather(1, which) for each in (self.tokens, self.scores, self.parents, self.behind)
        )
        return _Nodes(tokens, scores, reach, parents, behind)

    @property
    def packed(self) -> torch.Tensor:
        """The nodes as i32[4, b, n], in the order of `grow`."""
        bits = (self.scores.view(torch.int32), self.reach.view(torch.int32))
        return torch.stack([self.tokens, self.parents, *bits])

    def choose(self, level: Level, num_rows: int) -> torch.Tensor:
        """Return which nodes are expanded, i64[b, rows]: the likeliest, or those of the shape."""
        if level.num_kept is not None:
            return torch.arange(num_rows, device=self.reach.device).expand(len(self.reach), -1)
        if level.expanded is None:
            return self.reach.topk(num_rows, 1).indices
        expanded: torch.Tensor = level.expanded.expand(len(self.reach), -1)
        return expanded


class _Trees:
    """Trees that grow, with the rows of their last level."""

    def __init__(self, head: EagleHead, cache: StateCache, roots: Roots, num_more: int) -> None:
        """Begin at the roots. `num_more`: how many rows will be expanded in all."""
        num_more = -(-num_more // 8) * 8  # for kernels that need such lengths
        self._network, self._roots = head.network, roots
        self._keys, self._values = cache.read(roots.places, roots.num_rows, num_more)
        self._columns = torch.arange(roots.num_rows + num_more, device=roots.places.device)
        self._is_seen = (self._columns < roots.lengths[:, None])[:, None]  # [b, rows, n]
        self._states = cache.lasts(roots.places)[:, None]  # [b, rows, hidden]
        num_trees = len(roots.places)
        self._reach = self._states.new_zeros(num_trees, 1, dtype=torch.float32)
        self._nodes = torch.full((num_trees, 1), -1, dtype=torch.int32, device=self._states.device)
        self._first, self._num_rows, self._depth = 0, 0, 0  # nodes, rows and levels so far

    def logits(self) -> torch.Tensor:
        """Return the logits behind the rows, [b, rows, columns]."""
        return self._network.logits(self._states)

    def add(self, level: Level, tokens: torch.Tensor, scores: torch.Tensor) -> _Nodes:
        """Return the level's nodes, given all tokens ranked behind the rows, [b, rows * num_ranked]."""
        if level.columns is not None:
            tokens, scores = tokens.index_select(1, level.columns), scores.index_select(1, level.columns)
        reach = self._reach.index_select(1, level.behind) + scores
        behind = level.behind.expand(len(tokens), -1)
        return _Nodes(tokens, scores, reach, self._nodes.index_select(1, level.behind), behind)

    def expand(self, nodes: _Nodes, chosen: torch.Tensor) -> None:
        """Go one level down, below these nodes of the level, i64[b, rows]."""
        behind = nodes.behind.gather(1, chosen)
        self._reach, self._nodes = nodes.reach.gather(1, chosen), (self._first + chosen).to(torch.int32)
        self._first += nodes.tokens.shape[1]
        start, num_rows = self._roots.num_rows + self._num_rows, chosen.shape[1]
        self._num_rows += num_rows
        own = self._columns == torch.arange(start, start + num_rows, device=chosen.device)[:, None]
        self._is_seen = _rows_of(self._is_seen, behind) | own
        # Unknown tokens are clipped.
        tokens = nodes.tokens.gather(1, chosen).clamp(0, self._network.num_tokens - 1)
        positions = (self._roots.ends + (self._depth - 1))[:, None].expand_as(tokens)
        self._depth += 1

        def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            self._keys[:, :, start : start + num_rows] = keys.transpose(1, 2)
            self._values[:, :, start : start + num_rows] = values.transpose(1, 2)
            return attend_to(queries, self._keys, self._values, self._is_seen)

        states = _rows_of(self._states, behind)
        self._states = self._network(states, tokens, self._network.rotations(positions, states.dtype), attend)


def _rows_of(values: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Return rows [b, m, width] of values [b, rows, width], given their indices i64[b, m]."""
    if values.shape[1] == 1:
        return values.expand(-1, which.shape[1], -1)
    return values.gather(1, which[:, :, None].expand(-1, -1, values.shape[2]))
