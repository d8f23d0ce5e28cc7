"""Graft drafts in plain Python: the reference of kernels/graft.h. It runs without a C compiler.

A draft is aligned by content. A node is attached to a live node or to the context. If the transcript agrees with it, it
is noted as committed. If neither this draft nor an earlier one has its parent, the node is an orphan. Any other node
that does not fit is stale. Which sampled nodes are dropped must never depend on their tokens (decision 0008).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specq.protocol import Float64Array, Int32Array, Int64Array
from specq.verification import Calibration
from specq.verifier.trees.arrays import (
    COMMITTED,
    COUNTS,
    CUT,
    MAX_LANES,
    MAX_LIVE_NODES,
    MAX_TABLE_SIZE,
    NONE,
    WINDOW,
    Arrays,
)

HEAD = "session", "lane", "base_len", "first_id", "size", "is_whole", "is_measured", "num_added"
DRAFTED, STALE, ORPHANS = (COUNTS.index(name) for name in ("drafted", "stale", "orphans"))
_NODES, _SESSIONS, _LANES, _GROUPS = range(4)


@dataclass(slots=True)
class Fresh:
    """A node to attach; `node_lane` is the place of its lane."""

    session: int
    lane: int
    node_id: int
    token: int
    parent: int
    position: int
    group: int
    rank: int
    score: float
    arrived: float
    is_measured: bool


def graft(
    trees: Arrays,
    first: int,
    heads: Int64Array,
    token_ids: Int32Array,
    parent_ids: Int32Array,
    scores: npt.NDArray[np.floating],
    groups: Int32Array | None,
    arrived: Float64Array,
) -> int:
    """Graft drafts from `first` on.

    Returns the first draft without room, or the number of drafts.

    heads i64[drafts, 8]: see HEAD. A first_id of -1 means the lane's next ids. Then parents are places in the draft.
    """
    t, node = trees.views, int(heads[:first, HEAD.index("size")].sum())
    for draft in range(first, len(heads)):
        head = dict(zip(HEAD, heads[draft].tolist(), strict=True))
        if t.num_free[_NODES] < head["size"] or not t.num_free[_LANES]:
            return draft
        head["num_added"] = 0
        if 0 <= head["session"] < t.room[_SESSIONS] and t.length[head["session"]] >= 0:
            own = slice(node, node + head["size"])
            drawn = groups[own].tolist() if groups is not None else [NONE] * head["size"]
            nodes = token_ids[own].tolist(), parent_ids[own].tolist(), scores[own].tolist(), drawn
            _graft(t, head, list(zip(*nodes, strict=True)), float(arrived[draft]))
        heads[draft] = list(head.values())
        node += head["size"]
    return len(heads)


def _graft(t: Any, head: dict[str, int], nodes: list[tuple[int, int, float, int]], arrived: float) -> None:
    session, size, before = head["session"], head["size"], t.num_live[head["session"]]
    lane = lane_of(t, session, head["lane"])
    if lane == NONE:
        return
    seen_before, is_relative = t.newest_id[lane], head["first_id"] < 0
    if is_relative:
        head["first_id"] = seen_before + 1
    t.counts[session, DRAFTED] += size
    t.beats_waited[session] = 0
    t.drafted_at[session] = max(t.drafted_at[session], head["base_len"])
    note(t, lane, head["first_id"], size)
    if (head["is_whole"] and before + size > MAX_LIVE_NODES) or not has_room(t, lane, head["first_id"], size):
        t.counts[session, STALE] += size
        t.first_after_loss[lane] = t.newest_id[lane] + 1
        return
    for rank, (token, parent_id, score, group) in enumerate(nodes):
        node_id = head["first_id"] + rank
        if t.table_ids[lane, node_id % MAX_TABLE_SIZE] == node_id:
            continue
        fresh = Fresh(
            session, lane, node_id, token, NONE, 0, group, rank, score, arrived, bool(head["is_measured"])
        )  # fmt: skip
        named = parent_id + head["first_id"] if is_relative and parent_id >= 0 else parent_id
        align(t, fresh, head, seen_before, named)
    head["num_added"] = t.num_live[session] - before


# --- lanes ------------------------------------------------------------------------------------------------------------


def lane_of(t: Any, session: int, lane_id: int) -> int:
    """Return the place of a session's lane; create the lane if needed.

    With too many lanes, a new one replaces the oldest idle lane. Returns NONE if no lane is idle.
    """
    lanes = [t.session_lanes[session, k] for k in range(t.num_lanes[session])]
    known = next((lane for lane in lanes if t.lane_id[lane] == lane_id), NONE)
    if known != NONE:
        return known
    if len(lanes) == MAX_LANES:
        idle = next((k for k, lane in enumerate(lanes) if not t.num_refs[lane]), NONE)
        if idle == NONE:
            return NONE
        remove_lane(t, session, idle)
    t.num_free[_LANES] -= 1
    lane = int(t.free_lanes[t.num_free[_LANES]])
    t.session_lanes[session, t.num_lanes[session]] = lane
    t.num_lanes[session] += 1
    t.lane_id[lane], t.newest_id[lane], t.first_after_loss[lane], t.num_refs[lane] = lane_id, -1, 0, 0
    t.table_ids.obj[lane], t.trials.obj[lane], t.accepted.obj[lane] = NONE, 0.0, 0.0
    return lane


def remove_lane(t: Any, session: int, k: int) -> None:
    """Free the place of a session's k-th lane."""
    t.free_lanes[t.num_free[_LANES]] = t.session_lanes[session, k]
    t.num_free[_LANES] += 1
    t.num_lanes[session] -= 1
    for i in range(k, t.num_lanes[session]):
        t.session_lanes[session, i] = t.session_lanes[session, i + 1]


