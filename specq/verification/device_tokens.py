"""Drafted tokens that a device has chosen and the host has not read yet. A step may be launched with them.

In the host's arrays a *handle* stands for such a token. It is a negative number that encodes the token's place. A
handle never equals a token. So a node that is judged before its token was read is always rejected.

The tokens may be nodes of trees. The host then knows the depth of each node, but not its parent. Then any node one
level up stands for the parent (`DeviceLines`).
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
    """The lines of tree nodes, which are read together with the nodes' tokens.

    - `lines`: i32[levels, n] on the device. For each level, the node's ancestor at that level, or the node itself, as a
      place in its tree.
    - `size`: number of nodes of each tree.
    - `parents`: i32[n], once read: the parent's place in its tree. -1 at the first level.
    """

    lines: Any
    size: int
    parents: Int32Array | None = None

    def are_first(self, token_ids: Int32Array, counts: IntpArray) -> bool:
        """Return whether each session has the first nodes of its tree in order, or none.

        `counts`: number of nodes of each session.
        """
        unread = is_handle(token_ids)
        of_sessions = np.arange(len(counts)).repeat(counts)
        num_unread = np.bincount(of_sessions[unread], minlength=len(counts))
        if np.count_nonzero((num_unread != 0) & (num_unread != counts)):
            return False
        return bool(np.array_equal(places_of(token_ids[unread]) % self.size, places_in_runs(num_unread)))


@dataclass(eq=False, slots=True)
class DeviceTokens:
    """Tokens of one source, which are read once.

    - `tokens`: i32[n] on the device, valid tokens of the target. None if only the host knows them.
    - `values`: i32[n], the same on the host once they are read. -1 if they could not be read.
    - `tree`: the lines, if the parents of the nodes are unknown. A step has the first nodes of each tree, or all.
    - `awaiting`: functions to call with `values` when they are read.
    """

    tokens: Any
    values: Int32Array | None = None
    tree: DeviceLines | None = None
    awaiting: list[Callable[[Int32Array], object]] = field(default_factory=list)

    def read(self, values: Int32Array) -> None:
        """Store the values, and notify the waiting functions."""
        self.values = values
        for tell in self.awaiting:
            tell(values)


def handles(places: npt.NDArray[np.integer[Any]]) -> Int32Array:
    """Return the handles of the tokens at these places."""
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
    """Return tokens with a valid token of the vocabulary in place of each handle."""
    found: Int32Array = np.where(is_handle(token_ids), np.int32(0), token_ids)
    return found


def known_tokens(token_ids: Int32Array, drafted: DeviceTokens) -> Int32Array:
    """Return tokens with each handle replaced by its token."""
    assert drafted.values is not None, "drafted tokens are asked for before they were read"
    unread = is_handle(token_ids)
    known = token_ids.copy()
    known[unread] = drafted.values[places_of(token_ids[unread])]
    return known


def known_parents(parents: Int32Array, token_ids: Int32Array, drafted: DeviceTokens) -> Int32Array:
    """Return the parents of nodes with the values that have been read, given their tokens or handles."""
    if drafted.tree is None or drafted.tree.parents is None:
        return parents
    unread = is_handle(token_ids)
    known = parents.copy()
    known[unread] = drafted.tree.parents[places_of(token_ids[unread])]
    return known
