"""Drafted tokens that a device has chosen and the host has not read yet: a step may be launched with them.

In the host's arrays a *handle* stands for such a token: a negative number that says its place among them. No handle
equals a token, so what is judged before its token was read is rejected, never accepted.

They may be the nodes of trees of which the host knows how deep each node stands, not below which other: then some node
one level up stands for its parent (`DeviceLines`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from specq.protocol import BoolArray, Int32Array, Int64Array, IntpArray
from specq.verification.judgements import places_in_runs

NO_TOKEN = -1
FIRST_HANDLE = NO_TOKEN - 1


@dataclass(eq=False, slots=True)
class DeviceLines:
    """Lines of the nodes of trees, which are read when their tokens are.

    lines    i32[levels, n] on the device: the node above each, or itself, at each level, as a place in its tree
    size     the nodes of each tree
    parents  i32[n]: of each its parent's place in its tree, -1 at the first level, once it is read
    """

    lines: Any
    size: int
    parents: Int32Array | None = None

    def are_first(self, token_ids: Int32Array, counts: IntpArray) -> bool:
        """Return whether the nodes of sessions, so many of each, are the first ones of its tree, as they stand there,
        or none of them."""
        unread = is_handle(token_ids)
        of_sessions = np.arange(len(counts)).repeat(counts)
        num_unread = np.bincount(of_sessions[unread], minlength=len(counts))
        if np.count_nonzero((num_unread != 0) & (num_unread != counts)):
            return False
        return bool(np.array_equal(places_of(token_ids[unread]) % self.size, places_in_runs(num_unread)))


@dataclass(eq=False, slots=True)
class DeviceTokens:
    """Tokens of one source, which are read once.

    tokens   i32[n] on the device, each of them one of the target's; None where they are known on the host alone
    values   i32[n], the same on the host once they are read; -1 where they could not be
    tree     where they are nodes of which the parents are not known: their lines. Of each tree a step has the first
             nodes, or all
    awaiting called with `values` when they are read
    """

    tokens: Any
    values: Int32Array | None = None
    tree: DeviceLines | None = None
    awaiting: list[Callable[[Int32Array], object]] = field(default_factory=list)

    def read(self, values: Int32Array) -> None:
        """Take in what was read."""
        self.values = values
        for tell in self.awaiting:
            tell(values)


def handles(places: npt.NDArray[np.integer[Any]]) -> Int32Array:
    """Return what stands for the tokens at these places."""
    found: Int32Array = (FIRST_HANDLE - places).astype(np.int32)
    return found


def is_handle(token_ids: Int32Array) -> BoolArray:
    """Return which of some tokens are handles."""
    found: BoolArray = token_ids <= FIRST_HANDLE
    return found


def places_of(found: Int32Array) -> Int64Array:
    """Return the places that handles stand for, i64."""
    return np.int64(FIRST_HANDLE) - found


def without_handles(token_ids: Int32Array) -> Int32Array:
    """Return tokens with some token of the vocabulary in the place of each handle."""
    found: Int32Array = np.where(is_handle(token_ids), np.int32(0), token_ids)
    return found


def known_tokens(token_ids: Int32Array, drafted: DeviceTokens) -> Int32Array:
    """Return tokens with those in place that handles stand for."""
    assert drafted.values is not None, "drafted tokens are asked for before they were read"
    unread = is_handle(token_ids)
    known = token_ids.copy()
    known[unread] = drafted.values[places_of(token_ids[unread])]
    return known


def known_parents(parents: Int32Array, token_ids: Int32Array, drafted: DeviceTokens) -> Int32Array:
    """Return the parents of nodes with those in place that have been read, given their tokens or handles."""
    if drafted.tree is None or drafted.tree.parents is None:
        return parents
    unread = is_handle(token_ids)
    known = parents.copy()
    known[unread] = drafted.tree.parents[places_of(token_ids[unread])]
    return known