def note(t: Any, lane: int, first_id: int, size: int) -> None:
    """Note that these ids arrived."""
    if first_id > t.newest_id[lane] + 1:
        t.first_after_loss[lane] = first_id
    t.newest_id[lane] = max(t.newest_id[lane], first_id + size - 1)


def has_room(t: Any, lane: int, first_id: int, size: int) -> bool:
    """Return whether these ids fit into a lane's table.

    None of their places may name a live node by another id.

    For an honest drafter they always fit. A drafter that repeats its nodes under new ids fills only its own lane.
    """
    if size > MAX_TABLE_SIZE:
        return False
    for node_id in range(first_id, first_id + size):
        at = node_id % MAX_TABLE_SIZE
        if t.table_ids[lane, at] not in (NONE, node_id) and t.table_nodes[lane, at] >= 0:
            return False
    return True


def find(t: Any, lane: int, node_id: int) -> int:
    """Return a live node, COMMITTED - length for a committed node, or else CUT."""
    at = node_id % MAX_TABLE_SIZE
    return int(t.table_nodes[lane, at]) if t.table_ids[lane, at] == node_id else CUT


def name(t: Any, lane: int, node_id: int, node: int) -> None:
    """Let an id of a lane name a node, or a committed length."""
    at = node_id % MAX_TABLE_SIZE
    t.table_ids[lane, at], t.table_nodes[lane, at] = node_id, node
    if node >= 0:
        t.table_next[lane, at] = t.first_ref[node]
        t.first_ref[node] = lane * MAX_TABLE_SIZE + at
        t.num_refs[lane] += 1


# --- nodes ------------------------------------------------------------------------------------------------------------


def align(t: Any, fresh: Fresh, head: dict[str, int], seen_before: int, parent_id: int) -> None:
    """Attach a node below its parent, note it as committed, or count it as dropped.

    `above` is the length of the transcript below which the node is attached. It is NONE if the parent is unknown or was
    cut.
    """
    session, length, above = fresh.session, t.length[fresh.session], head["base_len"]
    if parent_id >= 0:
        found = find(t, fresh.lane, parent_id)
        if found >= 0:
            fresh.parent, fresh.position = found, t.position[found] + 1
            attach(t, fresh)
            return
        above = NONE if found == CUT else COMMITTED - found
    if above == length:
        fresh.position = length
        attach(t, fresh)
    elif 0 <= above < length <= above + WINDOW and t.recent[session, above % WINDOW] == fresh.token:
        name(t, fresh.lane, fresh.node_id, COMMITTED - (above + 1))
    else:
        t.counts[session, ORPHANS if seen_before < parent_id < head["first_id"] else STALE] += 1


