"""A session of the verifier, drafts for it, and what is drafted in it, for tests."""

from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np

from specq.protocol.messages import Draft, Open
from specq.protocol.params import SamplingParams, Speculation
from specq.protocol.types import DraftDistribution, Tree
from specq.verifier.sessions.grafting import batch_of, graft_batch
from specq.verifier.sessions.session import Session
from specq.verifier.step.choice_order import order_of_choice
from specq.verifier.trees import NEXT_IDS, NO_LIMIT, NONE, DraftTrees


def make_session(
    context: list[int] | None = None,
    tokens_left: int = 100,
    trees: DraftTrees | None = None,
    session_id: int = 7,
    speculation: Speculation | None = None,
) -> Session:
    """Return a session with a context, [1, 2, 3] by default."""
    token_ids = np.array(context or [1, 2, 3], np.int32)
    return Session(
        Open(
            session_id=session_id,
            epoch=1,
            prompt_len=len(token_ids),
            tokens_left=tokens_left,
            params=SamplingParams(),
            speculation=speculation or Speculation(),
            token_ids=token_ids,
        ),
        trees=trees,
    )


def make_draft(base_len: int, first_id: int, tokens: list[int], parents: list[int], lane: int = 0) -> Draft:
    """Return a draft with scores of log 0.5."""
    scores = np.full(len(tokens), np.log(0.5), np.float16)
    return Draft(
        session_id=7, epoch=1, lane=lane, base_len=base_len, first_id=first_id,
        token_ids=np.array(tokens, np.int32), parent_ids=np.array(parents, np.int32), scores=scores,
    )  # fmt: skip


class Node:
    """One node of the draft trees, its columns as attributes; other nodes that it names are nodes, or None."""

    def __init__(self, trees: DraftTrees, index: int) -> None:
        self.trees, self.index = trees, index

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.trees.views, name)[self.index]
        if name in ("parent", "depends_on"):
            return None if value == NONE else Node(self.trees, value)
        return value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and other.index == self.index

    def __hash__(self) -> int:
        return self.index

    @property
    def lane(self) -> int:
        return int(self.trees.lane_id[self.node_lane])

    @property
    def distribution(self) -> DraftDistribution | None:
        return self.trees.distributions[self.group] if self.group != NONE else None


def nodes_of(session: Session, indices: Iterable[int]) -> list[Node]:
    return [Node(session.trees, index) for index in indices]


def live_nodes(session: Session) -> list[Node]:
    """Return the nodes of a session's tree, parents first."""
    return nodes_of(session, session.trees.operations.live(session.place))


def candidates(session: Session, floor: float) -> list[Node]:
    """Return the nodes of a session that may be verified, wherever its text ends."""
    _, found = session.trees.operations.candidates([session.place], [NO_LIMIT], floor)
    return nodes_of(session, found.tolist())


def in_order_of_choice(session: Session, nodes: Sequence[Node]) -> list[Node]:
    return nodes_of(session, order_of_choice(session, [node.index for node in nodes]))


def tree_of(session: Session, nodes: Sequence[Node]) -> Tree:
    """Return nodes as an engine gets them."""
    indices = np.array([node.index for node in nodes], np.int32)
    arrays = session.trees.operations.flatten(np.array([0, len(nodes)], np.int64), indices)
    return Tree(*arrays, session.trees.distributions_of(indices))


def count_round(session: Session, nodes: Sequence[Node], accepted: Container[int]) -> None:
    """Count a round that verified these nodes, of which those at some places were accepted."""
    is_accepted = np.array([i in accepted for i in range(len(nodes))], np.uint8)
    indices = np.array([node.index for node in nodes], np.int32)
    session.trees.operations.count([session.place], [len(nodes)], indices, is_accepted, 0)


def commit(session: Session, tokens: Sequence[int], num_verified: int = 0) -> None:
    """Append tokens to a session's transcript, of a round that verified so many nodes."""
    session.token_ids.extend(tokens)
    session.trees.last_token[session.place] = session.token_ids[-1]
    session.trees.operations.commit([session.place], [len(tokens)], np.array(tokens, np.int32), [num_verified])


def observe(session: Session, lane: int, score: float, *, accepted: bool) -> None:
    """Teach a session's lane, a new one if need be, what became of a node."""
    nothing = np.zeros(0, np.int32)
    session.trees.graft(session.place, lane, session.length, NEXT_IDS, 0, nothing, nothing, nothing, arrived=0.0)
    session.lane(lane).calibration.observe(score, accepted)


def graft(session: Session, draft: Draft, now: float) -> int:
    """Attach a well-formed draft; return how many nodes became live."""
    return int(graft_batch(batch_of([(session, draft)]), now).num_added[0])


def paths(session: Session) -> set[tuple[int, ...]]:
    """Return the token paths of all live nodes."""
    found: dict[Node | None, tuple[int, ...]] = {None: ()}
    for node in live_nodes(session):
        found[node] = (*found[node.parent], node.token)
    return set(found.values()) - {()}
