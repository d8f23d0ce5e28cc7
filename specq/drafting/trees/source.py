"""A head as a source that drafts whole trees from the target's hidden states.

The step in which the target makes tokens returns hidden states of some of its layers, also for the prompt's rows. They
stay on the device. `begin` lets the head compute the new rows of the text and grow a tree for each session. The tree
has the shape that the job or the configuration asks for, else it grows best first. `collect` waits for the trees. All
nodes are point masses. Scores are the head's own log-probabilities, calibrated by the outcomes of this lane's nodes.

If the device grows trees without the host, best-first trees have a fixed number of nodes at each level. The step is
launched behind the trees before the host has read them. So the device does not wait for the host (`grown_trees`). With
few sessions these trees are broad and deep, with many sessions they are chains.

A prompt's part in the engine's prefix cache has no hidden states. The head works without them.

As for every source, measurement decides whether it pays off. No I/O; time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np

from specq.drafting.interface import Pending
from specq.drafting.rank_trees import DraftingParams, RankTree, likeliest, rooms_of, tree_for
from specq.drafting.trees.grown_trees import (
    ShapeChoice,
    batch_of_grown,
    batch_of_unread,
    put_read,
    shapes_for,
)
from specq.drafting.trees.interface import Grown, TreeHead, TreeRequest
from specq.drafting.worker import LEAST_CHANCE
from specq.protocol import LANES, IntpArray, Speculation, UInt8Array
from specq.verification import NO_TOKEN, DeviceLines, DeviceTokens
from specq.verifier.sources import (
    FLOOR,
    NONE,
    Budget,
    ComputedDrafts,
    DraftBatch,
    DraftSource,
    Rounds,
    Session,
    UnreadLayout,
    accepted_paths,
    followed_rows,
    may_be_unread,
)

ALL_NODES = 256  # of all sessions together, but at least one for each level of each session
NO_SHAPE = Speculation()


class _Plan(NamedTuple):
    """The trees of some sessions.

    tree          the fixed shape. None: best first.
    most, depth   maximum nodes and levels of each tree.
    level_sizes   how many nodes at each level. (): best first without this limit.
    """

    tree: RankTree | None
    most: int
    depth: int
    level_sizes: tuple[int, ...] = ()


class _Begun(NamedTuple):
    """Growing trees of one kind: the sessions, the levels of each, and the pending result."""

    sessions: list[Session]
    plan: _Plan
    depths: list[int]
    pending: Pending[Grown]


class _Unread(NamedTuple):
    """Trees grafted before the host has read them, and the tokens behind their handles."""

    begun: _Begun
    drafted: DeviceTokens


class TreeSource(DraftSource):
    """Drafts with a head, at most `depth` levels. A kind of heads has a class with its `name`.

    tree: the paths of the tree for jobs that ask for no shape. (): best first.

    most_nodes    of one session, best first.
    reads_prompt  whether the head reads the hidden states of the whole context, not only of the last token.
    level_share   time of drafting a level, as a share of a step without drafts.
    """

    most_nodes: ClassVar[int] = 48
    reads_prompt: ClassVar[bool] = True
    level_share: ClassVar[float] = 0.08  # an EAGLE-3 head's pass

    def __init__(self, head: TreeHead, depth: int = 8, tree: tuple[tuple[int, ...], ...] = ()) -> None:
        self.layers, self._lane = head.layers, LANES[self.name]
        self.head, self._depth, self._tree = head, depth, tree
        self._known: dict[int, Session] = {}  # sessions whose text the head knows
        self._refused: dict[int, Session] = {}
        self._params = DraftingParams()
        self._begun: list[_Begun] = []
        self._has_sizes = head.runs_beside_host and not tree
        self._shapes = ShapeChoice(depth, self.level_share)
        self._unread: _Unread | None = None
        self._unlearned: tuple[tuple[int, ...], IntpArray, UInt8Array] | None = None
        self._verified: _Begun | None = None  # the trees in the step in flight, if they were grafted unread

    @property
    def has_work(self) -> bool:
        return bool(self._begun)

    # --- a round ------------------------------------------------------------------------------------------------------

    def begin(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        """Let the head grow trees for the sessions whose text it knows."""
        known, end_of = self._known, self.head.known
        sessions = [
            one for one in sessions if known.get(one.session_id) is one and end_of(one.session_id) == len(one.token_ids)
        ]
        rooms = rooms_of(sessions)
        if min(rooms, default=1) < 1:
            sessions = [one for one, room in zip(sessions, rooms, strict=True) if room > 0]
            rooms = [room for room in rooms if room > 0]
        self._begun = self._start(sessions, rooms, budget) if sessions else []
        return bool(self._begun)

    def _start(self, sessions: list[Session], rooms: list[int], budget: Budget) -> list[_Begun]:
        """Begin trees of these sessions; `rooms`: the levels for which each has room."""
        alike: dict[_Plan, list[int]] = {}  # usually all sessions have the same tree
        sizes = self._shapes.choose(len(sessions), budget.curve) if self._has_sizes else ()
        for i, session in enumerate(sessions):
            alike.setdefault(self._plan(session, len(sessions), sizes), []).append(i)
        kinds = [
            ([sessions[i] for i in which], plan, [min(plan.depth, rooms[i]) for i in which])
            for plan, which in alike.items()
        ]
        requests = [
            TreeRequest(
                *([one.session_id for one in own], [self._params.of(one) for one in own]),
                depth=max(depths),
                ranks=plan.tree,
                floor=math.log(FLOOR),
                level_sizes=plan.level_sizes,
                most=plan.most,
            )
            for own, plan, depths in kinds
        ]
        return [_Begun(*kind, one) for kind, one in zip(kinds, self.head.start(requests), strict=True)]

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Return the started trees; those of sessions that have ended since then have no effect."""
        begun, self._begun = self._begun, []
        self._learn()
        if len(begun) != 1 or not begun[0].plan.level_sizes:
            return [self._batch(one, one.pending.collect()) for one in begun]
        (trees,) = begun
        unread = self._batch_of_unread(trees, budget)
        return [self._batch(trees, self._read(trees))] if unread is None else [unread]

    def _read(self, begun: _Begun) -> Grown:
        """Wait for trees of given level sizes, and learn the usual probabilities."""
        grown = begun.pending.collect()
        is_node = np.isfinite(grown.reach)  # else the node is missing, or the head's output is NaN
        likely = np.exp(np.where(is_node, grown.reach, -np.inf).astype(np.float64))
        self._shapes.usual.promise(UnreadLayout.of(begun.plan.level_sizes), likely)
        return grown._replace(token_ids=np.where(is_node, grown.token_ids, np.int32(NO_TOKEN)))

    def _learn(self) -> None:
        """Learn the outcomes of the last trees that were grafted unread.

        It comes after the start of the next trees, because the device would wait for it.
        """
        if self._unlearned is not None:
            (sizes, counts, is_accepted), self._unlearned = self._unlearned, None
            self._shapes.usual.learn(UnreadLayout.of(sizes), counts, is_accepted > 0)

    def _batch_of_unread(self, begun: _Begun, budget: Budget) -> DraftBatch | None:
        """Return trees before the host has read them, if possible; see `grown_trees`."""
        layout = UnreadLayout.of(begun.plan.level_sizes)
        likely = self._shapes.usual.of(layout) if self.head.limit_vocab <= budget.unread_vocab else None
        if likely is None or not may_be_unread(begun.sessions, 1):
            return None
        nodes, depths = begun.pending.on_device(), self._depths(begun)
        if nodes is None or not depths.any():
            return None
        lines = None if layout.is_chain else DeviceLines(nodes.lines.reshape(len(nodes.lines), -1), len(likely))
        self._unread = _Unread(begun, DeviceTokens(nodes.token_ids.reshape(-1), tree=lines))
        return batch_of_unread(begun.sessions, self._unread.drafted, layout, depths, likely, self._lane)

    def _depths(self, begun: _Begun) -> IntpArray:
        """Return how many levels each session takes, i64[sessions]; 0 for a session that has ended."""
        is_here = [self._known.get(one.session_id) is one and one.place != NONE for one in begun.sessions]
        return np.array(begun.depths, np.intp) * is_here

    def read(self, clock: Callable[[], float]) -> None:
        """Replace the handles of unread trees by their nodes; see `DraftSource`."""
        assert self._unread is not None
        (begun, drafted), self._unread = self._unread, None
        trees = next(session.trees for session in begun.sessions if session.place != NONE)
        grown = self._read(begun)
        drafted.read(grown.token_ids.reshape(-1))
        if drafted.tree is not None:
            drafted.tree.parents = grown.parents.reshape(-1)
        put_read(trees, drafted, grown)
        self._verified = begun

    def _batch(self, begun: _Begun, grown: Grown) -> DraftBatch:
        """Return the drafts of sessions that have the same tree."""
        plan = begun.plan
        reach = np.where(grown.depths < np.array(begun.depths)[:, None], grown.reach, np.float32(-np.inf))
        wanted = likeliest(reach, plan.most, math.log(FLOOR) if plan.tree is None else -np.inf)
        return batch_of_grown(grown, begun.sessions, wanted, self._lane, math.log(LEAST_CHANCE))

    def _plan(self, session: Session, num_sessions: int, level_sizes: tuple[int, ...]) -> _Plan:
        speculation = session.speculation
        share = max(self._depth, min(self.most_nodes, ALL_NODES // num_sessions))
        if speculation == NO_SHAPE and level_sizes:
            return _Plan(None, sum(level_sizes), len(level_sizes), level_sizes)
        if speculation == NO_SHAPE and not self._tree:
            return _Plan(None, share, self.levels_for(share))
        tree = tree_for(speculation, self._depth, self._tree)
        most = speculation.max_nodes or (share if tree is None else len(tree.ranks))
        is_asked = tree is not None or speculation.max_nodes
        depth = self._depth if is_asked else self.levels_for(most)
        return _Plan(tree, most, min(speculation.max_depth or depth, depth))

    def levels_for(self, num_nodes: int) -> int:
        """Return the maximum number of levels that grow best first for `num_nodes` nodes."""
        return self._depth

    def wants_prompt(self, session: Session) -> bool:
        return bool(self.reads_prompt and session.takes_drafts)

    def observe(self, rounds: Rounds, computed: Sequence[ComputedDrafts]) -> None:
        """Give the head the hidden states of the texts' rows, and the token after each.

        They are the rows of a step's computed tokens, and of the accepted path.
        """
        verified, self._verified = self._verified, None
        if verified is not None:
            self._unlearned = _verdicts(verified, rounds)
        paths = accepted_paths(rounds)
        for part in computed:
            if part.output.hidden is not None:
                followed = [one for _, one in followed_rows(part, paths, self._takes)]
                self.head.observe(part.output.hidden.values, followed)

    def _takes(self, session: Session) -> bool:
        """Return whether a session's text is followed.

        If not, it is forgotten, and so is an earlier session with the same id.
        """
        session_id = session.session_id
        if self._known.get(session_id) is session and not session.finish:
            return True
        if not session.is_open or not session.takes_drafts or self._refused.get(session_id) is session:
            return False
        if self._known.get(session_id, session) is not session:
            self.close(self._known[session_id])
        if session.finish:
            self._forget(session_id)
            return False
        self._known[session_id] = session
        return True

    # --- sessions -----------------------------------------------------------------------------------------------------

    def refuse(self, session: Session) -> None:
        """Stop drafting for a session."""
        self.close(session)
        self._refused[session.session_id] = session

    def close(self, session: Session) -> None:
        """Forget a session, known or not."""
        self._forget(session.session_id)
        self._refused.pop(session.session_id, None)

    def _forget(self, session_id: int) -> None:
        self._known.pop(session_id, None)
        self._params.forget(session_id)
        self.head.close(session_id)


def _verdicts(trees: _Begun, rounds: Rounds) -> tuple[tuple[int, ...], IntpArray, UInt8Array] | None:
    """Return the outcomes of trees that were grafted unread, as arguments of `UsualReach.learn`.

    None if no node was verified. Other sessions of the step may have nodes of other trees.
    """
    own = {session.session_id for session in trees.sessions}
    which = [i for i, session in enumerate(rounds.sessions) if session.session_id in own]
    of_them = rounds if len(which) == len(rounds) else rounds.take(np.array(which, np.intp))
    return (trees.plan.level_sizes, of_them.num_nodes, of_them.is_accepted) if len(of_them.nodes) else None


def usual_sizes(most: int) -> Callable[[int], list[tuple[int, ...]]]:
    """Return a function from a number of sessions to the level sizes of their trees, of at most `most` levels."""
    return partial(shapes_for, depth=most)
