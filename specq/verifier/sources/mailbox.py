"""The source of remote drafts: a mailbox, the hidden states that some drafters read, and a limit on the time of drafts.

The limit bounds how long drafts may occupy the host between two steps. Drafts beyond it are dropped.

If the next step is in flight before the last one is collected, the host has time while the device computes. More time
would make the device wait, although no step waits for these drafts. The host's wait for the device shows how much time
there is. If no step is in flight, a device is idle meanwhile. Then drafts may take a quarter of the last step. On the
host's own cores they may take as long as the last step.

No clock: seconds are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from specq.protocol import REMOTE, Draft, Drafts
from specq.verifier.sessions.grafting import DraftBatch, batch_of, batch_of_drafts
from specq.verifier.sessions.session import Session
from specq.verifier.sources.activations import ActivationFeeds
from specq.verifier.sources.interface import Budget, ComputedDrafts, DraftSource
from specq.verifier.step.rounds import Rounds

MAX_NODES = 65_536  # most nodes in the mailbox; further drafts are dropped
BATCH_NODES = 512  # nodes after which a batch ends


class Mailbox(DraftSource):
    """Drafts in the order of their arrival. It never refuses a session: a drafter's next draft may be valid."""

    name = REMOTE

    def __init__(self) -> None:
        self._drafts: deque[tuple[Sequence[Session], Draft | Drafts]] = deque()
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
        """Add a draft that was checked; return False if there is no room."""
        return self.put_all([session], draft)

    def put_all(self, sessions: Sequence[Session], drafts: Draft | Drafts) -> bool:
        """Add checked drafts of several sessions, in their order; return False if there is no room."""
        count = len(drafts.token_ids)
        if self._num_waiting + count > MAX_NODES:
            return False
        self._drafts.append((sessions, drafts))
        self._num_waiting += count
        return True

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Return the oldest drafts as one batch. It ends with the draft that reaches BATCH_NODES nodes.

        Drafts of several sessions that came together are a batch of their own.
        """
        taken: list[tuple[Session, Draft]] = []
        num_nodes = 0
        while self._drafts and num_nodes < BATCH_NODES:
            sessions, drafts = self._drafts[0]
            if taken and isinstance(drafts, Drafts):
                break
            self._drafts.popleft()
            num_nodes += len(drafts.token_ids)
            if isinstance(drafts, Drafts):
                self._num_waiting -= num_nodes
                return [batch_of_drafts(sessions, drafts)]
            taken.append((sessions[0], drafts))
        self._num_waiting -= num_nodes
        return [batch_of(taken)] if taken else ()

    def wants_prompt(self, session: Session) -> bool:
        return self.feeds.takes(session)

    def observe(self, rounds: Rounds, computed: Sequence[ComputedDrafts]) -> None:
        self.feeds.observe(rounds, computed)

    def close(self, session: Session) -> None:
        self.feeds.close(session)

    def clear(self) -> int:
        """Drop the remaining drafts; return how many there were."""
        count, self._num_waiting = len(self._drafts), 0
        self._drafts.clear()
        return count


LEAST_S = 0.005  # least limit on the host's own cores
WAITED_PART = 0.25  # limit as a part of a step on a device, if no other step follows it
# Parts of a step. LATE: with a shorter wait for the device, the host was late. SPARE: the part of the wait that drafts
# do not use. LEAST_PART: the least limit.
LATE, SPARE, LEAST_PART = 0.3, 0.25, 0.02


class MailTime:
    """The limit on the time of drafts. `limit_s`: the seconds that they may take before the next step."""

    def __init__(self, *, overlaps: bool) -> None:
        """Begin with a limit of LEAST_S. `overlaps`: whether steps run on a device beside the host."""
        self._overlaps, self.limit_s = overlaps, LEAST_S

    def learn(self, step_s: float, used_s: float, idle_s: float | None) -> None:
        """Learn from a step.

        step_s   the seconds of the step.
        used_s   the seconds that drafts took before it.
        idle_s   the seconds that the host then waited for the device with the next step in flight. None: no next step
                 was in flight.
        """
        if idle_s is None:
            self.limit_s = WAITED_PART * step_s if self._overlaps else max(LEAST_S, step_s)
        elif idle_s < LATE * step_s:
            self.limit_s = max(used_s / 2, LEAST_PART * step_s)
        else:
            self.limit_s = max(used_s + (idle_s - SPARE * step_s) / 2, LEAST_PART * step_s)
