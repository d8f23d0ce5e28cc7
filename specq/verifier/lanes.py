"""A lane of a session: one drafter's names for nodes, and what its claims turned out to be worth."""

from __future__ import annotations

from dataclasses import dataclass, field

from specq.drafting import Calibration
from specq.verifier.draft_tree import CUT, LIVE, Node

MAX_NAMES = 4096  # that a lane has for nodes
MANY_NAMES = 1024  # from which on those that say nothing any more are forgotten
REMEMBERED = 256  # ids of nodes committed so many positions ago stay resolvable


@dataclass(slots=True)
class Lane:
    """One drafter's names for nodes: id -> node, or the committed length at which it stood confirmed when it came. Names
    that say nothing any more are forgotten now and then."""

    names: dict[int, Node | int] = field(default_factory=dict)
    seen: int = -1
    calibration: Calibration = field(default_factory=Calibration)

    def find(self, node_id: int) -> Node | int | None:
        """Return a live node, or the committed length at which a node stands, or None if it is unknown or was cut."""
        at = self.names.get(node_id)
        if at is None or isinstance(at, int) or at.stands == LIVE:
            return at
        return None if at.stands == CUT else at.stands

    def forget(self, length: int) -> None:
        """Forget the names of cut nodes, and of those committed long ago; `length` tokens are committed."""
        oldest = length - REMEMBERED
        found = {node_id: self.find(node_id) for node_id in self.names}
        self.names = {i: at for i, at in found.items() if at is not None and (isinstance(at, Node) or at >= oldest)}

    def has_room(self, num_nodes: int, length: int) -> bool:
        """May it have so many more names, `length` tokens being committed? An honest one never has too many; one that
        says the same for ever does."""
        if len(self.names) + num_nodes > MAX_NAMES:
            self.forget(length)
        return len(self.names) + num_nodes <= MAX_NAMES
