"""An EAGLE-3 head: trees drafted by one layer, from what the target's own layers said of the text, and from its own states below it.

The step in which the target makes tokens gives hidden states of three of its layers, of the prompt's rows too. They stay on the device. `begin`
lets the head compute the rows of the text that are new, and `collect` grows a tree for each session: of the shape that the job or
the configuration asks for, else best first. All nodes are point masses. Scores are the head's own log-probabilities, calibrated by what
became of this lane's nodes.

What of a prompt the engine has in its cache of prefixes has no hidden states: the head does without.

Whether it pays is measured, as of every source. No I/O; time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import structlog

from specq.drafting import LEAST_CHANCE, drafting_params
from specq.proposers import Contexts, TreeHead
from specq.protocol import EAGLE_LANE
from specq.verifier.arms import EAGLE
from specq.verifier.grafting import DraftBatch
from specq.verifier.rounds import Round
from specq.verifier.scheduler import FLOOR
from specq.verifier.session import Session
from specq.verifier.sources.followed import accepted_paths, followed_rows
from specq.verifier.sources.grown_trees import grow_best_first, grow_shape
from specq.verifier.sources.interface import Budget, Computed, DraftSource, Setup
from specq.verifier.sources.rank_trees import RankTree, checked_tree, room_of, tree_for

log = structlog.get_logger(__name__)

MOST_NODES = 48  # of one session, best first
ALL_NODES = 256  # of all sessions together, but at least one for each level of each


class _Plan(NamedTuple):
    """The trees of some sessions: of a fixed shape, or None, so many levels best first; and how many nodes each may have."""

    tree: RankTree | None
    depth: int
    most: int


class _Begun(NamedTuple):
    """Sessions whose contexts are being computed."""

    sessions: list[Session]
    contexts: Contexts


class EagleDrafter(DraftSource):
    """Drafts with a head, so many levels at most; `tree`: the paths of the tree for jobs that ask for no shape, () for best first."""

    name = EAGLE

    def __init__(self, head: TreeHead, depth: int = 8, tree: tuple[tuple[int, ...], ...] = ()) -> None:
        self.layers = head.layers
        self.head, self._depth, self._tree = head, depth, tree
        self._known: dict[int, Session] = {}  # those whose text the head knows
        self._refused: dict[int, Session] = {}
        self._begun: _Begun | None = None

    @property
    def has_work(self) -> bool:
        return self._begun is not None

    # --- a round ------------------------------------------------------------------------------------------------------

    def begin(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        """Let the head compute the contexts of the sessions whose text it knows."""
        sessions = [session for session in sessions if self._may_draft(session)]
        if not sessions:
            return False
        params = [drafting_params(session.params, session.speculation) for session in sessions]
        self._begun = _Begun(sessions, self.head.start([session.session_id for session in sessions], params))
        return True

    def _may_draft(self, session: Session) -> bool:
        is_known = self._known.get(session.session_id) is session
        return is_known and self.head.known(session.session_id) == session.length and room_of(session) > 0

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Grow the trees of the sessions whose contexts were begun; those that have ended meanwhile have no effect."""
        begun, self._begun = self._begun, None
        if begun is None:
            return ()
        alike: dict[tuple[int, int, int], tuple[_Plan, list[int]]] = {}  # by the tree: as a rule all have the same
        for i, session in enumerate(begun.sessions):
            plan = self._plan(session, len(begun.sessions))
            alike.setdefault((id(plan.tree), plan.depth, plan.most), (plan, []))[1].append(i)
        return [_grow(begun, plan, which) for plan, which in alike.values()]

    def _plan(self, session: Session, num_sessions: int) -> _Plan:
        speculation = session.speculation
        depth = min(speculation.max_depth or self._depth, self._depth, room_of(session))
        tree = tree_for(speculation, depth, self._tree)
        if tree.is_fixed:
            return _Plan(tree, depth, speculation.max_nodes or len(tree.ranks))
        share = max(depth, min(MOST_NODES, ALL_NODES // num_sessions))
        return _Plan(None, depth, speculation.max_nodes or share)

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
        self.head.close(session_id)


def _grow(begun: _Begun, plan: _Plan, which: list[int]) -> DraftBatch:
    """Return the drafts of sessions that have the same tree."""
    growth = begun.contexts.grow(np.array(which))
    if plan.tree is None:
        grown, wanted = grow_best_first(growth, len(which), plan.depth, plan.most, math.log(FLOOR))
    else:
        grown, wanted = grow_shape(growth, len(which), plan.tree, plan.most)
    return grown.batch([begun.sessions[i] for i in which], wanted, EAGLE_LANE, math.log(LEAST_CHANCE))


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
    log.info("eagle_head_ready", heads=config.heads, layers=head.layers, num_paths=len(tree))
    return EagleDrafter(Eagle(head), config.chain, tree)
