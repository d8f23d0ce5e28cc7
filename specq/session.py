"""A session at the verifier: what is committed, and the tree of unverified draft nodes that hangs from it.

Rules: drafts are hints, aligned by content. A draft may speak of a position that has been passed (what the transcript
agrees with survives), of nodes that were never seen (dropped as orphans) or that were cut (dropped as stale); it may come
twice. None of that is an error. Only `commit` changes the transcript.

State lives here and nowhere else; no I/O, no clock, no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from specq.calibration import Calibration
from specq.logprob_record import LogprobRecord
from specq.messages import Draft, Open
from specq.params import SamplingParams
from specq.types import NO_TREE, History, Int32Array, Tree

MAX_LIVE_NODES = 512  # of one session; what comes beyond is dropped
MAX_LANES = 8
_REMEMBERED = 256  # ids of nodes committed so many positions ago stay resolvable


class Node:
    """A draft node in the tree; `position` is the one that its token would take."""

    __slots__ = ("arrived", "children", "lane", "node_id", "parent", "position", "reach", "score", "token")

    def __init__(
        self, lane: int, node_id: int, token: int, parent: Node | None, position: int, score: float, arrived: float
    ) -> None:
        self.lane, self.node_id, self.token, self.parent = lane, node_id, token, parent
        self.position, self.score, self.arrived = position, score, arrived
        self.children: dict[int, Node] = {}
        self.reach = 0.0  # probability of being accepted, set by `candidates`


@dataclass(slots=True)
class Lane:
    """One drafter's names for nodes: id -> live node, or the committed length at which it stands confirmed."""

    names: dict[int, Node | int] = field(default_factory=dict)
    seen: int = -1
    calibration: Calibration = field(default_factory=Calibration)


