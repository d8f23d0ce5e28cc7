"""What the steps of a verifier have said, and what is decided by it, in one object."""

from __future__ import annotations

from specq.engines import Engine
from specq.protocol import REMOTE
from specq.verifier.control.arms import MOST_ROUND_TRIP_S, Arms
from specq.verifier.control.early_steps import EarlySteps
from specq.verifier.control.prefill_limit import PrefillLimit
from specq.verifier.control.round_trips import RoundTrips
from specq.verifier.control.source_yields import Yields
from specq.verifier.control.step_curve import StepCurve
from specq.verifier.control.window import Bursts
from specq.verifier.sessions.open_sessions import OpenSessions
from specq.verifier.sources import SourceSet
from specq.verifier.step.commit import Rounds
from specq.verifier.step.in_flight import CollectedStep, InFlightStep
from specq.verifier.step.node_choice import Shares

# A step says something of the sources of drafts if it computes so few rows of prompts; or if these take no more than
# such a part of its seconds, since where sessions come all the time each step has some.
MOST_PROMPT_ROWS, MOST_PROMPT_PART = 64, 0.8


class Controller:
    """Learns from the steps of one verifier.

    arms, early, prefill, bursts    which sources are used; which steps are launched early; how many rows of prompts a
                                    step has; whether it is put off
    curves    what steps take, without help from other cores and with it
    num_met   sessions of the load that the arms met last
    last_end  of the last step, if there was work to go on with at once
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
        self._engine, self._sources = engine, sources
        self._can_be_helped, self.curves = engine.is_helped, curves
        names, unpriced = ([one.name for one in found] for found in (sources.sources, sources.unpriced))
        self.arms = Arms(names, unpriced=unpriced, is_measured=measures_drafts)
        self.early = EarlySteps(engine, sources, self.arms)
        self.prefill, self.bursts = PrefillLimit(max_prefill_slowdown), Bursts()
        self._round_trips = RoundTrips(MOST_ROUND_TRIP_S)
        self.num_met = 0
        self.last_end: float | None = None

    @property
    def curve(self) -> StepCurve:
        """What steps take, with help from other cores or without, as it is now."""
        return self.curves[self._engine.is_helped or not self._can_be_helped]

    @property
    def allows_remote(self) -> bool:
        """Whether draft workers are used."""
        return REMOTE in self.arms.allowed

    def awaits(self, shares: Shares) -> bool:
        """Return whether the next step of these sessions waits until this one has ended."""
        return self.early.awaits(self.curve, shares)

    def follow_load(self, sessions: OpenSessions, max_sessions: int) -> None:
        """Use the sources of drafts that pay with so many sessions; and take help from the cores of drafters only while
        those are asked for nothing, or there are none, or prompts are computed: steps of many rows gain by it whoever
        else computes there."""
        if num_sessions := sessions.num_running:
            self.num_met = min(num_sessions, max_sessions)
            self.arms.meet(self.num_met)
        if self._can_be_helped:
            self.arms.hear(self._sources.num_sent)
            self._engine.is_helped = sessions.has_prompts or not self.arms.uses(REMOTE)

    def wait_s(self, sessions: OpenSessions, num_running: int, now: float) -> float:
        """Return for how many seconds the next step is put off for the others of a burst; 0: not at all."""
        as_such_s, of_rows_s = self.prefill.parts_s(sessions.num_pending(), self.curve)
        return self.bursts.wait_s(now, num_running, as_such_s) if 2 * of_rows_s < as_such_s else 0.0

    def note_draft(self, session_id: int, base_len: int, now: float) -> None:
        """Note that a draft has arrived, perhaps the answer to a commit."""
        took_s = self._round_trips.answer(session_id, base_len, now)
        if took_s is not None:
            self.arms.learn_round_trip(took_s)

    def note_commit(self, rounds: Rounds, ended: float) -> None:
        """Note that drafters are about to hear of these rounds."""
        if self.allows_remote:
            drafted = next((one for one in rounds.sessions if one.takes_drafts and not one.finish), None)
            if drafted is not None:
                self._round_trips.commit(drafted.session_id, drafted.length, ended)

    def started(self, step: InFlightStep) -> float:
        """Return when the device began with a step: when it had ended the one before."""
        return step.drafted if self.last_end is None else max(step.drafted, self.last_end)

    def learn(self, collected: CollectedStep, rounds: Rounds) -> None:
        """Learn from a step that came at once after another and went well."""
        step, done, faults, ended, _ = collected
        yields = self._sources.clock.yields(rounds, step.num_rows, self.curve)
        if len(done) == 1 and not faults.found and self.last_end is not None:
            self._learn(step, rounds, ended - self.last_end, yields)

    def _learn(self, step: InFlightStep, rounds: Rounds, seconds: float, yields: Yields) -> None:
        """Learn what a step takes; and which sources pay, where nobody waits for a drafter."""
        shares, prompts_s = step.shares, 0.0
        num_rows, num_first = shares.prompts()
        num_decoding = shares.num_decoding if num_rows else len(shares)
        is_told = shares.modes in ({"async"}, {"async", "plain"})
        if is_told and num_rows:
            prompts_s = self._prompts_s(step, num_rows, num_decoding)
        self.prefill.learn(shares, step.num_rows, seconds - step.waited_s, self.curve, is_late=step.is_late)
        self.early.learn(step, len(rounds.token_ids), seconds, self.curve)
        if is_told and (num_rows <= MOST_PROMPT_ROWS or prompts_s <= MOST_PROMPT_PART * seconds):
            num_tokens, beyond = max(len(rounds.token_ids) - num_first, 0), max(seconds - prompts_s, 0.0)
            self.arms.learn(
                step.num_met,
                num_tokens,
                beyond,
                self._sources.num_added,
                yields,
                num_decoding=num_decoding,
                is_crowded=num_rows > 0,
            )

    def _prompts_s(self, step: InFlightStep, num_rows: int, num_decoding: int) -> float:
        """Return what so many rows of prompts would have added to a step in which nothing was drafted: few of them by
        the profile, many by what was learned of prompts. What they take longer beside a source of drafts counts against
        that."""
        if num_rows <= MOST_PROMPT_ROWS:
            profiled = self.curves[-1].profiled
            return profiled(num_decoding + num_rows) - profiled(num_decoding)
        chunks = step.shares.prompt_chunks()
        return self.prefill.prompts_s(chunks, num_decoding, self.curve, is_late=step.is_late)
