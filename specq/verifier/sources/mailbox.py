"""Remote drafters: a mailbox for what they send between two steps, the hidden states that some of them read, and how
long their drafts may keep the host between two steps; those that come then are dropped.

Where the next step is in flight before the last one is collected, the host has time for drafts while the device
computes, and no more: what goes beyond makes the device wait, for drafts that no step waits for. How much time that is
shows where the host waits for the device. Where no step is in flight, drafts may take a quarter of the last step on a
device that stands still meanwhile, and as long as it on the host's own cores.

No clock: seconds are given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from specq.protocol import REMOTE, Draft
from specq.verifier.sessions.grafting import DraftBatch, batch_of
from specq.verifier.sessions.session import Session
from specq.verifier.sources.activations import ActivationFeeds
from specq.verifier.sources.interface import Budget, ComputedDrafts, DraftSource
from specq.verifier.step.commit import Rounds

MAX_NODES = 65_536  # that may lie in the mailbox; drafts that come then are dropped
BATCH_NODES = 512  # after which a batch ends


class Mailbox(DraftSource):
    """Drafts that have arrived, in that order. It refuses nobody: a drafter's next draft may be sound."""

    name = REMOTE

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


LEAST_S = 0.005  # on the host's own cores
WAITED_PART = 0.25  # of a step that is not followed, on a device
# Parts of a step: a wait for the device that is no longer says that the host was late; a wait that is left alone; and
# what drafts may take at least.
LATE, SPARE, LEAST_PART = 0.3, 0.25, 0.02


class MailTime:
    """`limit_s`: the seconds that drafts may take before the next step."""

    def __init__(self, *, overlaps: bool) -> None:
        """`overlaps`: steps run on a device beside the host."""
        self._overlaps, self.limit_s = overlaps, LEAST_S

    def learn(self, step_s: float, used_s: float, idle_s: float | None) -> None:
        """Take in a step, the seconds that drafts took before it, and those in which the host then waited for the
        device with the next step in flight; None: none was."""
        if idle_s is None:
            self.limit_s = WAITED_PART * step_s if self._overlaps else max(LEAST_S, step_s)
        elif idle_s < LATE * step_s:
            self.limit_s = max(used_s / 2, LEAST_PART * step_s)
        else:
            self.limit_s = max(used_s + (idle_s - SPARE * step_s) / 2, LEAST_PART * step_s)
