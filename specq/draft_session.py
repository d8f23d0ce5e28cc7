"""One session at a drafter: the committed context, and the tree of nodes drafted beyond it.

Rules: the tree grows best first, within what the verifier says is worth it; a verdict moves its root and cuts the rest.
No I/O, no clock, no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from specq.calibration import Calibration
from specq.messages import Assign, Draft, Verdict
from specq.params import SamplingParams

MIN_REACH = 0.02  # nodes less likely than this to lie on the target's path are neither expanded nor sent
LOST_AFTER = 4  # verdicts in a row that used nothing of what was sent, though it was worth it
MOST_BARREN = 5  # after so many passes in vain, one is made every 2**5 verdicts
MAX_LIVE_NODES = 256


class DraftNode:
    """A drafted node. `claim` is the proposer's log-probability given the parent, `score` what experience makes of it,
    `reach` the sum of the scores from where drafting began."""

    __slots__ = ("children", "claim", "expanded", "node_id", "parent", "position", "reach", "score", "token", "wire_id")

    def __init__(
        self, node_id: int, token: int, parent: DraftNode | None, position: int, claim: float, score: float
    ) -> None:
        self.node_id, self.token, self.parent, self.position = node_id, token, parent, position
        self.claim, self.score = claim, score
        self.reach: float = score + (parent.reach if parent is not None else 0.0)
        self.children: dict[int, DraftNode] = {}
        self.expanded = False
        self.wire_id = -1  # what the verifier knows it by; -1: not sent


@dataclass(slots=True)
class Experience:
    """What a drafter has learned over all its sessions: how good its proposer is, and whether drafting is of use.

    num_barren counts the passes in a row that found nothing worth sending.
    """

    calibration: Calibration = field(default_factory=Calibration)
    num_barren: int = 0

    def count(self, *, fruitful: bool) -> int:
        """Count a pass; return how many verdicts to sit out: none after a good one, else twice as many each time."""
        self.num_barren = 0 if fruitful else min(self.num_barren + 1, MOST_BARREN)
        return self.rest

    @property
    def rest(self) -> int:
        return int(2**self.num_barren) - 1


class DraftSession:
    """One session's context and tree at the drafter."""

    def __init__(self, message: Assign, experience: Experience, max_ahead: int) -> None:
        self.session_id, self.epoch, self.lane = message.session_id, message.epoch, message.lane
        self.experience, self.max_ahead = experience, max_ahead
        self.params: SamplingParams = message.params
        self.token_ids: list[int] = message.token_ids.tolist()
        self.limit = message.prompt_len + message.params.max_tokens
        self.roots: dict[int, DraftNode] = {}
        self.root_expanded = False
        self.base_reach = 0.0  # reach of the committed context: what reaches count from
        self.next_id = 0
        self.next_wire_id = 0
        self.num_live = 0
        self.floor = math.log(MIN_REACH)  # least log-probability of a node that is expanded or sent
        self.rest = experience.rest  # verdicts to sit out
        self.unused = 0  # verdicts in a row that used nothing of what was sent

    @property
    def length(self) -> int:
        return len(self.token_ids)

    def live_nodes(self) -> Iterator[DraftNode]:
        """Yield the live nodes, parents first."""
        level = list(self.roots.values())
        while level:
            yield from level
            level = [child for node in level for child in node.children.values()]

    def frontier(self) -> Iterator[tuple[float, DraftNode | None]]:
        """Yield (log-probability, node) of what may be expanded next; None stands for the context itself."""
        ahead = min(self.max_ahead, self.limit - self.length - 1)
        if self.rest or ahead < 1 or self.num_live >= MAX_LIVE_NODES:
            return
        if not self.root_expanded:
            yield 0.0, None
            return
        for node in self.live_nodes():
            reach = node.reach - self.base_reach
            if not node.expanded and reach >= self.floor and node.position + 1 - self.length < ahead:
                yield reach, node

    def grow(
        self, parent: DraftNode | None, tokens: Sequence[int], claims: Sequence[float], ids: Sequence[int]
    ) -> None:
        """Hang a proposer's children below a node, or below the context."""
        siblings = self.roots if parent is None else parent.children
        position = self.length if parent is None else parent.position + 1
        for node_id, token, claim in zip(ids, tokens, claims, strict=False):
            if token not in siblings:
                score = math.log(max(self.experience.calibration.probability(claim), 1e-6))
                siblings[token] = DraftNode(node_id, token, parent, position, claim, score)
                siblings[token].reach += self.base_reach if parent is None else 0.0
                self.num_live += 1
        if parent is None:
            self.root_expanded = True
        else:
            parent.expanded = True

    def draft(self) -> Draft | None:
        """Return the nodes that are worth sending and were not sent yet, or None."""
        floor = self.floor + self.base_reach
        fresh = [node for node in self.live_nodes() if node.wire_id < 0 and node.reach >= floor]
        if not fresh:
            if not any(node.wire_id >= 0 for node in self.roots.values()):
                self.rest = self.experience.count(fruitful=False)
            return None
        self.experience.count(fruitful=True)
        first_id = self.next_wire_id
        for node in fresh:
            node.wire_id = self.next_wire_id
            self.next_wire_id += 1
        return Draft(
            session_id=self.session_id,
            epoch=self.epoch,
            lane=self.lane,
            base_len=self.length,
            first_id=first_id,
            token_ids=np.array([node.token for node in fresh], np.int32),
            parent_ids=np.array([-1 if node.parent is None else node.parent.wire_id for node in fresh], np.int32),
            scores=np.array([min(node.score, 0.0) for node in fresh], np.float16),
        )

    def commit(self, tokens: Sequence[int]) -> list[int]:
        """Append committed tokens and re-root; return the ids of the drafted nodes that they followed."""
        path: list[int] = []
        siblings: dict[int, DraftNode] | None = self.roots
        last: DraftNode | None = None
        for token in tokens:
            for node in siblings.values() if siblings else ():
                self.experience.calibration.observe(node.claim, node.token == token)
            last = siblings.get(token) if siblings is not None else None
            siblings = last.children if last is not None else None
            if last is not None:
                path.append(last.node_id)
        self.token_ids.extend(tokens)
        self.roots = siblings or {}
        self.root_expanded = last is not None and last.expanded
        self.base_reach = last.reach if last is not None else 0.0
        for node in self.roots.values():
            node.parent = None
        self.num_live = sum(1 for _ in self.live_nodes())
        return path

    def hear(self, verdict: Verdict) -> None:
        """Take in what the verifier says of worth, and notice when what was sent must have been lost.

        A node is drafted for the round after the next as well, by when what leads to it must have come true: so its
        chance may be as low as the square of what is worth verifying.
        """
        self.rest = max(0, self.rest - 1)
        worth = math.log(max(verdict.worth / 1000, math.sqrt(MIN_REACH)))
        self.floor = 2 * worth
        sent = any(node.wire_id >= 0 and node.reach - self.base_reach >= worth for node in self.roots.values())
        self.unused = self.unused + 1 if sent and not len(verdict.node_ids) else 0
        if self.unused >= LOST_AFTER:
            self.unused = 0
            for node in self.live_nodes():
                node.wire_id = -1
