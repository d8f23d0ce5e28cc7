"""The engine's own drafter as a source: it drafts a chain for each session behind each step.

The step that makes a session's tokens also returns what follows them by the engine's drafter (`StepOutput.drafts`). The
next step verifies it, if measurement has found that this pays. If not, the drafter only follows the texts, and it does
not even do that while it cannot pay. Then it lacks a part of the texts, and knows only what follows.

The engine returns tokens without probabilities. So each level has a score of its own, in a bin of its own of the lane's
calibration. From the first verdicts on, the score of a level is its measured acceptance.

No I/O; time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specq.drafting.rank_trees import rooms_of
from specq.protocol import LANES, NO_TOKENS, OF_ENGINE, Int32Array
from specq.verification import NUM_BINS
from specq.verifier.sources import (
    Budget,
    ComputedDrafts,
    DraftBatch,
    DraftSource,
    Rounds,
    Session,
    Setup,
    batch_of_chains,
    longest_chain,
)


class OfEngine(DraftSource):
    """Takes chains of at most `levels` tokens from the steps."""

    name = OF_ENGINE

    def __init__(self, levels: int) -> None:
        self.most_levels, self.engine_drafts = levels, 0
        self._drafts: dict[int, tuple[Session, int, Int32Array]] = {}  # by id: what follows a text of this length
        self._refused: dict[int, Session] = {}
        self._begun = False  # whether `collect` has drafts for sessions that decode
        likely = (NUM_BINS - 0.5 - np.arange(levels).clip(max=NUM_BINS - 1)) / NUM_BINS
        self._scores = np.log(likely).astype(np.float32)

    @property
    def has_work(self) -> bool:
        return self._begun

    def begin(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        """Note whether there are drafts: a synchronous session does not run before it has them."""
        self._begun = any(session.session_id in self._drafts for session in sessions)
        return False

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Return the chains behind the sessions' texts, and let the engine draft behind the next step."""
        self._begun = False
        self.engine_drafts = self.most_levels if any(session.takes_drafts for session in sessions) else 0
        found = [
            (one, drafts, room)
            for one, room in zip(sessions, rooms_of(sessions), strict=True)
            if len(drafts := self._behind(one)) and room > 0
        ]
        if not found:
            return ()
        tokens = np.stack([drafts for _, drafts, _ in found])
        counts = np.array(
            [
                min(longest_chain(one.speculation, int((drafts >= 0).cumprod().sum())), room)
                for one, drafts, room in found
            ]
        )
        scores = np.broadcast_to(self._scores[: tokens.shape[1]], tokens.shape)
        return [
            batch_of_chains([one for one, *_ in found], LANES[self.name], tokens, counts, scores, is_measured=False)
        ]

    def _behind(self, session: Session) -> Int32Array:
        """Return the drafts behind a session's text, once; i32[0] if there are none."""
        own, length, drafts = self._drafts.pop(session.session_id, (None, 0, NO_TOKENS))
        return drafts if own is session and length == session.length else NO_TOKENS

    def observe(self, rounds: Rounds, computed: Sequence[ComputedDrafts]) -> None:
        """Keep the drafts of a step for the sessions that it gave tokens."""
        for part in computed:
            if part.output.drafts is None:
                continue
            is_judged = part.shares.batch.is_judged.tolist()
            for session, judged, drafts in zip(part.shares.sessions, is_judged, part.output.drafts, strict=True):
                if judged and self._takes(session):
                    self._drafts[session.session_id] = session, session.length, drafts

    def _takes(self, session: Session) -> bool:
        is_refused = self._refused.get(session.session_id) is session
        has_shape = session.speculation.has_fixed_shape  # of a tree: chains are not what its job asks for
        return bool(
            session.takes_drafts and session.is_open and not session.finish and not is_refused and not has_shape
        )

    def refuse(self, session: Session) -> None:
        """Stop drafting for a session."""
        self._drafts.pop(session.session_id, None)
        self._refused[session.session_id] = session

    def close(self, session: Session) -> None:
        """Forget a session, known or not."""
        self._drafts.pop(session.session_id, None)
        self._refused.pop(session.session_id, None)


def make(setup: Setup) -> OfEngine | None:
    """Return the source of an engine with a drafter of its own; None without one."""
    return OfEngine(setup.own_levels) if setup.own_levels else None
