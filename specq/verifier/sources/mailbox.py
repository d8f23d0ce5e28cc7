"""Remote drafters: a mailbox for what they send between two steps, and the hidden states that some of them read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from specq.protocol import REMOTE, Draft
from specq.verifier.sessions.grafting import DraftBatch, batch_of
from specq.verifier.sessions.session import Session
from specq.verifier.sources.activations import ActivationFeeds
from specq.verifier.sources.interface import Budget, ComputedDrafts, DraftSource
from specq.verifier.step.rounds import Rounds

MAX_NODES = 65_536  # that may lie in the mailbox; drafts that come then are dropped
BATCH_NODES = 512  # after which a batch ends


class Mailbox(DraftSource):
    """Drafts that have arrived, in that order. It refuses nobody: a drafter's next draft may be sound."""

    name = REMOTE
    is_priced = True

    def __init__(self) -> None:
        self._drafts: deque[tuple[Session, Draft]] = deque()
        self._num_waiting = 0
        self.feeds = ActivationFeeds()

    @property
    def layers(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.feeds.layers

    def __len__(self) -> int:
        return len(self._drafts)

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

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Return the first of what has arrived, up to BATCH_NODES nodes or one draft."""
        taken: list[tuple[Session, Draft]] = []
        num_nodes = 0
        while self._drafts and num_nodes < BATCH_NODES:
            taken.append(self._drafts.popleft())
            num_nodes += len(taken[-1][1].token_ids)
        self._num_waiting -= num_nodes
        return [batch_of(taken)] if taken else ()

    def wants_prompt(self, session: Session) -> bool:
        return self.feeds.takes(session)

    def observe(self, rounds: Rounds, computed: Sequence[ComputedDrafts]) -> None:
        self.feeds.observe(rounds, computed)

    def close(self, session: Session) -> None:
        self.feeds.close(session)

    def clear(self) -> int:
        """Drop what is left; return how many drafts that were."""
        count, self._num_waiting = len(self._drafts), 0
        self._drafts.clear()
        return count
