"""Drafts that a step verifies before the host has read them (*unread* drafts).

They are grafted onto the trees as handles. Once they are read, their tokens replace the handles. Their nodes lie level
by level. The host knows each node's level and its place there, but not its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specq.protocol import Int32Array, Int64Array, IntpArray
from specq.verification import DeviceTokens, handles, is_handle, places_in_runs, places_of, starts_of
from specq.verifier.sessions.grafting import DraftBatch
from specq.verifier.sessions.session import Session
from specq.verifier.trees import NEXT_IDS, NONE, DraftTrees


class UnreadLayout(NamedTuple):
    """The nodes of a draft, level by level, i64[n] each.

    levels    the level of each node.
    ranks     its place in the level.
    parents   the first node of the level above; -1 for the first level.
    """

    levels: IntpArray
    ranks: IntpArray
    parents: IntpArray

    @property
    def is_chain(self) -> bool:
        return len(self.levels) == int(self.levels[-1]) + 1

    @staticmethod
    @lru_cache(maxsize=64)
    def of(level_sizes: tuple[int, ...]) -> UnreadLayout:
        """Return the layout of levels of these sizes."""
        sizes = np.array(level_sizes, np.intp)
        firsts = starts_of(sizes)
        levels = np.arange(len(sizes)).repeat(sizes)
        return UnreadLayout(levels, places_in_runs(sizes), np.append(NONE, firsts[:-1])[levels])


def may_be_unread(sessions: Sequence[Session], width: int) -> bool:
    """Return whether drafts of this width may be grafted unread onto these sessions' trees.

    No tree may have other nodes. All drafts must be judged only by the target's own tokens.
    """
    own = [session for session in sessions if session.place != NONE]
    if not own:
        return False
    trees, places = own[0].trees, np.array([session.place for session in own], np.intp)
    if np.count_nonzero(trees.num_live[places]) or np.count_nonzero(trees.traits[places]):
        return False
    if width > 1 and any(session.speculation.max_nodes for session in own):
        return False
    return all(session.follows_own for session in own)


def hung_unread(
    sessions: Sequence[Session],
    drafted: DeviceTokens,
    layout: UnreadLayout,
    depths: IntpArray,
    places: Int64Array,
    scores: npt.NDArray[np.floating],
    lane: int,
) -> DraftBatch:
    """Return drafts with measured scores as a batch in a lane.

    depths   i64[sessions]: how many levels each session receives. At least one session has one level or more.
    places   i64[sessions, n]: the places of the nodes among the drafted tokens.
    scores   f[n]: the scores of the nodes, the same for every session.
    """
    which = np.flatnonzero(depths)
    is_there = layout.levels < depths[which, None]  # [sessions, n]
    own = [sessions[i] for i in which.tolist()]
    return DraftBatch(
        sessions=own,
        lanes=lane,
        base_lens=own[0].trees.length[[session.place for session in own]],
        first_ids=NEXT_IDS,
        sizes=is_there.sum(1),
        token_ids=handles(places[which])[is_there],
        parent_ids=np.broadcast_to(layout.parents, is_there.shape)[is_there].astype(np.int32),
        scores=np.broadcast_to(scores, is_there.shape)[is_there],
        is_measured=True,
        drafted=drafted,
    )


def put_tokens(
    trees: DraftTrees, token_ids: Int32Array, scores: npt.NDArray[np.floating] | None = None
) -> tuple[IntpArray, Int64Array]:
    """Replace all handles on the trees by the tokens and scores that were read. Without `scores`, keep the old ones.

    Return the nodes that had handles, and the places that the handles stood for. Drafts that were forgotten meanwhile
    are left out.
    """
    nodes = (is_handle(trees.token) & (trees.node_session != NONE)).nonzero()[0]
    places = places_of(trees.token[nodes])
    trees.token[nodes] = token_ids[places]
    if scores is not None:
        trees.score[nodes] = trees.predicted[nodes] = scores[places]
    return nodes, places
