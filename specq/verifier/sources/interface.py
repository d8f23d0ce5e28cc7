"""What a verifier needs of whatever drafts for its sessions.

Each step asks its sources twice: `begin` before the host sends and receives, `collect` when the step is planned. What is collected is
hung onto the sessions' draft trees, whoever drafted it, and after the step each source observes what became of it.

Rules: drafts are hints. A source commits nothing; what it has not collected in time has no effect; what it raises, but
EngineLostError, costs its drafts and nothing else. Its context of a session follows the session's rounds; `close` ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from specq.config import TargetConfig
from specq.protocol import Draft, ModelInfo
from specq.verifier.draft_tree import Chain
from specq.verifier.rounds import Round
from specq.verifier.session import Session
from specq.verifier.step_curve import StepCurve

# Drafts, each for a session; a chain is for one that has no tree yet.
DraftBatch = Sequence[tuple[Session, Draft | Chain]]


class Budget(NamedTuple):
    """What a source may know of the next step.

    curve            the seconds that a step takes, by its rows
    min_accept_prob  the least cumulative acceptance probability with which verifying a node paid in the last step
    """

    curve: StepCurve
    min_accept_prob: float


class Setup(NamedTuple):
    """What a source is made of.

    config, info  of the verifier, and its target model
    model         the directory or hub name of the draft model; "" where none is asked for
    device        where the engine computes, as a process with that engine names it
    tell          says what is being done
    """

    config: TargetConfig
    info: ModelInfo
    model: str
    device: str
    tell: Callable[[str], object]


class DraftSource(Protocol):
    """A source of drafts, driven by one thread. `name` is that of its table, by which the controller knows it."""

    name: str

    @property
    def has_work(self) -> bool:
        """Whether something waits to be collected; then a step is due, even if no session runs."""
        ...

    def begin(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        """Begin to draft for sessions that decode, if that pays; return whether `collect` will wait for it."""
        ...

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> DraftBatch:
        """Return what was drafted. `sessions` decode and take part in the step; drafts may be of any."""
        ...

    def observe(self, rounds: Sequence[Round]) -> None:
        """Take in what a step committed to each session, and so what became of the drafts."""
        ...

    def refuse(self, session: Session) -> None:
        """Draft no more for a session: its drafts could not be used."""
        ...

    def close(self, session: Session) -> None:
        """Forget a session, known or not."""
        ...
