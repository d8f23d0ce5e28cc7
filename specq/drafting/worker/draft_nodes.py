"""A session's drafted nodes, how they become a message, and what a drafter learns from their verdicts.

`AcceptanceStats` has the statistics of a drafter over all its sessions: the acceptance of its drafts, and whether
drafting is useful.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specq.drafting import CONTEXT, Children
from specq.drafting.worker.shapes import Path
from specq.protocol import DraftDistribution, pack_distributions
from specq.verification import NO_TOKEN, Calibration

ROOT = 0  # the place of the committed context
NOT_SENT = -1
LEAST_CHANCE = 1e-6  # lower bound of a node's acceptance probability


class NewChain(NamedTuple):
    """Drafted levels, the first below a node, and each other one below the first node of the level before.

    child_ids  `width` ids for each level. A level uses the first ones.
    The lists have the values of one level after the other:
    chances    the measured probability of acceptance, given the parent.
    scores     its logarithm.
    """

    parent: int
    levels: Sequence[Children]
    child_ids: Sequence[int]
    width: int
    token_ids: list[int]
    predicted: list[float]
    chances: list[float]
    scores: list[float]


class DraftTree:
    """The live nodes of a session as columns, in the order in which they grew. The context is the first, at ROOT.

    A node is its place in the columns, until the next verdict. Parents come before their children. Siblings lie side by
    side, because a node is expanded once.

    node_ids         the ids that the drafter knows the nodes by.
    parents          their places.
    predicted        the drafter's log-probability given the parent.
    scores           the same after calibration.
    log_reach_probs  log of the cumulative acceptance probability, counted from where drafting began.
    wire_ids         the ids that the verifier knows the nodes by, or NOT_SENT.
    children         for each expanded node, the places of its children.
    drawn_from       for an expanded node, the distribution that its children were drawn from, unless they are point
                     masses.
    """

    __slots__ = (
        *("node_ids", "token_ids", "parents", "predicted", "scores", "log_reach_probs", "wire_ids"),
        *("children", "drawn_from"),
    )

    def __init__(self) -> None:
        self.node_ids, self.token_ids, self.parents, self.wire_ids = [CONTEXT], [NO_TOKEN], [ROOT], [NOT_SENT]
        self.predicted, self.scores, self.log_reach_probs = [0.0], [0.0], [0.0]
        self.children: dict[int, range] = {}
        self.drawn_from: dict[int, DraftDistribution] = {}

    def __len__(self) -> int:
        """Return the number of nodes, without the context."""
        return len(self.node_ids) - 1

    def add(self, chain: NewChain, room: int) -> None:
        """Add the first `room` nodes of a chain below a node that is not expanded."""
        node_ids, parents, reach, children = self.node_ids, self.parents, self.log_reach_probs, self.children
        parent, child_ids, width, scores = chain.parent, chain.child_ids, chain.width, chain.scores
        first, end = len(parents), 0
        for number, level in enumerate(chain.levels):
            start, end = end, min(end + len(level.token_ids), room)
            log_chances, base = scores[start:end], reach[parent]
            if level.distribution is not None:
                log_chances = drawn_log_chances(chain.chances[start:end])
                self.drawn_from[parent] = level.distribution
            for log_chance in log_chances:
                reach.append(base + log_chance)
                parents.append(parent)
            node_ids += child_ids[number * width : number * width + end - start]
            children[parent] = range(first + start, first + end)
            parent = first + start
            if end == room:
                break
        self.token_ids += chain.token_ids[:end]
        self.predicted += chain.predicted[:end]
        self.scores += scores[:end]
        self.wire_ids += [NOT_SENT] * end

    def below(self, node: int) -> Sequence[int]:
        """Return the children of a node."""
        return self.children.get(node, ())

    def by_level(self, node: int = ROOT) -> list[int]:
        """Return a node and all nodes below it, level by level."""
        found = [node]
        for place in found:  # it grows meanwhile
            found += self.below(place)
        return found

    def rank(self, node: int) -> int:
        """Return the place of a node among its siblings."""
        return node - self.children[self.parents[node]].start

    def depth(self, node: int) -> int:
        """Return how many tokens beyond the context a node is."""
        depth = 0
        while node != ROOT:
            node, depth = self.parents[node], depth + 1
        return depth

    def path(self, node: int) -> Path:
        """Return the ranks from the context down to a node."""
        ranks = list[int]()
        while node != ROOT:
            ranks.append(self.rank(node))
            node = self.parents[node]
        return tuple(ranks[::-1])

    def move_root(self, node: int) -> None:
        """Make a node the context, and keep only the nodes below it."""
        kept = sorted(self.by_level(node))
        new = {place: i for i, place in enumerate(kept)}
        for name in ("node_ids", "token_ids", "predicted", "scores", "log_reach_probs", "wire_ids"):
            column = getattr(self, name)
            setattr(self, name, [column[place] for place in kept])
        self.parents = [new.get(self.parents[place], ROOT) for place in kept]
        self.children = {
            new[place]: range(new[own[0]], new[own[0]] + len(own)) if own else own
            for place, own in self.children.items()
            if place in new
        }
        self.drawn_from = {new[place]: own for place, own in self.drawn_from.items() if place in new}
        self.node_ids[ROOT], self.wire_ids[ROOT] = CONTEXT, NOT_SENT


def drawn_log_chances(chances: Sequence[float]) -> list[float]:
    """Return the log-probabilities of acceptance of siblings that were drawn without replacement.

    A drawn child is judged if its earlier siblings are rejected. It never gets a higher rating than they do. So a cut
    by probability removes the last sibling. A node is never cut because of its own token.
    """
    found, left, most = list[float](), 1.0, 1.0
    for chance in chances:
        most = min(most, left * chance)
        left -= most
        found.append(math.log(max(most, LEAST_CHANCE)))
    return found


def distribution_fields(tree: DraftTree, nodes: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a `Draft` with the draft distributions of its nodes; none if all are point masses.

    Rule: a drawn node is sent with its draft distribution only together with all its earlier siblings, because it was
    drawn from what they left. Otherwise it is sent as a point mass, which is exact, too. So a distribution is included
    if the first of its siblings is.
    """
    if not tree.drawn_from:
        return {}
    first = [tree.parents[node] for node in nodes if not tree.rank(node)]
    row_of = {parent: row for row, parent in enumerate(parent for parent in first if parent in tree.drawn_from)}
    if not row_of:
        return {}
    distributions = [tree.drawn_from[parent] for parent in row_of]
    rows = [row_of.get(tree.parents[node], -1) for node in nodes]
    return {"q_size": max(len(one.ids) for one in distributions), **pack_distributions(distributions, rows)}


MAX_MISSES = 5  # after this many misses in a row, one pass is made every 2**5 verdicts


@dataclass(slots=True, eq=False)
class AcceptanceStats:
    """The statistics of sessions of one kind.

    num_misses    misses in a row. A miss is a pass without a node likely enough to be sent.
    is_silenced   whether the newest verdict asks for a higher acceptance probability than any node can have.
    """

    calibration: Calibration = field(default_factory=Calibration)
    num_misses: int = 0
    is_silenced: bool = False

    def count_pass(self, *, is_miss: bool) -> int:
        """Count a pass; return the backoff."""
        self.num_misses = min(self.num_misses + 1, MAX_MISSES) if is_miss else 0
        return self.backoff

    @property
    def backoff(self) -> int:
        """How many verdicts to wait before the next pass: 0 after a good pass, about twice as many after each miss."""
        return int(2**self.num_misses) - 1
