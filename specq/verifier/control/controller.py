"""Learn from the steps of a verifier, and decide how the next steps run.

`policy` decides which sources draft. `prefill_limit` limits the rows of prompts. `bursts` decides whether a step is put
off. This module decides when the next step is launched.

A step with drafted nodes needs the tokens of the last step. So the device is idle while the host plans it. A step
without nodes is launched before the last one has ended. The next step always waits for sessions in mode `sync` or
`jit`. Besides, it waits for the last one in three cases:

- Sources draft for its sessions.
- Sessions that use draft distributions have nodes. Whether a sampled node is verified must not depend on the nodes
  below it (decision 0008).
- Some sessions need their last token on the host (penalties, bad words, min_tokens). Without waiting, such a session
  joins only every second step. This case applies only if waiting brings more tokens a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specq.engines import Engine, takes_unread
from specq.protocol import REMOTE
from specq.verifier.control.background import Background
from specq.verifier.control.bursts import Bursts
from specq.verifier.control.choices import Choice, Drafting, Sources, Step
from specq.verifier.control.forecast import Forecast
from specq.verifier.control.policy import Policy
from specq.verifier.control.prefill_limit import PrefillLimit
from specq.verifier.control.round_trips import RoundTrips
from specq.verifier.models.step_curve import StepCurve, keep_curve
from specq.verifier.models.step_time import StepKind, StepRows, StepTime
from specq.verifier.sessions.open_sessions import OpenSessions
from specq.verifier.sessions.session import Session
from specq.verifier.sources import SourceSet
from specq.verifier.sources.source_clock import judged_of
from specq.verifier.step.in_flight import CollectedStep, InFlightStep
from specq.verifier.step.node_choice import Shares
from specq.verifier.step.rounds import Rounds

TOLD = {"async"}, {"async", "plain"}  # modes of the sessions of a step that can show whether drafts pay
LEARN_EVERY = 4  # steps learned from at a time where the device waits for it: the first one takes the longest


class EndedStep(NamedTuple):
    """A step that has ended.

    seconds    since the end of the step before.
    waits      the seconds that it waited for each source.
    num_without_room, is_told  as in `Rounds` and `Step`, as they were then: the sessions may be closed before it is
                               learned from.
    """

    step: InFlightStep
    rounds: Rounds
    seconds: float
    waits: dict[str, float]
    num_without_room: int
    is_told: bool


class Controller:
    """Learns from the steps of one verifier, and decides how the next ones run.

    time, forecast    the expected step times, and the forecast of each choice of drafts.
    policy            how steps draft.
    prefill, bursts   how many prompt rows a step has, and whether it is delayed.
    background        how much of a step sessions in the background may take.
    last_end          the end of the last step in seconds. None: there was no work to continue with at once.
    """

    def __init__(
        self,
        engine: Engine,
        sources: SourceSet,
        curves: tuple[StepCurve, StepCurve],
        *,
        max_prefill_slowdown: float,
        measures_drafts: bool,
    ) -> None:
        """`curves`: of steps without help from other cores, and with it."""
        self._engine, self._sources = engine, sources
        self._can_be_helped, self.curves = engine.is_helped, curves
        traits = [source.traits(is_unread_possible=takes_unread(engine)) for source in sources.sources]
        self.time = StepTime({one.name: one.levels_s is not None for one in traits}, curves)
        self.forecast = Forecast(traits, self.time, overlaps=engine.overlaps)
        self.policy = Policy(self.forecast, first_s=curves[-1].profiled(1), is_measured=measures_drafts)
        self.prefill, self.bursts = PrefillLimit(max_prefill_slowdown), Bursts()
        self.background = Background()
        self._round_trips = RoundTrips()
        self.last_end: float | None = None
        self._ended: list[EndedStep] = []  # not learned from yet
        self._basis: tuple[int, bool, Sources] | None = None  # of `curve`. None: steps were learned from since
        self.follow_drafting()

    # --- decisions ----------------------------------------------------------------------------------------------------

    @property
    def is_helped(self) -> bool:
        """Whether threads on other cores help with steps; also true if the engine cannot use help."""
        return self._engine.is_helped or not self._can_be_helped

    @property
    def drafting(self) -> Drafting:
        """How the next step drafts."""
        policy = self.policy
        return Drafting(
            *(policy.allowed, policy.looked_at, policy.asleep, policy.depth, policy.promised),
            is_unread=policy.is_unread,
            num_changes=policy.num_changes,
        )

    def follow_drafting(self) -> None:
        """Set `curve`, the expected seconds of the next step by its rows."""
        basis = self.policy.num_changes, self.is_helped, self.forecast.heard
        if basis != self._basis:
            self._basis = basis
            felt = self.forecast.felt(Choice(self.policy.allowed)).sources
            self.curve = self.time.curve(StepKind(felt, is_helped=self.is_helped))

    @property
    def allows_remote(self) -> bool:
        """Whether draft workers are used."""
        return REMOTE in self.policy.allowed

    def awaits(self, shares: Shares) -> bool:
        """Return whether the next step waits until the step of these shares has ended. No session is synchronous."""
        return self._awaits_drafts(shares) or self._awaits_histories(shares)

    def _awaits_drafts(self, shares: Shares) -> bool:
        if self._sources.are_own_awaited(shares.sessions, self.policy.allowed):
            return True
        if self.policy.uses(REMOTE) and not self.policy.is_early and shares.modes - {"plain"}:
            return True
        trees = shares.sessions[0].trees
        return bool(np.count_nonzero((trees.num_live[shares.places] > 0) & trees.takes_distributions[shares.places]))

    def _awaits_histories(self, shares: Shares) -> bool:
        """Return whether it waits for sessions that need their last token on the host.

        Without waiting, each of these sessions loses half a token a step. With waiting, all sessions lose the seconds
        that an early launch saves.
        """
        num_shaped = int(np.count_nonzero(shares.sessions[0].trees.needs_history[shares.places]))
        return num_shaped > 0 and num_shaped / 2 * self.curve(len(shares)) >= len(shares) * self.time.saved_s

    def saved_s(self, sessions: Sequence[Session]) -> float:
        """Return the seconds that a step of these sessions saves if it has no nodes.

        The next step is then launched before it has ended.
        """
        is_early = self._engine.overlaps and not any(session.waits for session in sessions)
        if not is_early or (self.policy.uses(REMOTE) and not self.policy.is_early):
            return 0.0
        return 0.0 if self._sources.are_own_awaited(sessions, self.policy.allowed) else self.time.saved_s

    def follow_load(self, sessions: OpenSessions, max_sessions: int) -> None:
        """Adapt to the number of sessions: how to draft, and whether the drafters' cores help.

        These threads help while no draft workers are used, and while prompts are computed. A step with many rows is
        faster with help even if drafters share the cores.
        """
        self.forecast.hear(self._sources.num_sent)
        if num_sessions := sessions.num_in_front:
            self.policy.meet(min(num_sessions, max_sessions))
        if self._can_be_helped:
            self._engine.is_helped = sessions.has_prompts or not self.policy.uses(REMOTE)
        self.follow_drafting()

    def share_background(self, sessions: OpenSessions) -> float | None:
        """Decide which sessions in the background join the next step beside others.

        Returns the seconds that rows of their prompts may take, if only these have prompts in the step; else 0. None:
        there is none beside others.
        """
        waiting = sessions.waiting()
        self.background.is_used = waiting is not None
        if waiting is None:
            return None
        share = self.background.share(waiting, self.curve, self.prefill.fixed_s)
        sessions.share_background(share.decoding, takes_prompts=share.prompt_s > 0)
        return share.prompt_s

    def wait_s(self, sessions: OpenSessions, num_running: int, now: float) -> float:
        """Return for how many seconds the next step waits for the rest of a burst; 0: not at all."""
        as_such_s, of_rows_s = self.prefill.parts_s(sessions.num_pending(), self.curve)
        return self.bursts.wait_s(now, num_running, as_such_s) if 2 * of_rows_s < as_such_s else 0.0

    def started(self, step: InFlightStep) -> float:
        """Return when the device began a step: not before the end of the last one."""
        return step.drafted if self.last_end is None else max(step.drafted, self.last_end)

    def keep_curves(self) -> None:
        """Let the engine keep what was learned of its steps, for later processes."""
        for is_helped, curve in self.time.learned_curves().items():
            keep_curve(self._engine, curve, is_helped=is_helped)

    # --- learning -----------------------------------------------------------------------------------------------------

    def note_draft(self, session_id: int, base_len: int, now: float) -> None:
        """Note the arrival of a draft, which may answer a commit."""
        took_s = self._round_trips.answer(session_id, base_len, now)
        if took_s is not None:
            self.forecast.learn_round_trip(took_s)

    def note_commit(self, rounds: Rounds, ended: float) -> None:
        """Note that drafters are about to receive these rounds."""
        if self.allows_remote:
            drafted = next((one for one in rounds.sessions if one.takes_drafts and not one.finish), None)
            if drafted is not None:
                self._round_trips.commit(drafted.session_id, drafted.length, ended)

    def end(self, collected: CollectedStep, rounds: Rounds, *, goes_on: bool) -> None:
        """Note the end of a step, for `learn`. `goes_on`: another step follows at once."""
        step, done, faults, ended, _ = collected
        waits = self._sources.clock.take(step.num_rows, self.curve)
        if len(done) == 1 and not faults.found and self.last_end is not None:
            is_told = step.shares.modes in TOLD
            seconds = ended - self.last_end
            own_s = seconds - step.waited_s
            self.prefill.learn(step.shares, step.num_rows, own_s, self.curve, is_late=step.is_late)
            if step.background is not None:
                self.background.learn(step.background, own_s)
            self._ended.append(EndedStep(step, rounds, seconds, waits, rounds.num_without_room, is_told))
        self.last_end = ended if goes_on else None
        is_due = self.policy.is_trying or len(self._ended) >= LEARN_EVERY or step.shares.prompts[0] > 0
        if is_due and not self._engine.overlaps:
            self.learn()

    def learn(self) -> None:
        """Learn from the ended steps, unless they had faults or did not follow another one at once.

        If the engine overlaps steps, the verifier calls this while the device computes.
        """
        ended, self._ended = self._ended, []
        for one in ended:
            self._learn(one)

    def _learn(self, ended: EndedStep) -> None:
        step, rounds, seconds, waits, num_without_room, is_told = ended
        self._basis = None
        shares, drafting = step.shares, step.drafting
        num_prompts, num_first = shares.prompts
        num_beside = shares.num_beside  # they have no drafts, and each has one token
        num_decoding = (shares.num_decoding if num_prompts else len(shares)) - num_beside
        num_drafted = max(num_decoding - num_without_room, 1)
        num_rounds = {name: 1 if name in drafting.looked_at else num_drafted for name in self.forecast.sources}
        judged = judged_of(rounds, num_rounds)
        drafted = {name for name, one in judged.items() if one.nodes.any()}
        felt = self.forecast.felt(Choice(drafting.sources)).sources
        is_unread = shares.batch.drafted is not None and self.forecast.may_be_unread(felt)
        kind = StepKind(felt | drafted, step.is_behind, is_unread, step.is_helped)
        rows = StepRows(step.num_rows, len(shares.nodes), num_prompts, shares.num_attended() if num_prompts else 0)
        self.policy.learn(
            Step(
                *(kind, rows, drafting.looked_at, drafting.depth, num_decoding),
                num_tokens=max(len(rounds.token_ids) - num_first - num_beside, 0),
                seconds=seconds,
                waits={name: waits.get(name, 0.0) for name in kind.sources},
                judged=judged,
                is_told=is_told,
                num_changes=drafting.num_changes,
            )
        )
