"""Medusa heads as a source: matrices draft trees from the target's last hidden state.

The step in which the target makes a token also returns the hidden state of that token's row, at no cost. It stays on
the device. `begin` lets the heads rank the next tokens. `collect` grafts a tree of the likeliest tokens onto each
session. The tree has the shape that the job or the configuration asks for, else it grows best first. All nodes are
point masses. Scores are the heads' own log-probabilities, calibrated by the outcomes of this lane's nodes.

As for every source, measurement decides whether it pays off. No I/O; time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import structlog

from specq.drafting.head_kinds import kind_of
from specq.drafting.interface import Pending
from specq.drafting.medusa.interface import HeadSource, HiddenRow
from specq.drafting.rank_trees import DraftingParams, RankTree, checked_tree, rooms_of, tree_for
from specq.drafting.trees.ranked import Ranked
from specq.drafting.worker import LEAST_CHANCE
from specq.protocol import FINAL, MEDUSA, MEDUSA_LANE, Int32Array, ModelInfo
from specq.verifier.sources import (
    FLOOR,
    NEXT_IDS,
    Budget,
    ComputedDrafts,
    DraftBatch,
    DraftSource,
    Rounds,
    Session,
    Setup,
    accepted_paths,
)

if TYPE_CHECKING:
    from specq.drafting.medusa.drafter import Medusa
    from specq.drafting.medusa.host import HostMedusa

log = structlog.get_logger(__name__)

MOST_NODES = 64  # of one session, best first
ALL_NODES = 256  # of all sessions together, but at least one for each head of each session


class _State(NamedTuple):
    """The hidden state behind a session's text of this length."""

    session: Session
    length: int
    row: HiddenRow


class _Begun(NamedTuple):
    """Sessions for which the heads rank tokens, the tree and maximum nodes of each, and the pending result."""

    sessions: list[Session]
    trees: list[RankTree]
    most: list[int]
    pending: Pending[Ranked]


