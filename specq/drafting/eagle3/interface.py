"""What a verifier needs of a head that reads the target's hidden states and its own: whole trees, in arrays.

Best first, as EAGLE-2's (Li et al. 2024, arXiv 2406.16858): at each level the BEAM likeliest of its nodes are expanded,
by their cumulative probability, with WIDTH children each. Or of a shape. Or best first with so many nodes left at each
level: then it is known beforehand how deep each node stands, and a step can be launched with such trees before the host
has read them. `specq.drafting.eagle3.drafter` fulfils it; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from specq.drafting.interface import Pending
from specq.drafting.rank_trees import RankTree
from specq.protocol import Float32Array, Int32Array, IntpArray, SamplingParams
from specq.verifier.sources import Followed

WIDTH = 8  # children of a node that is expanded
BEAM = 4  # nodes of a tree that are expanded at a level


class TreeRequest(NamedTuple):
    """Trees of one kind for some sessions.

    depth   how many levels they need; best first there may be more
    ranks   their shape; None: best first
    floor   a log-probability: best first, what is less likely may be left out
    level_sizes  best first, how many nodes are left at each level, likeliest first, of which the BEAM first are
                 expanded; (): all
    """

    session_ids: Sequence[int]
    params: Sequence[SamplingParams]
    depth: int
    ranks: RankTree | None
    floor: float
    level_sizes: tuple[int, ...] = ()


class Grown(NamedTuple):
    """Nodes of m trees, as many of each, parents before children.

    token_ids i32[m, n]; scores f32[m, n]: log-probabilities given the parent; reach f32[m, n]: with those above; -inf:
        no node
    parents i32[m, n]: places among the tree's nodes; -1: the context
    depths  i64[n]: the level of each, from 0
    """

    token_ids: Int32Array
    scores: Float32Array
    reach: Float32Array
    parents: Int32Array
    depths: IntpArray


class DeviceNodes(NamedTuple):
    """Nodes of m trees of n nodes on the head's device, in the order of `Grown`.

    token_ids  i32[m, n]: each below `TreeHead.limit_vocab`
    lines      i32[levels, m, n]: the node above each, or itself, at each level, as a place in its tree; of no use at
               deeper levels
    """

    token_ids: Any
    lines: Any


class TreeHead(Protocol):
    """A head, driven by one thread. Of a text it keeps what it was given since its first row, or since a gap.

    layers  of the target, whose hidden states it reads, beside each other as columns; see `Tap`
    limit_vocab  the tokens that it drafts are below this
    runs_beside_host  whether a device grows trees as a rule while the host is free
    """

    layers: tuple[int, ...]
    limit_vocab: int

    @property
    def runs_beside_host(self) -> bool: ...

    def observe(self, values: Any, followed: Sequence[Followed]) -> None:
        """Take in hidden states [n, width], wherever these are, and what the target's text goes on with. What is known
        is skipped. The values must not change."""
        ...

    def known(self, session_id: int) -> int:
        """Return up to which position a session's text is known; 0 for an unknown session."""
        ...

    def close(self, session_id: int) -> None:
        """Forget a session, known or not."""
        ...

    def start(self, requests: Sequence[TreeRequest]) -> Sequence[Pending[Grown]]:
        """Begin to grow trees of sessions that are known, each in one request. Of given level sizes, and where the host
        takes no part, they are `DeviceNodes` on the device."""
        ...
