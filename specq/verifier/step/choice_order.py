"""The order in which the nodes of a tree are chosen if some are sampled.

The likeliest node comes first. But it comes after the nodes whose tokens may have decided its sending (decision 0008).
A drafter that samples expands the likeliest node next. The tokens that it draws there decide which node is likeliest
then. So the sending of a node may depend on the token of any node expanded before, in any branch.

A drafter sends its nodes in the order of their growth. It sends the first child of a node together with its expansion.
So the verifier sees the order of the expansions. Two cases hide it:

    a synchronous round   it is the likeliest part of the grown tree, in the order of likelihood. So whether a node is
                          in it depends on each node before it
    a lost message        it may have held any expansion. So everything after it depends on all nodes before it

Other sources draft point masses. One below a sampled node without sampled children shows that the drafter has not yet
expanded that node. In mode "sync", one beside sampled nodes shows that it has not drafted the same node. Both depend on
the same tokens. So such a point mass waits for all nodes that were expanded.

A node may be left out if it is too unlikely, or if the engine does not support trees. Such a node is not verified in
this step. No other node waits for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from specq.verifier.sessions.session import Session
from specq.verifier.trees import NONE
from specq.verifier.trees.arrays import MAX_TABLE_SIZE


def order_of_choice(session: Session, nodes: Sequence[int]) -> list[int]:
    """Return nodes in the order in which they are chosen, with `depends_on` set.

    `depends_on` of a node is the last node that must be chosen before it.

    `nodes` are some or all of the session's candidates. If all drafts are point masses, any order is allowed. Nodes
    that wait for one another are left out. Only a broken drafter sends them.
    """
    if not session.takes_distributions:
        return list(nodes)
    t = session.trees.views
    order = _Order(t, nodes)
    # Include the nodes that are too unlikely to be chosen: they show what was expanded.
    live = sorted(session.trees.operations.live(session.place), key=lambda node: t.node_id[node])
    for lane in {t.node_lane[node] for node in nodes if t.group[node] != NONE}:
        grown = [node for node in live if t.node_lane[node] == lane]
        is_sync, first_after_loss = session.speculation.mode == "sync", t.first_after_loss[lane]
        expanded = _expanded_before(t, grown, first_after_loss, is_sync=is_sync)
        order.wait_for_growth(grown, expanded)
        order.let_others_wait(lane, _expanded(t, grown, first_after_loss, is_sync=is_sync), is_sync=is_sync)
    return order.likeliest_first()


def _expanded_before(t: Any, grown: Sequence[int], first_after_loss: int, *, is_sync: bool) -> Iterator[Sequence[int]]:
    """Yield, for each node of a lane in order, further nodes to be known first.

    These are the nodes beyond the ones that the nodes before it need.
    """
    is_before_loss = True
    for i, node in enumerate(grown):
        if is_before_loss and t.node_id[node] >= first_after_loss:
            is_before_loss = False
            yield grown[:i]
        elif is_sync:
            yield grown[max(i - 1, 0) : i]
        else:
            yield [t.parent[node]] if t.parent[node] != NONE else []


def _expanded(t: Any, grown: Sequence[int], first_after_loss: int, *, is_sync: bool) -> set[int]:
    """Return the nodes of a lane that were expanded, or may have been."""
    if is_sync or t.node_id[grown[0]] < first_after_loss:  # a lost message may have held children of any
        return set(grown)
    return {t.parent[node] for node in grown} - {NONE}


def _lanes_of(t: Any, node: int) -> Iterator[int]:
    """Yield the lanes that have drafted a node."""
    ref = t.first_ref[node]
    while ref != NONE:
        lane, at = divmod(ref, MAX_TABLE_SIZE)
        yield lane
        ref = t.table_next[lane, at]


class _Order:
    """Which node waits for which.

    Nodes are named by their places in `nodes`. Further numbers are points in a lane's growth. A point is reached when
    all nodes that had been expanded by then are chosen.
    """

    def __init__(self, t: Any, nodes: Sequence[int]) -> None:
        self.t, self.nodes = t, nodes
        self.index = {node: i for i, node in enumerate(nodes)}
        self.num_awaited = [0] * len(nodes)
        self.waiting: defaultdict[int, list[int]] = defaultdict(list)
        for i, node in enumerate(nodes):
            self._wait(i, t.depends_on[node])

    def _wait(self, i: int, node: int) -> None:
        awaited = self.index.get(node)
        if awaited is not None:
            self._wait_for(i, awaited)

    def _wait_for(self, i: int, awaited: int) -> None:
        self.num_awaited[i] += 1
        self.waiting[awaited].append(i)

    def wait_for_growth(self, grown: Sequence[int], expanded: Iterator[Sequence[int]]) -> None:
        """Let each node of a lane wait for the sampled nodes expanded before it."""
        point: int | None = None
        for node, fresh in zip(grown, expanded, strict=True):
            sampled = [one for one in fresh if self.t.group[one] != NONE]
            if sampled:
                last, point = point, len(self.num_awaited)
                self.num_awaited.append(0)
                for one in sampled:
                    self._wait(point, one)
                if last is not None:
                    self._wait_for(point, last)
            if point is not None and node in self.index:
                self._wait_for(self.index[node], point)

    def let_others_wait(self, lane: int, expanded: set[int], *, is_sync: bool) -> None:
        """Let point masses wait for what a lane has expanded, where it might have drafted the same node."""
        t, has_sampled = self.t, {self.t.parent[node] for node in self.nodes if self.t.group[node] != NONE}
        others = [
            i
            for i, node in enumerate(self.nodes)
            if t.group[node] == NONE
            and (is_sync or t.parent[node] not in has_sampled)
            and self._might_draft(lane, node, is_sync=is_sync)
        ]
        if others:
            point = len(self.num_awaited)
            self.num_awaited.append(0)
            for one in expanded:
                if t.group[one] != NONE:
                    self._wait(point, one)
            for i in others:
                self._wait_for(i, point)

    def _might_draft(self, lane: int, node: int, *, is_sync: bool) -> bool:
        """Return whether a lane has drafted the parent of a node (in mode "sync" also the root), and not the node."""
        parent = self.t.parent[node]
        has_drafted = is_sync if parent == NONE else lane in _lanes_of(self.t, parent)
        return has_drafted and lane not in _lanes_of(self.t, node)

    def likeliest_first(self) -> list[int]:
        """Return the nodes in order; children come after their parent, also if it waits."""
        for i, node in enumerate(self.nodes):
            parent = self.t.parent[node]
            if parent != NONE and self.num_awaited[self.index[parent]]:
                self._wait(i, parent)
            self.t.depends_on[node] = NONE
        ready = [self._entry(i) for i, count in enumerate(self.num_awaited) if not count]
        heapify(ready)
        chosen: list[int] = []
        while ready:
            _, i = heappop(ready)
            if i < len(self.nodes):
                chosen.append(self.nodes[i])
            for waiting in self.waiting.get(i, ()):
                self.num_awaited[waiting] -= 1
                if not self.num_awaited[waiting]:
                    self._know(waiting, chosen)
                    heappush(ready, self._entry(waiting))
        return chosen

    def _entry(self, i: int) -> tuple[float, int]:
        """Return the sort key: reached points first, then the likeliest node."""
        return (-self.t.reach_prob[self.nodes[i]], i) if i < len(self.nodes) else (-2.0, i)

    def _know(self, i: int, chosen: Sequence[int]) -> None:
        if i < len(self.nodes) and chosen:
            self.t.depends_on[self.nodes[i]] = chosen[-1]
