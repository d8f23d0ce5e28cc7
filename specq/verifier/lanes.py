"""A lane of a session: one drafter's node table, and how often the target accepted what it predicted.

A drafter numbers its nodes; later nodes name their parents by these ids. The node table resolves an id to a node of the
tree or, once the node is part of the transcript, to a committed length.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specq.drafting import Calibration
from specq.verifier.draft_tree import CUT, LIVE, Node

MAX_LANES = 8  # of a session
MAX_TABLE_SIZE = 4096  # ids in a lane's node table
MANY_IDS = 1024  # from this size on, ids that no longer resolve are removed
REMEMBERED = 256  # ids of nodes committed at most this many positions ago stay resolvable


@dataclass(slots=True)
class Lane:
    """One drafter's nodes in a session.

    node_table   node id -> its node, or the committed length that the node ends, if it was committed before it arrived
    seen         the newest node id that arrived; -1: none
    first_after_loss  the first node id after those that were last lost, or dropped, on their way
    """

    node_table: dict[int, Node | int] = field(default_factory=dict)
    seen: int = -1
    first_after_loss: int = 0
    calibration: Calibration = field(default_factory=Calibration)

    def note(self, first_id: int, num_nodes: int) -> None:
        """Note that these ids arrived."""
        if first_id > self.seen + 1:
            self.first_after_loss = first_id
        self.seen = max(self.seen, first_id + num_nodes - 1)

    def find(self, node_id: int) -> Node | int | None:
        """Return a live node, or the committed length that a committed node ends, or None if it is unknown or was cut."""
        at = self.node_table.get(node_id)
        if at is None or isinstance(at, int) or at.stands == LIVE:
            return at
        return None if at.stands == CUT else at.stands

    def prune(self, length: int) -> None:
        """Remove the ids of cut nodes, and of those committed long ago; `length` tokens are committed."""
        oldest = length - REMEMBERED
        found = {node_id: self.find(node_id) for node_id in self.node_table}
        self.node_table = {
            i: at for i, at in found.items() if at is not None and (isinstance(at, Node) or at >= oldest)
        }

    def has_room(self, num_nodes: int, length: int) -> bool:
        """Return whether this many more ids fit, `length` tokens being committed. For an honest drafter they always do; one
        that repeats itself under new ids fills its own lane only."""
        if len(self.node_table) + num_nodes > MAX_TABLE_SIZE:
            self.prune(length)
        return len(self.node_table) + num_nodes <= MAX_TABLE_SIZE

    @property
    def is_idle(self) -> bool:
        """Whether none of its nodes is live."""
        return not any(isinstance(self.find(node_id), Node) for node_id in self.node_table)


def lane_of(lanes: dict[int, Lane], lane_id: int) -> Lane | None:
    """Return a lane of a session, a new one if need be. If there are too many, a new one replaces the oldest that is idle;
    None if no lane is idle."""
    if lane_id not in lanes and len(lanes) >= MAX_LANES:
        idle = next((i for i, lane in lanes.items() if lane.is_idle), None)
        if idle is None:
            return None
        del lanes[idle]
    return lanes.setdefault(lane_id, Lane())
