"""What a verifier needs from a head that reads the target's hidden states of a text: whole trees, in arrays.

There are three kinds of trees. Best-first trees have the likeliest nodes that the head finds. Other trees have a given
shape. The third kind grows best first with a fixed number of nodes at each level. Then the depth of each node is known
in advance. So a step can be launched before the host has read the trees.

`specq.drafting.eagle3` and `specq.drafting.block` implement this interface. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from specq.drafting.interface import Pending
from specq.drafting.rank_trees import RankTree
from specq.protocol import Float32Array, Int32Array, IntpArray, SamplingParams
from specq.verifier.sources import Followed


class TreeRequest(NamedTuple):
    """Trees of one kind for some sessions.

    depth   how many levels they need. Best-first trees may have more.
    ranks   their shape. None: best first.
    floor   a log-probability. Best-first trees may leave out less likely nodes.
    level_sizes  for best-first trees, how many nodes are kept at each level, likeliest first, at any depth.
                 (): all nodes are kept.
    most    for best-first trees, how many nodes are wanted.
    """

    session_ids: Sequence[int]
    params: Sequence[SamplingParams]
    depth: int
    ranks: RankTree | None
    floor: float
    level_sizes: tuple[int, ...] = ()
    most: int = 0


class Grown(NamedTuple):
    """Nodes of m trees with n nodes each, parents before children.

    token_ids i32[m, n].
    scores  f32[m, n]: log-probabilities given the parent.
    reach   f32[m, n]: sum of the scores of a node and its ancestors. -inf: no node.
    parents i32[m, n]: indices among the tree's nodes. -1: the context.
    depths  i64[n]: the level of each node, from 0.
    """

    token_ids: Int32Array
    scores: Float32Array
    reach: Float32Array
    parents: Int32Array
    depths: IntpArray


class DeviceNodes(NamedTuple):
    """m trees of n nodes on the head's device, in the order of `Grown`.

    token_ids  i32[m, n]: each below `TreeHead.limit_vocab`.
    lines      i32[levels, m, n]: for each node its ancestor at each level, or itself, as an index in its tree. Deeper
               levels are meaningless.
    """

    token_ids: Any
    lines: Any


class TreeHead(Protocol):
    """A head, called by one thread. It keeps a text's rows since the first one, or since a gap.

    layers       the target's layers whose hidden states it reads, beside each other as columns. See `Tap`.
    limit_vocab  drafted tokens are below this.
    runs_beside_host  whether a device usually grows trees while the host is free.
    """

    layers: tuple[int, ...]
    limit_vocab: int

    @property
    def runs_beside_host(self) -> bool: ...

    def observe(self, values: Any, followed: Sequence[Followed]) -> None:
        """Store hidden states [n, width], on any device, and the tokens with which the target's texts continue.

        Known rows are skipped. The values must not change afterwards.
        """
        ...

    def known(self, session_id: int) -> int:
        """Return up to which position a session's text is known; 0 for an unknown session."""
        ...

    def close(self, session_id: int) -> None:
        """Forget a session, known or not."""
        ...

    def start(self, requests: Sequence[TreeRequest]) -> Sequence[Pending[Grown]]:
        """Begin to grow trees of known sessions, each in one request.

        Trees with given level sizes are also available as `DeviceNodes` on the device, if the host takes no part.
        """
        ...