@dataclass(slots=True)
class SessionStats:
    """Counts that only the verifier can make.

    drafted, stale, orphans   nodes that arrived; that the transcript contradicted; whose parent is unknown
    hits, misses   rounds that began with live nodes, so that what came of the last one was drafted already; without
    positions [i] = [verified, accepted] nodes at depth i + 1
    """

    drafted: int = 0
    stale: int = 0
    orphans: int = 0
    hits: int = 0
    misses: int = 0
    positions: list[list[int]] = field(default_factory=list)

    def count_node(self, depth: int, accepted: bool) -> None:
        """Count one verified node at a depth of 1 or more."""
        while len(self.positions) < depth:
            self.positions.append([0, 0])
        self.positions[depth - 1][0] += 1
        self.positions[depth - 1][1] += accepted

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Session:
    """One open session. `limit` is the committed length at which it ends, `end_ids` the tokens that end it sooner."""

    def __init__(self, message: Open, end_ids: tuple[int, ...] = ()) -> None:
        self.session_id, self.epoch = message.session_id, message.epoch
        self.params: SamplingParams = message.params
        self.prompt_len, self.end_ids = message.prompt_len, end_ids
        self.token_ids: list[int] = message.token_ids.tolist()
        self.limit = len(self.token_ids) + message.tokens_left
        self.journaled = len(self.token_ids)  # what the broker has confirmed
        self.logprobs = LogprobRecord(message.params.logprobs)  # of the tokens from opened_len on
        self.opened_len = len(self.token_ids)
        self.finish = ""  # the finish reason, once there is one
        self.kv_len = 0
        self.is_open = False  # in the engine
        self.roots: dict[int, Node] = {}
        self.lanes: dict[int, Lane] = {}
        self.num_live = 0
        self.stats = SessionStats()

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Committed tokens whose KV is not there yet; 1 for a decoding session."""
        return self.length - self.kv_len

    def history(self) -> History | None:
        """Return what judging needs of the past, if the parameters ask for it."""
        if not self.params.needs_history:
            return None
        return History(np.array(self.token_ids, np.int32), self.prompt_len, self.end_ids)

    # --- drafts -----------------------------------------------------------------------------------------------------

    def graft(self, draft: Draft, now: float) -> int:
        """Hang the draft's nodes onto the tree; return how many of them are live. Never raises for its content."""
        lane = self.lanes.get(draft.lane)
        if lane is None:
            if len(self.lanes) >= MAX_LANES:
                return 0
            lane = self.lanes[draft.lane] = Lane()
        before = self.num_live
        rows = zip(draft.token_ids.tolist(), draft.parent_ids.tolist(), draft.scores.tolist(), strict=True)
        for node_id, (token, parent_id, score) in enumerate(rows, draft.first_id):
            self.stats.drafted += 1
            at = draft.base_len if parent_id < 0 else lane.names.get(parent_id)
            known = parent_id <= lane.seen or parent_id >= draft.first_id
            self._attach(lane, draft.lane, node_id, token, at, score, now, known=known)
        lane.seen = max(lane.seen, draft.first_id + len(draft.token_ids) - 1)
        return self.num_live - before

    def _attach(
        self, lane: Lane, lane_id: int, node_id: int, token: int, at: Node | int | None, score: float, now: float, *,
        known: bool,
    ) -> None:  # fmt: skip
        if node_id in lane.names:
            return
        if at is None or (isinstance(at, int) and at > self.length):
            self._drop(stale=known)
        elif isinstance(at, int) and at < self.length:
            if self.token_ids[at] == token:
                lane.names[node_id] = at + 1
            else:
                self._drop(stale=True)
        else:
            parent = None if isinstance(at, int) else at
            siblings = self.roots if parent is None else parent.children
            node = siblings.get(token)
            if node is None and self.num_live < MAX_LIVE_NODES:
                position = self.length if parent is None else parent.position + 1
                node = siblings[token] = Node(lane_id, node_id, token, parent, position, score, now)
                self.num_live += 1
            if node is not None:
                lane.names[node_id] = node

    def _drop(self, *, stale: bool) -> None:
        if stale:
            self.stats.stale += 1
        else:
            self.stats.orphans += 1

    # --- what to verify ---------------------------------------------------------------------------------------------

    def candidates(self, floor: float) -> list[Node]:
        """Return live nodes whose estimated chance of acceptance is at least `floor`, with `reach` set; parents come
        before children and are never less likely than they."""
        found: list[Node] = []
        level = list(self.roots.values())
        while level:
            following: list[Node] = []
            for node in level:
                chance = self.lanes[node.lane].calibration.probability(node.score)
                node.reach = chance * (1.0 if node.parent is None else node.parent.reach)
                if node.reach >= floor:
                    found.append(node)
                    following.extend(node.children.values())
            level = following
        return found

    def live_nodes(self) -> Iterator[Node]:
        """Yield the live nodes, parents first."""
        level = list(self.roots.values())
        while level:
            yield from level
            level = [child for node in level for child in node.children.values()]

    # --- verdicts ---------------------------------------------------------------------------------------------------

    def count_round(self, nodes: Sequence[Node], accepted: AbstractSet[int]) -> None:
        """Count a round before its `commit`; `accepted` holds the indices of the accepted among the verified nodes."""
        if self.num_live:
            self.stats.hits += 1
        else:
            self.stats.misses += 1
        for i, node in enumerate(nodes):
            self.stats.count_node(node.position - self.length + 1, i in accepted)

    def commit(self, tokens: Sequence[int], num_verified: int) -> None:
        """Append tokens to the transcript; the branch that agrees with them lives on, everything else is cut.

        Lanes learn from every node whose parent is on the path, verified or not: it was right iff it is what was
        committed there. So a node need not be verified for its lane to be judged.
        """
        standing: dict[int, Node | int] = {}  # of nodes by identity: what their names mean from now on
        siblings: dict[int, Node] | None = self.roots
        for token in tokens:
            for node in siblings.values() if siblings else ():
                self.lanes[node.lane].calibration.observe(node.score, node.token == token)
            follower = siblings.get(token) if siblings is not None else None
            siblings = follower.children if follower is not None else None
            if follower is not None:
                standing[id(follower)] = follower.position + 1
            self.token_ids.append(token)
        self.roots = siblings or {}
        self._prune(standing, num_verified)

    def _prune(self, standing: dict[int, Node | int], num_verified: int) -> None:
        """Forget the names of cut nodes and of those committed long ago; count the cut ones nobody verified."""
        if not self.num_live:
            return
        for node in self.roots.values():
            node.parent = None
        live = {id(node): node for node in self.live_nodes()}
        standing.update(live)
        oldest = self.length - _REMEMBERED
        for lane in self.lanes.values():
            now = {name: at if isinstance(at, int) else standing.get(id(at)) for name, at in lane.names.items()}
            lane.names = {n: at for n, at in now.items() if isinstance(at, Node) or (at is not None and at >= oldest)}
        self.stats.stale += max(0, self.num_live - len(live) - num_verified)
        self.num_live = len(live)

    def seen(self) -> tuple[int, ...]:
        """Return (lane, newest node id seen, lane, ...), as a verdict carries it."""
        return tuple(value for lane_id, lane in self.lanes.items() for value in (lane_id, lane.seen))


def tree_of(nodes: Sequence[Node]) -> Tree:
    """Return chosen nodes, parents before children, as arrays."""
    if not nodes:
        return NO_TREE
    index = {id(node): i for i, node in enumerate(nodes)}
    parents: Int32Array = np.array([-1 if n.parent is None else index[id(n.parent)] for n in nodes], np.int32)
    return Tree(
        token_ids=np.array([n.token for n in nodes], np.int32),
        parents=parents,
        scores=np.array([n.score for n in nodes], np.float32),
    )
