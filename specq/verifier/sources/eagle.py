"""An EAGLE-3 head: trees drafted by one layer, from what the target's own layers said of the text, and from its own states below it.

The step in which the target makes tokens gives hidden states of three of its layers, of the prompt's rows too. They stay on the device. `begin`
lets the head compute the rows of the text that are new and grow a tree for each session: of the shape that the job or the configuration
asks for, else best first. `collect` waits for the trees. All nodes are point masses. Scores are the head's own log-probabilities, calibrated by
what became of this lane's nodes.

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
from specq.proposers import Grown, TreeHead, TreeRequest
from specq.protocol import EAGLE_LANE, Speculation
from specq.verifier.arms import EAGLE
from specq.verifier.grafting import DraftBatch
from specq.verifier.rounds import Round
from specq.verifier.scheduler import FLOOR
from specq.verifier.session import Session
from specq.verifier.sources.drafting_params import DraftingParams
from specq.verifier.sources.followed import accepted_paths, followed_rows
from specq.verifier.sources.grown_trees import batch_of_grown
from specq.verifier.sources.interface import Budget, Computed, DraftSource, Setup
from specq.verifier.sources.rank_trees import RankTree, checked_tree, likeliest, room_of, tree_for

log = structlog.get_logger(__name__)

MOST_NODES = 48  # of one session, best first
ALL_NODES = 256  # of all sessions together, but at least one for each level of each
NO_SHAPE = Speculation()


class _Plan(NamedTuple):
    """The trees of some sessions: of a fixed shape, or None, best first; and how many nodes each may have."""

    tree: RankTree | None
    most: int


class _Begun(NamedTuple):
    """Trees of one kind that are being grown: the sessions, how many levels each takes, and what waits."""

    sessions: list[Session]
    plan: _Plan
    depths: list[int]
    wait: Callable[[], Grown]


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

    @property
    def has_work(self) -> bool:
        return bool(self._begun)

    # --- a round ------------------------------------------------------------------------------------------------------

    def begin(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        """Let the head grow trees for the sessions whose text it knows."""
        sessions = [session for session in sessions if self._may_draft(session)]
        alike: dict[_Plan, list[Session]] = {}  # as a rule all have the same tree
        for session in sessions:
            alike.setdefault(self._plan(session, len(sessions)), []).append(session)
        depths = [[self._depth_of(session, plan) for session in own] for plan, own in alike.items()]
        requests = [
            TreeRequest(
                *([one.session_id for one in own], [self._params.of(one) for one in own]),
                depth=max(of_own),
                ranks=plan.tree,
                floor=math.log(FLOOR),
            )
            for (plan, own), of_own in zip(alike.items(), depths, strict=True)
        ]
        waits = self.head.start(requests) if requests else []
        self._begun = [
            _Begun(own, plan, of_own, wait)
            for (plan, own), of_own, wait in zip(alike.items(), depths, waits, strict=True)
        ]
        return bool(self._begun)

    def _may_draft(self, session: Session) -> bool:
        is_known = self._known.get(session.session_id) is session
        return is_known and self.head.known(session.session_id) == session.length and room_of(session) > 0

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Return the trees that were begun; those of sessions that have ended meanwhile have no effect."""
        begun, self._begun = self._begun, []
        return [_batch(one) for one in begun]

    def _depth_of(self, session: Session, plan: _Plan) -> int:
        speculation = session.speculation
        is_asked = plan.tree is not None or speculation.max_nodes
        most = self._depth if is_asked else levels_for(plan.most, self._depth)
        return min(speculation.max_depth or most, most, room_of(session))

    def _plan(self, session: Session, num_sessions: int) -> _Plan:
        speculation = session.speculation
        tree = tree_for(speculation, self._depth, self._tree)
        if tree.is_fixed:
            return _Plan(tree, speculation.max_nodes or len(tree.ranks))
        share = max(self._depth, min(MOST_NODES, ALL_NODES // num_sessions))
        return _Plan(None, speculation.max_nodes or share)

    def wants_prompt(self, session: Session) -> bool:
        return bool(session.takes_drafts)

    def observe(self, rounds: Sequence[Round], computed: Sequence[Computed]) -> None:
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


def _batch(begun: _Begun) -> DraftBatch:
    """Return the drafts of sessions that have the same tree."""
    grown, plan = begun.wait(), begun.plan
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
    depths = {depth, levels_for(max(depth, ALL_NODES // config.max_sessions), depth)}  # of few sessions, and of all
    eagle.warm_up(
        config.max_sessions, () if tree else sorted(depths), [tree_for(NO_SHAPE, depth, tree)] if tree else ()
    )
    log.info("eagle_head_ready", heads=config.heads, layers=head.layers, num_paths=len(tree))
    return EagleDrafter(eagle, depth, tree)
