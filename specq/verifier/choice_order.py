"""In which order the nodes of a tree are chosen where some are sampled.

Likeliest first, but no node before those whose tokens may have decided whether it was sent (decision 0008). A drafter that draws
expands the likeliest node next, and what it draws there says what is likeliest then: so whether a node was sent may depend on
the token of each node that had been expanded before, in any branch. A drafter sends its nodes in the order in which they grew, and
the first child of a node together with its expansion, so that the verifier sees what was expanded when. Two things hide it:

    a synchronous round   is the likeliest of all that was grown, in the order of likelihood: whether a node is among them depends on
                          each node before it
    a lost message        may have held any expansion: what comes after it depends on all nodes that came before

A node that is not chosen (it is too unlikely, or the engine takes no trees) is never verified in this step: nothing waits for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from specq.verifier.draft_tree import Node
from specq.verifier.session import Session


def order_of_choice(session: Session, nodes: Sequence[Node]) -> Sequence[Node]:
    """Return nodes in the order in which they are chosen, with `depends_on` set: the last of those that must be chosen before one
    may be looked at.

    `nodes` are what `session.candidates` returned, or some of them; if drafts are point masses, any order does. Nodes that wait
    for one another in a circle, which only a broken drafter sends, are left out.
    """
    if not session.takes_distributions:
        return nodes
    order = _Order(nodes)
    # Also those which are too unlikely to be chosen: they say what was expanded.
    live = sorted(session.live_nodes(), key=lambda node: node.node_id)
    for lane_id in {node.lane for node in nodes if node.distribution is not None}:
        grown = [node for node in live if node.lane == lane_id]
        first_after_loss = session.lanes[lane_id].first_after_loss
        order.wait_for_growth(grown, _expanded_before(grown, first_after_loss, is_sync=session.is_sync))
    return order.likeliest_first()


def _expanded_before(grown: Sequence[Node], first_after_loss: int, *, is_sync: bool) -> Iterator[Sequence[Node]]:
    """Yield for each of a lane's nodes, in the order in which they were sent, which more than for those before it must be known."""
    is_before_loss = True
    for i, node in enumerate(grown):
        if is_before_loss and node.node_id >= first_after_loss:
            is_before_loss = False
            yield grown[:i]
        elif is_sync:
            yield grown[max(i - 1, 0) : i]
        else:
            yield [node.parent] if node.parent is not None else []


class _Order:
    """Who waits for whom. Nodes are named by their places among `nodes`; further numbers are points in a lane's growth, which are
    reached when all nodes are chosen that had been expanded by then."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.index = {id(node): i for i, node in enumerate(nodes)}
        self.num_awaited = [0] * len(nodes)
        self.waiting: defaultdict[int, list[int]] = defaultdict(list)
        for i, node in enumerate(nodes):
            self._wait(i, node.depends_on)

    def _wait(self, i: int, node: Node | None) -> None:
        awaited = self.index.get(id(node))
        if awaited is not None:
            self._wait_for(i, awaited)

    def _wait_for(self, i: int, awaited: int) -> None:
        self.num_awaited[i] += 1
        self.waiting[awaited].append(i)

    def wait_for_growth(self, grown: Sequence[Node], expanded: Iterator[Sequence[Node]]) -> None:
        """Let each of a lane's nodes wait for the sampled ones that had been expanded before."""
        point: int | None = None
        for node, fresh in zip(grown, expanded, strict=True):
            sampled = [one for one in fresh if one.distribution is not None]
            if sampled:
                last, point = point, len(self.num_awaited)
                self.num_awaited.append(0)
                for one in sampled:
                    self._wait(point, one)
                if last is not None:
                    self._wait_for(point, last)
            if point is not None and id(node) in self.index:
                self._wait_for(self.index[id(node)], point)

    def likeliest_first(self) -> list[Node]:
        """Return the nodes in order: children after a parent that waits, as after any other."""
        for i, node in enumerate(self.nodes):
            if node.parent is not None and self.num_awaited[self.index[id(node.parent)]]:
                self._wait(i, node.parent)
            node.depends_on = None
        ready = [self._entry(i) for i, count in enumerate(self.num_awaited) if not count]
        heapify(ready)
        chosen: list[Node] = []
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
        """Return what sorts the likeliest node first, and before all nodes the points that are reached."""
        return (-self.nodes[i].reach_prob, i) if i < len(self.nodes) else (-2.0, i)

    def _know(self, i: int, chosen: Sequence[Node]) -> None:
        if i < len(self.nodes) and chosen:
            self.nodes[i].depends_on = chosen[-1]
