"""The draft trees of all sessions of a verifier, as one structure of arrays: no step loops over nodes in Python.

A drafter numbers its nodes; later nodes name their parents by these ids. The node table of its lane resolves an id to a
live node or, once the node is part of the transcript, to a committed length. Places of nodes, sessions, lanes and
groups that are free again are used again: whoever keeps the number of a node keeps it for one step at most.

Each operation is there twice: in C (kernels/) and in plain Python (the modules `reference_*`), which explains it.
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
from specq.verifier.trees.arrays import COUNTS, MAX_LIVE_NODES, NONE, WINDOW, Arrays
from specq.verifier.trees.compiled import CompiledTrees, kernels
from specq.verifier.trees.reference import ReferenceTrees
from specq.verifier.trees.reference_choice import calibration_of
from specq.verifier.trees.reference_graft import HEAD

NEXT_IDS = -1  # as the first id of a draft: those that come next in the lane
NO_LIMIT = 2**31 - 1


class Operations(Protocol):
    """What is done with nodes. Nodes of several sessions stand one session after the other; `firsts` i64[sessions + 1]
    says where each session's begin."""

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
        """Return (firsts, nodes): those with a cumulative acceptance probability of at least `floor` and a position
        before the session's `end`. Set `reach_prob` and `depends_on`.

        Parents come before children, siblings in the order of judgement, and none is likelier than its parent, and no
        sampled node likelier than its earlier sibling. So what a node depends on is returned with it, unless that is
        too unlikely.
        """
        ...

    def best_chains(self, firsts: Int64Array, nodes: Int32Array, most: int) -> tuple[Int64Array, Int32Array]:
        """Return (firsts, nodes): of each session's candidates the chain of at most `most` nodes that promises most;
        see `reference_choice.best_chain`."""
        ...

    def flatten(self, firsts: Int64Array, nodes: Int32Array) -> tuple[Int32Array, Int32Array, Float32Array]:
        """Return the tokens, the parents as places among the session's nodes, and the scores of nodes, parents before
        children."""
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
        """Return (sizes, token_ids, parents, scores): what is to be hung of drafts in one lane, one for each session;
        see `reference_choice`.

        sizes i32[sessions]: nodes of each draft, at most MAX_LIVE_NODES; token_ids, parents, scores [nodes]: parents
        come before children and
                      are places in the draft
        enough        [sessions]: how many accepted tokens the nodes of each must promise
        rarity        of so many drafts without a node as likely as the `least` one is tried
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
        """Count rounds before their commit, given the verified nodes, so many of each; lanes of sampled drafts learn
        here, others in `commit`."""
        ...

    def commit(
        self, sessions: npt.ArrayLike, sizes: npt.ArrayLike, token_ids: Int32Array, num_verified: npt.ArrayLike
    ) -> None:
        """Append tokens to transcripts, so many to each; the branches that agree with them live on, everything else is
        cut."""
        ...

    def live(self, session: int) -> list[int]:
        """Return the live nodes of a session, parents first."""
        ...

    def forget(self, session: int) -> None:
        """Drop all that was drafted for a session, and what is known of its drafters; that costs speed only."""
        ...


class Grafted(NamedTuple):
    """What became of drafts: i64[drafts], the id of the first node of each, and how many nodes became live."""

    first_ids: Int64Array
    num_added: Int64Array


class Lane(NamedTuple):
    """One drafter of a session: the newest node id that arrived, the first after those that were last lost, or dropped,
    on their way, and how often the target accepted what it predicted."""

    seen: int
    first_after_loss: int
    calibration: Calibration


class DraftTrees(Arrays):
    """`is_compiled`: False for the reference. `operations` take the places that `open` gave as sessions."""

    def __init__(self, *, is_compiled: bool = True) -> None:
        super().__init__()
        library = kernels() if is_compiled else None
        self.operations: Operations = ReferenceTrees(self) if library is None else CompiledTrees(self, library)
        self.distributions: dict[int, DraftDistribution] = {}  # by group
        self._closed_counts = np.zeros(len(COUNTS), np.int64)  # of sessions that are closed
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
        """Forget a session; its place is free."""
        self._closed_counts += self.counts[session]
        self._closed_verified_at += self.verified_at[session]
        self.operations.forget(session)
        self.length[session] = NONE
        self.give("sessions", session)

    def lane(self, session: int, lane_id: int) -> Lane | None:
        """Return a lane of a session."""
        return self.lanes(session).get(lane_id)

    def lanes(self, session: int) -> dict[int, Lane]:
        """Return the lanes of a session by their ids, in the order in which they came."""
        t = self.views
        places = [t.session_lanes[session, k] for k in range(t.num_lanes[session])]
        return {
            t.lane_id[at]: Lane(t.newest_id[at], t.first_after_loss[at], calibration_of(t, at)) for at in places
        }  # fmt: skip

    def seen(self, session: int) -> tuple[int, ...]:
        """Return (lane, newest node id seen, lane, ...), as a verdict carries it."""
        t, found = self.views, list[int]()
        if not t.num_lanes[session]:
            return ()
        for k in range(t.num_lanes[session]):
            lane = t.session_lanes[session, k]
            found += (t.lane_id[lane], t.newest_id[lane])
        return tuple(found)

    def stats(self, session: int) -> SessionStats:
        """Return what was counted of a session."""
        counts = dict(zip(COUNTS, self.counts[session].tolist(), strict=True))
        num_depths = int(np.count_nonzero(self.verified_at[session, :, 0]))  # a node is verified with those above it
        return SessionStats(**counts, positions=self.verified_at[session, :num_depths].tolist())

    def totals(self) -> tuple[dict[str, int], Int64Array]:
        """Return what was counted of all sessions, also of those that are closed: sums by the names of `SessionStats`,
        and i64[depths, 2], verified and accepted nodes by depth."""
        is_open = self.length != NONE
        counts = self._closed_counts + self.counts[is_open].sum(0)
        verified_at = self._closed_verified_at + self.verified_at[is_open].sum(0)
        return dict(zip(COUNTS, counts.tolist(), strict=True)), verified_at

    # --- drafts -------------------------------------------------------------------------------------------------------

    def hang_anew(self, session: int, nodes: Sequence[int], parents: Sequence[int]) -> None:
        """Hang all nodes of a session below other ones of them than before, as deep as they were: parents, as places
        among them, -1 for the context, come before their children."""
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
        """Graft well-formed drafts, one after the other; those for places without a session have no effect.

        sessions, lanes, base_lens, first_ids, sizes, arrived   [drafts], or one number for all of them: as in `Draft`,
        and how many
                    nodes each has. With NEXT_IDS as first id, parents are places in the draft, -1 for the context
        token_ids, parent_ids, scores   [nodes], of one draft after the other
        is_whole    [drafts]: a draft is dropped as a whole if not all of it fits, as one with distributions must be
        is_measured [drafts]: scores of point masses are measured already, over all sessions; the lane's calibration is
            not applied
        rows        i32[nodes]: which of `distributions` a node was drawn from; -1, or without `rows`: a point mass
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
        """Return what the nodes of a tree were drawn from; None if all are point masses."""
        groups = self.group[nodes].tolist()
        row_of = {group: row for row, group in enumerate(dict.fromkeys(group for group in groups if group != NONE))}
        if not row_of:
            return None
        rows = np.array([row_of.get(group, -1) for group in groups], np.int32)
        return DraftDistributions(*stacked([self.distributions[group] for group in row_of]), rows)


def _groups_of(rows: Int32Array, groups: Sequence[int]) -> Int32Array:
    """Return i32[nodes]: the group of each node, given which distribution it was drawn from."""
    return np.array([*groups, NONE], np.int32)[rows]