class MedusaSource(DraftSource):
    """Drafts with heads; `tree`: the paths of the tree for jobs that ask for no shape, () for best first."""

    name = MEDUSA
    layers = (FINAL,)

    def __init__(self, heads: HeadSource, tree: tuple[tuple[int, ...], ...] = ()) -> None:
        self.heads, self._tree = heads, tree
        self._states: dict[int, _State] = {}
        self._refused: dict[int, Session] = {}
        self._params = DraftingParams()
        self._begun: _Begun | None = None

    @property
    def has_work(self) -> bool:
        return self._begun is not None

    # --- a round ------------------------------------------------------------------------------------------------------

    def begin(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        """Let the heads rank the next tokens of sessions whose last hidden state is known."""
        sessions = [session for session in sessions if self._knows(session)]
        of_rooms = zip(sessions, rooms_of(sessions), strict=True)
        rooms = {one.session_id: room for one, room in of_rooms if room > 0}
        states = [self._states[session_id] for session_id in rooms]
        self._begun = self._start(states, list(rooms.values())) if states else None
        return self._begun is not None

    def _knows(self, session: Session) -> bool:
        """Return whether the hidden state behind a session's text is known."""
        state = self._states.get(session.session_id)
        return state is not None and state.session is session and state.length == len(session.token_ids)

    def _start(self, states: Sequence[_State], rooms: Sequence[int]) -> _Begun:
        sessions = [state.session for state in states]
        num_heads = self.heads.num_heads
        trees = [
            tree_for(one.speculation, min(num_heads, room), self._tree)
            for one, room in zip(sessions, rooms, strict=True)
        ]  # no tree is deeper than its room
        share = max(num_heads, min(MOST_NODES, ALL_NODES // len(sessions)))
        most = [
            one.speculation.max_nodes or (len(tree.ranks) if tree.is_fixed else share)
            for one, tree in zip(sessions, trees, strict=True)
        ]
        params = [self._params.of(one) for one in sessions]
        count = max(tree.num_ranks for tree in trees)
        rows, lengths = [state.row for state in states], [state.length for state in states]
        return _Begun(sessions, trees, most, self.heads.start(rows, params, lengths, count))

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Return the trees of the sessions for which heads rank; trees of ended sessions have no effect."""
        begun, self._begun = self._begun, None
        if begun is None:
            return ()
        ranked = begun.pending.collect()
        # Group sessions by tree. Usually all sessions have the same one.
        order = sorted(range(len(begun.sessions)), key=lambda i: (id(begun.trees[i]), begun.most[i]))
        alike = groupby(order, key=lambda i: (id(begun.trees[i]), begun.most[i]))
        return [_batch(begun, list(which), ranked) for _, which in alike]

    def observe(self, rounds: Rounds, computed: Sequence[ComputedDrafts]) -> None:
        """Store the hidden state behind each session's text, from the row of its last token."""
        done = {one.session_id: one for one in rounds.sessions if one.takes_drafts}
        paths = accepted_paths(rounds)
        for shares, output in computed:
            if output.hidden is None:
                continue
            for session, start in zip(shares.sessions, output.hidden.starts.tolist(), strict=False):
                if done.get(session.session_id) is session:
                    path = paths.get(session.session_id)  # row of its last node, or of the last token before all
                    self._keep(session, HiddenRow(output.hidden.values, start + (1 + path[-1] if path else 0)))

    def _keep(self, session: Session, row: HiddenRow) -> None:
        if session.finish or session.session_id in self._refused:
            self._states.pop(session.session_id, None)
        else:
            self._states[session.session_id] = _State(session, len(session.token_ids), row)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def refuse(self, session: Session) -> None:
        """Stop drafting for a session."""
        self.close(session)
        self._refused[session.session_id] = session

    def close(self, session: Session) -> None:
        """Forget a session, known or not."""
        self._states.pop(session.session_id, None)
        self._params.forget(session.session_id)
        self._refused.pop(session.session_id, None)


def _batch(begun: _Begun, which: list[int], ranked: Ranked) -> DraftBatch:
    """Return the drafts of sessions that have the same tree."""
    tree, most = begun.trees[which[0]], begun.most[which[0]]
    scores = tree.scores(ranked.scores[which])  # [m, nodes]
    wanted = tree.likeliest(tree.reach(scores), most, math.log(FLOOR))
    depths, ranks = (
        np.minimum(tree.depths, ranked.token_ids.shape[1] - 1),
        np.minimum(tree.ranks, ranked.token_ids.shape[2] - 1),
    )
    token_ids = ranked.token_ids[which][:, depths, ranks]
    places = np.cumsum(wanted, axis=1) - 1  # indices among the wanted nodes
    parents: Int32Array = np.where(tree.parents < 0, -1, places[:, tree.parents]).astype(np.int32)
    sessions = [begun.sessions[i] for i in which]
    return DraftBatch(
        sessions=sessions,
        lanes=MEDUSA_LANE,
        base_lens=[session.length for session in sessions],
        first_ids=NEXT_IDS,
        sizes=wanted.sum(1),
        token_ids=token_ids[wanted],
        parent_ids=parents[wanted],
        scores=np.maximum(scores[wanted], math.log(LEAST_CHANCE)),
    )


# --- from a configuration
# ---------------------------------------------------------------------------------------------------


def make(setup: Setup) -> MedusaSource | None:
    """Load the heads that the configuration names for this process; None if it names none.

    Raises ConfigError if they do not fit the target.
    """
    if not setup.heads or kind_of(Path(setup.heads)).source != MEDUSA:
        return None
    setup.tell(f"loading Medusa heads from {setup.config.heads}")
    on_host, limit_vocab = setup.device == "cpu", setup.info.num_tokens
    medusa = load_source(setup.heads, setup.target, setup.info, setup.device, limit_vocab, on_host=on_host)
    medusa.warm_up(setup.config.max_sessions)
    tree = checked_tree(setup.config.heads_tree, medusa.num_heads, f"there are {medusa.num_heads} heads")
    log.info("medusa_heads_loaded", heads=setup.config.heads, num_heads=medusa.num_heads, num_paths=len(tree))
    return MedusaSource(medusa, tree)


def load_source(
    heads: str, target: str, info: ModelInfo, device: str, limit_vocab: int, *, on_host: bool
) -> HostMedusa | Medusa:
    """Load heads for the target in `target`, in NumPy (`on_host`) or in torch. Drafted tokens are below `limit_vocab`.

    Raises ConfigError if they do not fit the target.
    """
    if on_host:
        from specq.drafting.medusa.arrays import load_arrays
        from specq.drafting.medusa.host import HostMedusa

        return HostMedusa(load_arrays(heads, target, info), limit_vocab)
    from specq.drafting.medusa.drafter import Medusa  # imports torch
    from specq.drafting.medusa.network import load_heads

    return Medusa(load_heads(heads, target, info, device), limit_vocab)
