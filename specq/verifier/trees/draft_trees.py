"""The draft trees of all sessions, as one structure of arrays: no loops over nodes in Python.

A drafter numbers its nodes. Later nodes name their parents by these ids. The node table of the drafter's lane resolves
an id. The result is a live node, or a committed length once the transcript has the node. Free places of nodes,
sessions, lanes and groups are reused. So a node's number is valid for one step at most.

Each operation exists twice: in C (kernels/) and in plain Python (the modules `reference_*`), which explains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from specq.protocol import (
    DraftDistribution,
    DraftDistributions,
    Float32Array,
    Float64Array,
    Int32Array,
    Int64Array,
    SessionStats,
    UInt8Array,
    stacked,
)
from specq.verification import Calibration
from specq.verifier.trees.arrays import COUNTS, MAX_LIVE_NODES, NONE, WINDOW, Arrays, CompiledTrees, kernels
from specq.verifier.trees.reference import ReferenceTrees
from specq.verifier.trees.reference_choice import calibration_of
from specq.verifier.trees.reference_graft import HEAD

NEXT_IDS = -1  # as the first id of a draft: the next ids of the lane
NO_LIMIT = 2**31 - 1


class Operations(Protocol):
    """The operations on nodes.

    Nodes of several sessions are stored one session after the other. `firsts` i64[sessions + 1] has the begin of each
    session's nodes.
    """

    def graft(
        self,
        first: int,
        heads: Int64Array,
        token_ids: Int32Array,
        parent_ids: Int32Array,
        scores: npt.NDArray[np.floating],
        groups: Int32Array | None,
        arrived: npt.ArrayLike,
    ) -> int:
        """See `reference_graft.graft`."""
        ...

    def candidates(self, sessions: npt.ArrayLike, ends: npt.ArrayLike, floor: float) -> tuple[Int64Array, Int32Array]:
        """Return (firsts, nodes): the nodes that may be verified. Set `reach_prob` and `depends_on`.

        Their cumulative acceptance probability is at least `floor`. Their position is before the session's `end`.

        Parents come before children, and siblings in the order of judgement. A node is at most as likely as its parent.
        A sampled node is at most as likely as its earlier sibling. So the node on which another depends is returned
        too, unless it is too unlikely.
        """
        ...

    def best_chains(self, firsts: Int64Array, nodes: Int32Array, most: int) -> tuple[Int64Array, Int32Array]:
        """Return (firsts, nodes): the most promising chain of each session's candidates, with at most `most` nodes.

        See `reference_choice.best_chain`.
        """
        ...

    def flatten(self, firsts: Int64Array, nodes: Int32Array) -> tuple[Int32Array, Int32Array, Float32Array]:
        """Return the tokens, parents and scores of nodes, parents before children.

        A parent is its place among the session's nodes.
        """
        ...

    def select(
        self,
        sessions: npt.ArrayLike,
        lane_id: int,
        sizes: Int32Array,
        token_ids: Int32Array,
        parents: Int32Array,
        scores: Float64Array,
        enough: npt.ArrayLike,
        *,
        rarity: int,
        least: float,
    ) -> tuple[Int32Array, Int32Array, Int32Array, Float32Array]:
        """Return (sizes, token_ids, parents, scores): the nodes to graft from one lane's drafts.

        Each session has one draft.

        sizes      i32[sessions]: nodes of each draft, at most MAX_LIVE_NODES.
        token_ids, parents, scores  [nodes]; parents are places in the draft and come before children.
        enough     [sessions]: the number of accepted tokens that the nodes of each draft must promise.
        rarity     one of this many drafts without a node as likely as `least` is tried.

        See `reference_choice`.
        """
        ...

    def count(
        self,
        sessions: npt.ArrayLike,
        sizes: npt.ArrayLike,
        nodes: Int32Array,
        is_accepted: UInt8Array,
        min_accept_prob: int,
    ) -> None:
        """Count rounds before their commit, given the verified nodes and the number of each session.

        Lanes of sampled drafts learn here, others in `commit`.
        """
        ...

    def commit(
        self, sessions: npt.ArrayLike, sizes: npt.ArrayLike, token_ids: Int32Array, num_verified: npt.ArrayLike
    ) -> None:
        """Append tokens to transcripts; cut every branch that does not agree with them.

        sizes  the number of tokens of each session.
        """
        ...

    def live(self, session: int) -> list[int]:
        """Return the live nodes of a session, parents first."""
        ...

    def forget(self, session: int) -> None:
        """Drop all drafts of a session and the state of its drafters. This only costs speed."""
        ...


class Grafted(NamedTuple):
    """The result of grafting, i64[drafts]: each draft's first node id, and its number of live nodes."""

    first_ids: Int64Array
    num_added: Int64Array


