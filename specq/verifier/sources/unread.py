"""Drafts that a step verifies before the host has read them: how they hang on the trees as handles, and are put in
place once they are read.

Their nodes lie level by level. Of each the host knows the level, and at which place it stands there, not what it is.
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
    """How the nodes of a draft lie, level by level: their levels, their places in these, and the first node of the
    level above, -1 at the first one, i64[n] each."""

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
    """Return whether drafts of such a width may hang unread on these sessions' trees: none has other nodes, and all are
    judged by the target's own tokens alone."""
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
    """Return drafts as a batch, in a lane, whose scores are measured.

    depths   i64[sessions]: how many levels each session takes, some of them at least one
    places   i64[sessions, n]: of the nodes among the drafted tokens
    scores   f[n], of every session's
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
    """Put what was read in the place of all handles on the trees: tokens and scores of what these stand for; without
    scores these stay. Return the nodes that had some, and the places that these stood for; not of drafts that were
    forgotten meanwhile."""
    nodes = (is_handle(trees.token) & (trees.node_session != NONE)).nonzero()[0]
    places = places_of(trees.token[nodes])
    trees.token[nodes] = token_ids[places]
    if scores is not None:
        trees.score[nodes] = trees.predicted[nodes] = scores[places]
    return nodes, places