def attach(t: Any, fresh: Fresh) -> None:
    """Attach a node to the tree, or map its id to the sibling with the same token.

    A sampled node replaces a point mass with its token. A position has one sampled sibling group, the first that
    arrived. Later sampled nodes at this position count as point masses. This is exact for any point masses.
    """
    siblings = siblings_from(t, t.first_root[fresh.session] if fresh.parent == NONE else t.first_child[fresh.parent])
    node = next((at for at in siblings if t.token[at] == fresh.token), NONE)
    if fresh.group != NONE and any(t.group[at] not in (NONE, fresh.group) for at in siblings):
        fresh.group = NONE
    if node == NONE:
        if t.num_live[fresh.session] >= MAX_LIVE_NODES:
            return
        node = new_node(t, fresh, siblings[-1] if siblings else NONE)
    elif t.node_lane[node] == fresh.lane:
        t.node_id[node] = fresh.node_id  # sent again
    name(t, fresh.lane, fresh.node_id, node)
    if fresh.group != NONE:
        draw(t, node, fresh)


def siblings_from(t: Any, node: int) -> list[int]:
    """Return a node and the siblings after it, in order of arrival."""
    found: list[int] = []
    while node != NONE:
        found.append(node)
        node = t.next_sibling[node]
    return found


def new_node(t: Any, fresh: Fresh, last: int) -> int:
    """Attach a node after the last of its siblings."""
    t.num_free[_NODES] -= 1
    node = int(t.free_nodes[t.num_free[_NODES]])
    t.token[node], t.parent[node], t.position[node] = fresh.token, fresh.parent, fresh.position
    t.first_child[node] = t.next_sibling[node] = t.first_ref[node] = t.group[node] = t.depends_on[node] = NONE
    t.node_session[node], t.node_lane[node], t.node_id[node] = fresh.session, fresh.lane, fresh.node_id
    t.rank[node], t.is_measured[node], t.reach_prob[node] = 0, fresh.is_measured, 0.0
    t.score[node] = t.predicted[node] = fresh.score
    t.arrived[node] = fresh.arrived
    if last != NONE:
        t.next_sibling[last] = node
    elif fresh.parent != NONE:
        t.first_child[fresh.parent] = node
    else:
        t.first_root[fresh.session] = node
    t.num_live[fresh.session] += 1
    return node


def draw(t: Any, node: int, drawn: Fresh) -> None:
    """Turn a point mass into the sampled node; its children stay.

    The measured acceptance of earlier such nodes counts only if it exceeds the prediction. Otherwise a few bad drafts
    would keep all later ones from being tried.
    """
    if t.group[node] == NONE:
        t.group_size[drawn.group] += 1
    t.group[node], t.rank[node] = drawn.group, drawn.rank
    t.node_lane[node], t.node_id[node] = drawn.lane, drawn.node_id
    accept_prob = Calibration(t.sampled_trials, t.sampled_accepted).probability(drawn.score)
    t.predicted[node] = drawn.score
    t.score[node] = max(drawn.score, math.log(accept_prob)) if accept_prob > 0 else drawn.score


def settle(t: Any, node: int, becomes: int) -> None:
    """Map all ids of a node to CUT or COMMITTED - length, and free its place."""
    at = t.first_ref[node]
    while at != NONE:
        lane, place = divmod(at, MAX_TABLE_SIZE)
        t.table_nodes[lane, place] = becomes
        t.num_refs[lane] -= 1
        at = t.table_next[lane, place]
    group = t.group[node]
    if group != NONE:
        t.group_size[group] -= 1
        if not t.group_size[group]:
            t.free_groups[t.num_free[_GROUPS]] = group
            t.num_free[_GROUPS] += 1
    t.node_session[node] = NONE
    t.free_nodes[t.num_free[_NODES]] = node
    t.num_free[_NODES] += 1


def cut(t: Any, node: int) -> int:
    """Cut a node and all nodes below it; return the number of nodes cut."""
    num_cut, ending = 0, [node]
    while ending:
        node = ending.pop()
        ending += siblings_from(t, t.first_child[node])
        settle(t, node, CUT)
        num_cut += 1
    return num_cut
