"""Choose which sources draft, how deep, and whether drafts are verified before they are read.

The choice with the most expected tokens per expected second is used (`specq.verifier.control.forecast`). Plain decoding
comes first, until drafts are found to pay. A choice with a part of the sources in use replaces them once its forecast
is better. Any other choice needs a probe.

A probe drafts for one session first, then for all. It ends at the first step that shows that it loses or wins. It may
begin if its choice *may* be better, given how uncertain the forecast is. What is known of a silent source fades, so its
forecast becomes less certain. Choices that differ only in whether drafts are read first bring the same tokens. So only
their seconds are compared.

All probes together may lose BUDGET of the tokens (the credit). A forecast gain counts as credit when a probe begins.

Pure: no clock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import structlog

from specq.verifier.control.choices import DECISIONS, Choice, DraftDecision, Step
from specq.verifier.control.forecast import HORIZON, Forecast, Foreseen
from specq.verifier.models.token_yield import NUM_LEVELS

log = structlog.get_logger(__name__)

PLAIN = Choice()
BUDGET = 0.01  # part of the tokens that probes may lose
# Credit in plain steps of one session: at first, saved at most, and overdrawn by one probe at most. MOST_DEBT_S is the
# overdraft in seconds, if that is more. At BUDGET it is repaid in 3 s.
FIRST_CREDIT, MOST_CREDIT, MOST_DEBT, MOST_DEBT_S = 20.0, 6.0, 1.0, 0.03
FIRST_STEPS = 200  # steps after which the credit is limited to MOST_CREDIT
MARGIN = 0.015  # difference of log rates by which another choice must be better
# A probe begins if the gain plus OPTIMISM standard deviations is above MARGIN. It is lost if the gain plus DOUBT
# standard deviations is below 0. The gain is the difference of log rates.
OPTIMISM, DOUBT = 1.5, 0.6
FIRST_PLAIN = 6  # steps before the first probe, to learn the times of plain decoding
WARM_UP = 2  # steps of a probe before it may end
LOOK_STEPS, LEAST_STEPS = 6, 4  # most steps with one session; fewest steps with all sessions before a probe wins
FULL_STEPS, FULL_ROUNDS = 16, 60  # steps and rounds with all sessions after which a probe is lost
PROBE_DEPTH = 2  # fewest levels in a probe: only levels that are drafted can be found to be accepted
REST = 64  # steps after a lost probe before the next one of the same choice
LOAD_CHANGE = 0.25  # part of the sessions by which the load must change for a new choice at once
CHOOSE_EVERY, CHOOSE_S = 4, 0.1  # fewest steps and seconds between two choices without a probe
ASLEEP = -0.1  # a source whose choices can gain at most this log rate need not follow the texts
KEPT_DECISIONS = 64


@dataclass(slots=True)
class _Probe:
    """A choice that is tried, with one session (`is_look`) or all."""

    choice: Choice
    is_look: bool
    num_steps: int = 0
    num_rounds: int = 0


class Policy:
    """Decides after each step how the next one drafts.

    allowed       the sources that may draft.
    looked_at     the part of `allowed` that drafts for one session only.
    asleep        sources that need not follow the texts.
    depth         levels that a draft model drafts.
    promised      drafted tokens that are expected to be accepted in a session's round.
    is_unread     whether drafts are verified before they are read, if that is possible.
    is_early      whether steps are launched early although draft workers draft.
    num_changes   how often one of `allowed`, `looked_at`, `is_unread` and `is_early` has changed.
    used          the choice in use.
    decisions     the last KEPT_DECISIONS decisions.
    num_decided   the number of decisions by reason.
    """

    def __init__(self, forecast: Forecast, *, first_s: float, is_measured: bool = True) -> None:
        """`first_s`: seconds of a plain step with one session. `is_measured`: if False, all sources always draft."""
        self.forecast, self._first_s, self._is_measured = forecast, first_s, is_measured
        self.used = PLAIN if is_measured else Choice(forecast.sources)
        self.allowed, self.looked_at, self.asleep = self.used.sources, PLAIN.sources, PLAIN.sources
        self.depth, self.promised, self.is_unread, self.is_early = NUM_LEVELS, 0.0, False, False
        self.num_changes = 0
        self.decisions = deque[DraftDecision](maxlen=KEPT_DECISIONS)
        self.num_decided = dict.fromkeys(DECISIONS, 0)
        self._probe: _Probe | None = None
        self._last_probe: _Probe | None = None
        self._probed = range(0)  # values of `num_changes` of steps that were planned in it, unless it was won
        self._is_tried = False  # whether the last step was one of these
        self._credit, self._most_debt_s = FIRST_CREDIT * first_s, max(MOST_DEBT * first_s, MOST_DEBT_S)
        # for each lost choice: the step before which no probe of it begins, and at which number of sessions
        self._rests: dict[Choice, tuple[int, int]] = {}
        self._num_sessions = self._num_steps = self._chosen_at = 0
        self._since_s = 0.0  # seconds since the last choice
        self._apply()

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def is_trying(self) -> bool:
        """Whether a choice is being tried, so that each step counts at once."""
        return self._probe is not None

    def uses(self, source: str) -> bool:
        """Return whether a source is allowed, and has ever sent a node."""
        return source in self.allowed and source in self.forecast.heard

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of heartbeats (`specq.protocol.stats`).

        choices     for each choice: whether it is in use, and its forecast tokens a second at the present load.
        decisions   the number of decisions by reason.
        decided     the last decision, as the values of `trace_events.DECIDED`.
        """
        if not self._num_sessions:
            return {"choices": {}, "decisions": {}}
        used = self.forecast.felt(self.used)
        choices = {
            str(one): [int(one == used), round(self.forecast.foresee(one, self._num_sessions).rate, 2)]
            for one in self._choices(used)
        }
        decisions = {name: count for name, count in self.num_decided.items() if count}
        decided = self.decisions[-1].numbers() if self.decisions else []
        return {"choices": choices, "decisions": decisions, "decided": decided}

    # --- learning -----------------------------------------------------------------------------------------------------

    def meet(self, num_sessions: int) -> None:
        """Take in how many sessions the next step has.

        If they change by more than LOAD_CHANGE, choose anew.
        """
        if abs(num_sessions - self._num_sessions) > LOAD_CHANGE * self._num_sessions:
            self._num_sessions = num_sessions
            self._decide(is_due=True)

    def learn(self, step: Step) -> None:
        """Learn from a step that followed another one at once, and decide."""
        kind = step.kind
        choice = Choice(kind.sources, kind.is_unread, kind.is_early and bool(kind.sources))
        self.forecast.learn(step, self.forecast.felt(choice))
        if step.is_told and step.num_sessions:
            self._num_steps += 1
            self._pay(step)
            self._since_s += step.seconds
            self._decide(is_due=self._since_s >= CHOOSE_S and self._num_steps >= self._chosen_at + CHOOSE_EVERY)

    def _pay(self, step: Step) -> None:
        """Add credit for probes, and subtract what a probe lost in this step.

        Steps that were planned before the probe do not count for it. Those that were planned before it ended still
        cost, and so does the next one, which was not launched early.
        """
        before, unit = self._credit, self._first_s
        if before < MOST_CREDIT * unit:
            self._credit += BUDGET * step.seconds
        elif self._num_steps > FIRST_STEPS:
            self._credit = MOST_CREDIT * unit
        if self._probe is not None and step.num_changes in {None, self.num_changes}:
            self._probe.num_steps += 1
            self._probe.num_rounds += step.num_sessions
        was_tried, self._is_tried = (
            self._is_tried,
            step.num_changes in self._probed or (step.num_changes is None and self._probe is not None),
        )
        if was_tried or self._is_tried:
            lost_s = self.forecast.lost_s(step, self.used)
            self._credit = min(max(self._credit - lost_s, -self._most_debt_s), max(before, MOST_CREDIT * unit))

    # --- decisions ----------------------------------------------------------------------------------------------------

    def _decide(self, *, is_due: bool) -> None:
        """Continue the probe, if there is one, or choose, if that is due."""
        if self._probe is None and not is_due:
            return
        self._chosen_at, self._since_s = self._num_steps, 0.0
        if self._num_sessions and self._num_steps >= FIRST_PLAIN:
            if self._probe is not None:
                self._go_on(self._probe)
            if self._probe is None and is_due:
                self._choose()
        self._apply()

    def _go_on(self, probe: _Probe) -> None:
        """End a probe if it has lost or won, or continue it with all sessions."""
        if probe.num_steps < WARM_UP:
            return
        now, other = (self.forecast.foresee(one, self._num_sessions) for one in (self.used, probe.choice))
        gain = other.log_rate - now.log_rate
        if gain + DOUBT * self._deviation(probe.choice, other) < 0:
            self._end_probe("probe_lost", now, other)
        elif probe.is_look:
            if gain > MARGIN or probe.num_steps >= LOOK_STEPS:
                probe.is_look, probe.num_steps, probe.num_rounds = False, 0, 0
        elif gain > MARGIN and probe.num_steps >= LEAST_STEPS:
            self._use(probe.choice, "probe_won", now, other)
        elif probe.num_steps >= FULL_STEPS and probe.num_rounds >= FULL_ROUNDS:
            self._end_probe("probe_lost", now, other)

    def _deviation(self, choice: Choice, other: Foreseen) -> float:
        """Return the standard deviation of a choice's log rate, compared with the choice in use.

        If both differ only in `is_unread`, they bring the same tokens. So only the seconds are uncertain.
        """
        used = self.forecast.felt(self.used)
        return other.of_seconds if choice == used._replace(is_unread=choice.is_unread) else other.deviation

    def _end_probe(self, reason: str, now: Foreseen, other: Foreseen) -> None:
        probe, self._probe = self._probe, None
        assert probe is not None
        self._rests[probe.choice] = self._num_steps + REST, self._num_sessions
        self._note(reason, now, probe.choice, other)

    def _use(self, choice: Choice, reason: str, now: Foreseen, other: Foreseen) -> None:
        before, self.used, self._probe, self._probed = self.used, choice, None, range(0)
        self._note(reason, other, before, now)

    def _note(self, reason: str, now: Foreseen, choice: Choice, other: Foreseen) -> None:
        """Record a decision: the choice in use from now on, and the choice that it was compared with."""
        decision = DraftDecision(
            self._num_steps, self._num_sessions, reason, self.forecast.felt(self.used), now.rate, choice, other.rate
        )
        self.decisions.append(decision)
        self.num_decided[reason] += 1
        log.debug("draft_choice_made", **decision.shown())

    def _choose(self) -> None:
        """Use a part of the sources in use if that is better, or probe the choice with the largest possible gain."""
        used, count = self.forecast.felt(self.used), self._num_sessions
        now = self.forecast.foresee(used, count)
        step_s = count * now.tokens / now.rate
        better, best_rate = None, now.log_rate + MARGIN
        tried, most_gain = None, MARGIN
        promises = dict.fromkeys(self.forecast.sources, -math.inf)
        for one in self._choices(used):
            if one == used:
                continue
            other = self.forecast.joining(one, used, count)
            if one.sources < used.sources and other.log_rate > best_rate:
                better, best_rate = (one, other), other.log_rate
            gain = other.log_rate + OPTIMISM * self._deviation(one, other) - now.log_rate
            promises |= {name: max(promises[name], gain) for name in one.sources}
            won_s = HORIZON * step_s * max(other.log_rate - now.log_rate, 0.0)
            if gain > most_gain and self._credit + won_s > 0 and not self._rests_now(one):
                tried, most_gain = (one, other), gain
        self.asleep = frozenset(name for name, gain in promises.items() if gain < ASLEEP) - used.sources
        if better is not None:
            self._use(better[0], "drafts_fell", now, better[1])
        elif tried is not None:
            choice, other = tried
            is_known = all(map(self.forecast.is_known, choice.sources - used.sources))
            self._probe = _Probe(choice, count > 1 and not is_known)
            self._note("probe", now, choice, other)

    def _rests_now(self, choice: Choice) -> bool:
        """Return whether a probe of a choice was lost a short time ago, at about the same load."""
        until, num_sessions = self._rests.get(choice, (0, 0))
        return self._num_steps < until and num_sessions / 2 < self._num_sessions < 2 * num_sessions

    def _choices(self, used: Choice) -> list[Choice]:
        """Return the choices that may be made, with the one in use.

        If drafts are not measured, all sources draft in each of them. If they are, choices with early launches are left
        out. Plain decoding is better than drafts that come too late.
        """
        found = self.forecast.choices(used)
        if self._is_measured:
            return [one for one in found if one == used or not one.is_early]
        return [one for one in found if one.sources == used.sources]

    def _apply(self) -> None:
        """Set what the sources must do from now on, by the current choice or probe."""
        silent = self.forecast.sources - self.forecast.felt(Choice(self.forecast.sources)).sources
        used, probe = self.used, self._probe
        before = self.allowed, self.looked_at, self.is_unread, self.is_early
        self.looked_at = PLAIN.sources
        if probe is None:
            choice = used
        elif probe.is_look:
            choice, self.looked_at = Choice(used.sources | probe.choice.sources), probe.choice.sources - used.sources
        else:
            choice = probe.choice
        self.allowed, self.is_unread, self.is_early = choice.sources | silent, choice.is_unread, choice.is_early
        self.num_changes += before != (self.allowed, self.looked_at, self.is_unread, self.is_early)
        if probe is not None:
            begun = self.num_changes if probe is not self._last_probe else self._probed.start
            self._probed, self._last_probe = range(begun, self.num_changes + 1), probe
        self.asleep -= self.allowed
        if choice.sources and self._num_sessions:
            foreseen = self.forecast.foresee(choice, self._num_sessions)
            least = 0 if probe is None else PROBE_DEPTH
            self.depth, self.promised = max(foreseen.depth, least), foreseen.tokens - 1.0
