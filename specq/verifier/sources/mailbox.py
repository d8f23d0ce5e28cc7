"""Remote drafters: a mailbox for what they send between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specq.protocol import Draft
from specq.verifier.arms import REMOTE
from specq.verifier.session import Session
from specq.verifier.sources.interface import Budget, DraftBatch, DraftSource

MAX_NODES = 65_536  # that may lie in the mailbox; drafts that come then are dropped


class Mailbox(DraftSource):
    """Drafts that have arrived. It refuses nobody: a drafter's next draft may be sound."""

    name = REMOTE

    def __init__(self) -> None:
        self._drafts: list[tuple[Session, Draft]] = []
        self._num_waiting = 0

    @property
    def has_work(self) -> bool:
        return bool(self._drafts)

    def put(self, session: Session, draft: Draft) -> bool:
        """Take a draft that was checked; return False if there is no room."""
        count = len(draft.token_ids)
        if self._num_waiting + count > MAX_NODES:
            return False
        self._drafts.append((session, draft))
        self._num_waiting += count
        return True

    def collect(
        self, sessions: Sequence[Session] = (), budget: Budget | None = None, clock: Callable[[], float] | None = None
    ) -> DraftBatch:
        """Return what has arrived, in that order."""
        drafts, self._drafts, self._num_waiting = self._drafts, [], 0
        return drafts

    def close(self, session: Session) -> None:
        """Drop what has arrived for a session."""
        self._drafts = [entry for entry in self._drafts if entry[0] is not session]
        self._num_waiting = sum(len(draft.token_ids) for _, draft in self._drafts)
