"""An EAGLE-3 head: trees drafted by one layer, from what the target's own layers said of the text, and from its own states below it.

The step in which the target makes tokens gives hidden states of three of its layers, of the prompt's rows too. They stay on the device. `begin`
lets the head compute the rows of the text that are new and grow a tree for each session: of the shape that the job or the configuration
asks for, else best first. `collect` waits for the trees. All nodes are point masses. Scores are the head's own log-probabilities, calibrated by
what became of this lane's nodes.

With many sessions each has a chain instead, where the device grows it by itself: a step then has few nodes of each anyway, and it is launched behind
the chains before the host has read them, so that the device does not wait for the host (`unread_chains`). What earlier chains have promised stands for
their scores.

What of a prompt the engine has in its cache of prefixes has no hidden states: the head does without.

Whether it pays is measured, as of every source. No I/O; time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import structlog

from specq.drafting import LEAST_CHANCE
from specq.proposers import NO_TOKEN, Growing, Grown, TreeHead, TreeRequest
from specq.protocol import EAGLE_LANE, IntpArray, Speculation
from specq.verification import DeviceTokens
from specq.verifier.arms import EAGLE
from specq.verifier.grafting import DraftBatch
from specq.verifier.rounds import Rounds
from specq.verifier.scheduler import FLOOR
from specq.verifier.session import Session
from specq.verifier.sources.drafting_params import DraftingParams
from specq.verifier.sources.followed import accepted_paths, followed_rows
from specq.verifier.sources.grown_trees import batch_of_grown
from specq.verifier.sources.interface import Budget, Computed, DraftSource, Setup
from specq.verifier.sources.rank_trees import RankTree, chain_of, checked_tree, likeliest, rooms_of, tree_for
from specq.verifier.sources.unread_chains import UsualScores, batch_of_unread, may_be_unread, put_read
from specq.verifier.trees import NONE

log = structlog.get_logger(__name__)

MOST_NODES = 48  # of one session, best first
ALL_NODES = 256  # of all sessions together, but at least one for each level of each
MANY = 16  # sessions from which each has a chain
CHAIN = 4  # its levels: what is further down is not accepted often enough for what a level takes
NO_SHAPE = Speculation()


class _Plan(NamedTuple):
    """The trees of some sessions: of a fixed shape, or None, best first; and how many nodes and levels each may have."""

    tree: RankTree | None
    most: int
    depth: int


class _Begun(NamedTuple):
    """Trees of one kind that are being grown: the sessions, how many levels each takes, and what waits."""

    sessions: list[Session]
    plan: _Plan
    depths: list[int]
    wait: Growing

    @property
    def is_chain(self) -> bool:
        return self.plan.tree is not None and self.plan.tree is chain_of(self.plan.depth)


class _Unread(NamedTuple):
    """Chains that hang on the trees unread, and for what their handles stand."""

    begun: _Begun
    drafted: DeviceTokens


class EagleDrafter(DraftSource):
    """Drafts with a head, so many levels at most; `tree`: the paths of the tree for jobs that ask for no shape, () for best first."""

    name = EAGLE

    def __init__(self, head: TreeHead, depth: int = 8, tree: tuple[tuple[int, ...], ...] = ()) -> None:
        self.layers = head.layers
        self.head, self._depth, self._tree = head, depth, tree
        self._known: dict[int, Session] = {}  # those whose text the head knows
        self._refused: dict[int, Session] = {}
        self._params = DraftingParams()
        self._begun: list[_Begun] = []
        self._chain = min(CHAIN, depth) if head.runs_beside_host and not tree else 0  # levels; 0: there are no chains
        self._usual = UsualScores(self._chain, 1)
        self._unread: _Unread | None = None

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
        self._begun = self._start(sessions, rooms) if sessions else []
        return bool(self._begun)

    def _start(self, sessions: list[Session], rooms: list[int]) -> list[_Begun]:
        """Begin trees of these sessions, which have room for so many levels."""
        alike: dict[_Plan, list[int]] = {}  # as a rule all have the same tree
        for i, session in enumerate(sessions):
            alike.setdefault(self._plan(session, len(sessions)), []).append(i)
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
            )
            for own, plan, depths in kinds
        ]
        waits = self.head.start(requests)
        return [_Begun(*kind, wait) for kind, wait in zip(kinds, waits, strict=True)]

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Return the trees that were begun; those of sessions that have ended meanwhile have no effect."""
        begun, self._begun = self._begun, []
        if len(begun) != 1 or not begun[0].is_chain:
            return [_batch(one, one.wait()) for one in begun]
        (chains,) = begun
        unread = self._batch_of_unread(chains, budget)
        return [_batch(chains, self._read(chains)) if unread is None else unread]

    def _read(self, begun: _Begun) -> Grown:
        """Wait for chains, and learn what is usual."""
        grown = begun.wait()
        is_there = np.isfinite(grown.reach)
        token_ids = np.where(is_there, grown.token_ids, NO_TOKEN)
        self._usual.learn(np.exp(np.where(is_there, grown.scores, 0.0))[..., None], token_ids[..., None])
        return grown._replace(token_ids=token_ids)

    def _batch_of_unread(self, begun: _Begun, budget: Budget) -> DraftBatch | None:
        """Return chains before the host has read them, where that is possible; see `unread_chains`."""
        scores = self._usual.of(begun.plan.depth, 1) if self.head.limit_vocab <= budget.unread_vocab else None
        if scores is None or not may_be_unread(begun.sessions, 1):
            return None
        tokens = begun.wait.on_device()
        counts = self._counts(begun)
        if tokens is None or not counts.any():
            return None
        self._unread = _Unread(begun, DeviceTokens(tokens))
        return batch_of_unread(begun.sessions, self._unread.drafted, counts, scores, EAGLE_LANE, is_measured=False)

    def _counts(self, begun: _Begun) -> IntpArray:
        """Return how many levels each session takes, i64[sessions]: none where it has ended meanwhile."""
        is_here = [self._known.get(one.session_id) is one and one.place != NONE for one in begun.sessions]
        return np.array(begun.depths, np.intp) * is_here

    def read(self, clock: Callable[[], float]) -> None:
        """Put the tokens and scores of chains in place that hang on the trees unread; see `DraftSource`."""
        assert self._unread is not None
        (begun, drafted), self._unread = self._unread, None
        trees = next(session.trees for session in begun.sessions if session.place != NONE)
        grown = self._read(begun)  # [sessions, depth]
        drafted.values = grown.token_ids.T.reshape(-1)
        put_read(trees, drafted.values, np.maximum(grown.scores, math.log(LEAST_CHANCE)).T.reshape(-1))

    def _plan(self, session: Session, num_sessions: int) -> _Plan:
        speculation = session.speculation
        share = max(self._depth, min(MOST_NODES, ALL_NODES // num_sessions))
        if speculation == NO_SHAPE and self._chain and num_sessions >= MANY:
            return _Plan(chain_of(self._chain), self._chain, self._chain)
        if speculation == NO_SHAPE and not self._tree:
            return _Plan(None, share, levels_for(share, self._depth))
        tree = tree_for(speculation, self._depth, self._tree)
        most = speculation.max_nodes or (len(tree.ranks) if tree.is_fixed else share)
        is_asked = tree.is_fixed or speculation.max_nodes
        depth = self._depth if is_asked else levels_for(most, self._depth)
        return _Plan(tree if tree.is_fixed else None, most, min(speculation.max_depth or depth, depth))

    def wants_prompt(self, session: Session) -> bool:
        return bool(session.takes_drafts)

    def observe(self, rounds: Rounds, computed: Sequence[Computed]) -> None:
        """Let the head take in the hidden states of the texts' rows, and what followed each: of the tokens that a step computed, and of
        the accepted path."""
        paths = accepted_paths(rounds)
        for part in computed:
            if part.output.hidden is not None:
                followed = [one for _, one in followed_rows(part, paths, self._takes)]
                self.head.observe(part.output.hidden.values, followed)

    def _takes(self, session: Session) -> bool:
        """Return whether a session's text is followed; one that is not is forgotten, and so is an earlier one of its id."""
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
        """Draft no more for a session."""
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


def levels_for(num_nodes: int, most: int) -> int:
    """Return how many levels are grown best first for so many nodes, at most: with few, where there are many sessions, the last would take long
    and rarely be among them."""
    return min(most, 1 + num_nodes // 2)


def usual_depths(most: int, num_sessions: int) -> list[int]:
    """Return how many levels trees have that are grown best first, of few sessions and of so many; see `levels_for`."""
    return sorted({most, levels_for(max(most, ALL_NODES // num_sessions), most)})


def usual_chain(most: int) -> RankTree:
    """Return the chain of each of many sessions, of so many levels at most."""
    return chain_of(min(CHAIN, most))


def _batch(begun: _Begun, grown: Grown) -> DraftBatch:
    """Return the drafts of sessions that have the same tree."""
    plan = begun.plan
    reach = np.where(grown.depths < np.array(begun.depths)[:, None], grown.reach, np.float32(-np.inf))
    wanted = likeliest(reach, plan.most, math.log(FLOOR) if plan.tree is None else -np.inf)
    return batch_of_grown(grown, begun.sessions, wanted, EAGLE_LANE, math.log(LEAST_CHANCE))


# --- from a configuration ---------------------------------------------------------------------------------------------------


def make(setup: Setup) -> EagleDrafter | None:
    """Load the head that shall draft in this process, if there is one; ConfigError where it does not fit the target."""
    if not setup.heads:
        return None
    from specq.engines.torch import is_eagle, load_eagle  # brings torch, which not every engine needs
    from specq.proposers.eagle import Eagle

    if not is_eagle(setup.heads):
        return None
    config = setup.config
    setup.tell(f"loading an EAGLE-3 head from {config.heads}")
    head = load_eagle(setup.heads, setup.target, setup.info, setup.device)
    tree = checked_tree(config.heads_tree, config.chain, f"target.chain is {config.chain}")
    eagle = Eagle(head)
    setup.tell("preparing the passes of an EAGLE-3 head")
    depth = config.chain
    depths = () if tree else usual_depths(depth, config.max_sessions)
    shapes = [tree_for(NO_SHAPE, depth, tree)] if tree else [usual_chain(depth)]
    eagle.warm_up(config.max_sessions, depths, shapes)
    log.info("eagle_head_ready", heads=config.heads, layers=head.layers, num_paths=len(tree))
    return EagleDrafter(eagle, depth, tree)