class Lane(NamedTuple):
    """One drafter of a session.

    It has the newest node id, and the first id after the last lost or dropped ids. It also counts how often the target
    accepted its predictions.
    """

    seen: int
    first_after_loss: int
    calibration: Calibration


class DraftTrees(Arrays):
    """The draft trees of all sessions; `is_compiled` is False for the reference.

    The sessions in `operations` are the places that `open` returned.
    """

    def __init__(self, *, is_compiled: bool = True) -> None:
        super().__init__()
        library = kernels() if is_compiled else None
        self.operations: Operations = ReferenceTrees(self) if library is None else CompiledTrees(self, library)
        self.distributions: dict[int, DraftDistribution] = {}  # by group
        self._closed_counts = np.zeros(len(COUNTS), np.int64)  # of closed sessions
        self._closed_verified_at = np.zeros((MAX_LIVE_NODES, 2), np.int64)
        self.sampled_calibration = Calibration(self.views.sampled_trials, self.views.sampled_accepted)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def open(self, token_ids: Int32Array, *, takes_distributions: bool) -> int:
        """Return the place of a new session with this transcript."""
        session = self.take("sessions")
        for name in ("num_live", "num_lanes", "drafted_at", "beats_waited", "counts", "verified_at", "num_declined"):
            getattr(self, name)[session] = 0
        self.first_root[session], self.takes_distributions[session] = NONE, takes_distributions
        self.length[session] = len(token_ids)
        first = max(0, len(token_ids) - WINDOW)
        recent, newest, at = self.recent[session], token_ids[first:], first % WINDOW
        recent[at : at + len(newest)], recent[:at] = newest[: WINDOW - at], newest[WINDOW - at :]
        return session

    def close(self, session: int) -> None:
        """Remove a session and free its place."""
        self._closed_counts += self.counts[session]
        self._closed_verified_at += self.verified_at[session]
        self.operations.forget(session)
        self.length[session] = NONE
        self.give("sessions", session)

    def lane(self, session: int, lane_id: int) -> Lane | None:
        """Return a lane of a session."""
        return self.lanes(session).get(lane_id)

    def lanes(self, session: int) -> dict[int, Lane]:
        """Return the lanes of a session by their ids, in order of arrival."""
        t = self.views
        places = [t.session_lanes[session, k] for k in range(t.num_lanes[session])]
        return {
            t.lane_id[at]: Lane(t.newest_id[at], t.first_after_loss[at], calibration_of(t, at)) for at in places
        }  # fmt: skip

    def seen(self, session: int) -> tuple[int, ...]:
        """Return (lane, newest node id seen, lane, ...), as in a verdict."""
        t, found = self.views, list[int]()
        if not t.num_lanes[session]:
            return ()
        for k in range(t.num_lanes[session]):
            lane = t.session_lanes[session, k]
            found += (t.lane_id[lane], t.newest_id[lane])
        return tuple(found)

    def stats(self, session: int) -> SessionStats:
        """Return the counts of a session."""
        counts = dict(zip(COUNTS, self.counts[session].tolist(), strict=True))
        num_depths = int(np.count_nonzero(self.verified_at[session, :, 0]))  # a verified node's ancestors are verified
        return SessionStats(**counts, positions=self.verified_at[session, :num_depths].tolist())

    def totals(self) -> tuple[dict[str, int], Int64Array]:
        """Return the counts of all sessions, including closed ones.

        These are sums by the names of `SessionStats`. With them come verified and accepted nodes by depth, i64[depths,
        2].
        """
        is_open = self.length != NONE
        counts = self._closed_counts + self.counts[is_open].sum(0)
        verified_at = self._closed_verified_at + self.verified_at[is_open].sum(0)
        return dict(zip(COUNTS, counts.tolist(), strict=True)), verified_at

    # --- drafts -------------------------------------------------------------------------------------------------------

    def hang_anew(self, session: int, nodes: Sequence[int], parents: Sequence[int]) -> None:
        """Attach all nodes of a session to other parents among them, at the same depth.

        parents  places among the nodes, before their children; -1 for the context.
        """
        t, last = self.views, dict[int, int]()
        for node, place in zip(nodes, parents, strict=True):
            above = nodes[place] if place >= 0 else NONE
            t.parent[node], t.first_child[node], t.next_sibling[node] = above, NONE, NONE
            before, last[above] = last.get(above, NONE), node
            if before != NONE:
                t.next_sibling[before] = node
            elif above != NONE:
                t.first_child[above] = node
            else:
                t.first_root[session] = node

    def graft(
        self,
        sessions: npt.ArrayLike,
        lanes: npt.ArrayLike,
        base_lens: npt.ArrayLike,
        first_ids: npt.ArrayLike,
        sizes: npt.ArrayLike,
        token_ids: Int32Array,
        parent_ids: Int32Array,
        scores: npt.NDArray[np.floating],
        *,
        arrived: npt.ArrayLike,
        is_whole: npt.ArrayLike = False,
        is_measured: npt.ArrayLike = False,
        rows: Int32Array | None = None,
        distributions: Sequence[DraftDistribution] = (),
    ) -> Grafted:
        """Graft well-formed drafts in order; drafts for places without a session have no effect.

        sessions, lanes, base_lens, first_ids, arrived  [drafts], or one number for all: as in `Draft`.
        sizes        [drafts], or one number for all: the number of nodes. With NEXT_IDS as first id, parents are places
                     in the draft, -1 for the context.
        token_ids, parent_ids, scores  [nodes], one draft after the other.
        is_whole     [drafts]: whether a draft is dropped as a whole if a part does not fit. This is required for a
                     draft with distributions.
        is_measured  [drafts]: whether the scores of point masses are already measured, over all sessions. Then the
                     lane's calibration is not applied.
        rows         i32[nodes]: the row in `distributions` from which a node was drawn. -1, or without `rows`: a point
                     mass.
        """
        heads = np.empty((np.size(sizes), len(HEAD)), np.int64)
        columns = sessions, lanes, base_lens, first_ids, sizes, is_whole, is_measured, 0
        for i, column in enumerate(columns):
            heads[:, i] = column
        groups = self._take_groups(distributions) if distributions else []
        of_nodes = None if rows is None else _groups_of(rows, groups)
        done = 0
        while (done := self.operations.graft(done, heads, token_ids, parent_ids, scores, of_nodes, arrived)) < len(
            heads
        ):
            self.make_room("nodes", int(heads[done, 4]))
            self.make_room("lanes", 1)
        for group in groups:
            if not self.group_size[group]:
                self.give("groups", group)
                del self.distributions[group]
        return Grafted(heads[:, 3], heads[:, 7])

    def _take_groups(self, distributions: Sequence[DraftDistribution]) -> list[int]:
        groups = [self.take("groups") for _ in distributions]
        self.group_size[groups] = 0
        self.distributions.update(zip(groups, distributions, strict=True))
        return groups

    def distributions_of(self, nodes: Int32Array) -> DraftDistributions | None:
        """Return the distributions from which the nodes of a tree were drawn.

        Returns None if all are point masses.
        """
        groups = self.group[nodes].tolist()
        row_of = {group: row for row, group in enumerate(dict.fromkeys(group for group in groups if group != NONE))}
        if not row_of:
            return None
        rows = np.array([row_of.get(group, -1) for group in groups], np.int32)
        return DraftDistributions(*stacked([self.distributions[group] for group in row_of]), rows)


def _groups_of(rows: Int32Array, groups: Sequence[int]) -> Int32Array:
    """Return i32[nodes]: the group of each node, given the row of its distribution."""
    return np.array([*groups, NONE], np.int32)[rows]
