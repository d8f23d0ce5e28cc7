"""The verifier's steps between launch and collection.

An engine that overlaps can launch the next step before the last one is collected. It does so if the last step can be
*followed*. Two conditions must hold. Each session of the step takes one token that only the device knows, and no draft.
And the next step does not wait for drafts, or for the host (`Controller.awaits`).

If a session has ended meanwhile, its row in the next step is wasted. Its output is discarded. An error at collection
also costs the step that was launched behind: it is discarded. The failed step is repeated with some of its sessions.

Separate processes may launch the steps (`specq.engines.is_apart`). Then two steps stay in flight while messages are
sent and handled. A next step of the same sessions, one token further, is launched behind both. Then the older one is
collected. So the processes always have a next step. In other cases the older step is collected first. Then the next one
is launched before any results are reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import structlog

from specq.engines import Computed, Engine, Launched, is_apart, launch
from specq.protocol import EngineLostError, Message, StepOutput, Tap
from specq.runtime import Faults, in_halves, traced
from specq.verifier.control.background import ExpectedStep
from specq.verifier.control.choices import Drafting
from specq.verifier.sessions.admission import Prefill
from specq.verifier.sessions.open_sessions import JIT, SYNC
from specq.verifier.step.node_choice import Shares
from specq.verifier.step.rounds import Rounds

log = structlog.get_logger(__name__)

Part = tuple[Shares, Launched]
Done = list[tuple[Shares, StepOutput]]


@dataclass(slots=True)
class InFlightStep:
    """A step that was planned and launched.

    shares    as planned.
    parts     the launched parts, from one call or several.
    num_rows, min_accept_prob  as of `StepPlan`, and as verdicts report it.
    waited_s  as of `SourceSet`.
    began, drafted, planned  as of `Moments`.
    drafting  how its drafting was decided.
    is_helped  whether other cores help.
    background  what it is expected to take, if it is shared with sessions in the background.
    is_behind  whether it was launched behind another step that had not ended.
    is_late   whether messages may have been handled, or another step may have ended, before its collection.
    """

    shares: Shares
    num_rows: int
    min_accept_prob: int
    waited_s: float
    began: float
    drafted: float
    planned: float
    drafting: Drafting
    is_helped: bool
    background: ExpectedStep | None = None
    parts: list[Part] = field(default_factory=list)
    is_behind: bool = False
    is_late: bool = False

    def waits_for_drafts(self, waited_s: float, now: float) -> None:
        """Note that a step launched behind drafts begins now, when these are complete."""
        self.waited_s, self.drafted, self.planned = waited_s, now, now

    def prefilling(self) -> list[Prefill]:
        """Return the sessions for which the step computes a part of the context."""
        if not len(self.shares):
            return []
        sessions, batch = self.shares.sessions, self.shares.batch
        return [Prefill(sessions[i], int(batch.starts[i])) for i in (batch.num_tokens > 1).nonzero()[0].tolist()]


class CollectedStep(NamedTuple):
    """A step that has ended.

    done      the results of its parts.
    faults    of its sessions, and of the newest plan, unless that plan was made behind yet another step.
    ended     when the host had the results.
    waited_s  how long it waited, if another step was in flight behind it.
    """

    step: InFlightStep
    done: Done
    faults: Faults
    ended: float
    waited_s: float | None


class CommittedStep(NamedTuple):
    """A collected step, and what was committed from it. `failed`: the messages about the sessions at fault."""

    collected: CollectedStep
    rounds: Rounds
    failed: list[Message]


class StepsInFlight:
    """The verifier's steps that were launched and not collected, the oldest first.

    At most two are in flight between two calls, and three within one call.

    most      the limit between two calls.
    launched  the step that this call has launched, if any.
    """

    def __init__(self, engine: Engine, tap: Callable[[Shares], Tap], awaits: Callable[[Shares], bool]) -> None:
        """Take the engine and two functions of a step's shares.

        tap     returns the hidden states that are wanted of a step.
        awaits  returns whether the next step of the same sessions waits for drafts or for the host.
        """
        self._engine, self._tap, self._awaits = engine, tap, awaits
        self.most = 2 if is_apart(engine) else 1
        self._steps = deque[InFlightStep]()
        self.launched: InFlightStep | None = None

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def newest(self) -> InFlightStep | None:
        """The step behind which the next one is launched."""
        return self._steps[-1] if self._steps else None

    def begin_call(self) -> None:
        """Note that messages may have been handled since the last call."""
        self.launched = None
        for step in self._steps:
            step.is_late = True

    @property
    def is_open(self) -> bool:
        """Whether another step may be launched before the newest one is collected."""
        return not self._steps or self.can_follow(self._steps[-1])

    @property
    def is_due(self) -> bool:
        """Whether to wait for the oldest step now.

        This holds with too many steps, without a following step, or if none can follow.
        """
        if len(self._steps) > self.most or self.launched is None or not self.launched.parts:
            return bool(self._steps)
        return len(self._steps) == 1 and not self.can_follow(self._steps[0])

    def can_follow(self, step: InFlightStep) -> bool:
        """Return whether another step may be launched before this one is collected."""
        if not self._engine.overlaps or len(step.parts) != 1 or not step.parts[0][1].feeds:
            return False
        shares = step.parts[0][0]
        mode = shares.sessions[0].trees.mode[shares.places]
        return not np.count_nonzero((mode == SYNC) | (mode == JIT)) and not self._awaits(shares)

    def launch(self, step: InFlightStep, faults: Faults) -> None:
        """Launch a step behind the newest one.

        If no part could be launched, the step is collected at once, or left out behind another one.
        """
        before = self.newest
        step.is_behind = before is not None
        if len(step.shares):
            step.parts = self._launch_parts(step.shares, before, faults)
        if step.parts or before is None:
            self._steps.append(step)
        self.launched = step

    def _launch_parts(self, shares: Shares, before: InFlightStep | None, faults: Faults) -> list[Part]:
        """Launch a step, and return its parts.

        If the launch raises, the step is computed in halves. Sessions that still raise are left out. This is impossible
        behind a step in flight, since only one step can follow it. Nor is it possible with unread drafts. In both cases
        no part is returned.
        """
        try:
            return [(shares, self._launch(None if before is None else before.parts[0][1], shares))]
        except EngineLostError:
            raise
        except Exception as error:  # noqa: BLE001 - see `Faults.of`
            log.warning("step_launch_failed", num_sessions=len(shares), **traced(error))
        if before is not None or shares.batch.as_read().drafted is not None:
            return []
        done = in_halves(shares, self._compute, faults, "computed", retry=True)
        return [(own, Computed(output)) for own, output in done]

    def _launch(self, after: Launched | None, shares: Shares) -> Launched:
        launched = launch(self._engine, shares.batch, self._tap(shares), after)
        if len(shares):
            shares.sessions[0].trees.kv_len[shares.places] = shares.batch.base_lens
        return launched

    def judge(self) -> None:
        """Let the step be judged whose earlier steps have all been committed.

        Where that raises, the step is judged when it is collected. That raises too, and finds the sessions at fault.
        """
        for shares, launched in self._steps[0].parts if self._steps else ():
            try:
                if callable(judge := getattr(launched, "judge", None)):
                    judge()
            except EngineLostError:
                raise
            except Exception as error:  # noqa: BLE001 - see `Faults.of`
                log.warning("step_judging_failed", num_sessions=len(shares), **traced(error))

    def collect(self, planned: Faults, clock: Callable[[], float]) -> CollectedStep:
        """Wait for the oldest step. If that raises, discard the steps launched behind it.

        planned  the faults of the last plan.
        """
        step, asked_at = self._steps.popleft(), clock()
        is_followed = bool(self._steps)
        faults = Faults() if any(other.is_late for other in self._steps) else planned
        done = [part for parts in step.parts for part in self._collect_part(*parts, faults)]
        ended = clock()
        return CollectedStep(step, done, faults, ended, ended - asked_at if is_followed else None)

    def _collect_part(self, shares: Shares, launched: Launched, faults: Faults) -> Done:
        try:
            output = launched.collect()
            return [(shares.known(), output)]
        except EngineLostError:
            raise
        except Exception as error:  # noqa: BLE001 - see `Faults.of`
            log.warning("step_failed", num_sessions=len(shares), **traced(error))
            self._discard_behind()
            return in_halves(_again(shares), self._compute, faults, "computed", retry=True)

    def _compute(self, shares: Shares) -> StepOutput:
        return self._launch(None, shares).collect()

    def _discard_behind(self) -> None:
        """Discard the steps behind the oldest one, the newest first.

        The state of their sessions is restored.
        """
        while self._steps:
            for shares, launched in self._steps.pop().parts:
                launched.discard()
                for session, start in zip(shares.sessions, shares.batch.starts.tolist(), strict=True):
                    if session.is_open:
                        session.kv_len = start


def _again(shares: Shares) -> Shares:
    """Return the shares that can be computed again.

    Their sessions still exist, and their tokens are known by now.
    """
    which = [i for i, session in enumerate(shares.sessions) if session.is_open and not session.finish]
    shares = (shares.take(np.array(which, np.intp)) if len(which) < len(shares) else shares).known()
    if shares.batch.fed_by is None or not len(shares):
        return shares
    batch = shares.batch.fed(shares.sessions[0].trees.last_token[shares.places])
    return Shares(shares.sessions, shares.places, batch, shares.nodes)
