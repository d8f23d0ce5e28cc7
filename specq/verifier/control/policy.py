"""Which sources draft, how deep, and whether drafts are verified before they are read: of all choices the one with most
expected tokens by expected seconds.

A choice is foreseen: tokens by what each source's drafts have brought (`specq.verifier.models.token_yield`), seconds by
what steps take (`specq.verifier.models.step_time`). What was foreseen wrongly of a choice's tokens, since sources find
the same ones, is learned as a ratio. Where what is in use is foreseen to be worse than a part of it, that part is used
at once. Whatever adds a source must be tried first, in a probe: one session at first, then all; it ends at the first
step that shows that it loses, or wins.

A probe may begin where its choice may be better, given how little is known of it: what is known of a silent source
fades. All probes together may lose BUDGET of the tokens (`credit`); one that is foreseen to win costs nothing.

Plain decoding comes first, until drafts are found to pay. Pure: no clock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import structlog

from specq.verifier.control.choices import DECISIONS, Choice, DraftDecision, Step
from specq.verifier.control.forecast import Forecast, Foreseen
from specq.verifier.models.token_yield import NUM_LEVELS

log = structlog.get_logger(__name__)

PLAIN = Choice()
BUDGET = 0.01  # of the tokens
# In plain steps of one session: what may be lost at first, what is put by at most, and what one probe may overdraw; or
# so many seconds, if that is more, which are paid for in some.
FIRST_CREDIT, MOST_CREDIT, MOST_DEBT, MOST_DEBT_S = 20.0, 6.0, 1.0, 0.03
FIRST_STEPS = 200  # within which the first credit is of use
MARGIN = 0.015  # of the logarithm of a rate, by which another choice must be better
FREE = 0.03  # by which one is foreseen to be better whose probe costs nothing
# Standard deviations: a probe begins if a choice may be better by so many, and ends if it is worse by so many.
OPTIMISM, DOUBT = 1.5, 0.6
FIRST_PLAIN = 6  # steps before the first probe, so that it is known what plain decoding takes
WARM_UP = 2  # steps of a probe before it may end
LOOK_STEPS, LEAST_STEPS = 6, 4  # of one session at most; of all sessions at least, before the choice is used
FULL_STEPS, FULL_ROUNDS = 16, 60  # of all sessions, after which a probe has lost
PROBE_DEPTH = 2  # levels at least of what is tried: what never goes deep is not seen to be right there
REST = 64  # steps after a lost probe before the next one of the same choice
LOAD_CHANGE = 0.25  # of the sessions: from there on the choice is made anew
CHOOSE_EVERY, CHOOSE_S = 4, 0.1  # steps and seconds at least, where nothing is being tried
ASLEEP = -0.1  # of the logarithm of the rate: a source that cannot bring more need not follow the texts
KEPT_DECISIONS = 64


@dataclass(slots=True)
class _Probe:
    """A choice that is tried: with one session (`is_look`) or all; `is_free`: it was foreseen to win."""

    choice: Choice
    is_look: bool
    is_free: bool
    num_steps: int = 0
    num_rounds: int = 0


class Policy:
    """Told of each step, it says how the next one drafts.

    allowed      sources that may draft; looked_at: those of them that draft for one session alone
    asleep       sources that need not follow the texts
    depth, promised   levels that a draft model drafts, and the tokens of a round that it is expected to bring
    is_unread    whether its drafts are verified before they are read, where they can be
    is_early     whether steps are launched early though draft workers draft
    used         the choice in use; decisions: the last ones
    """

    def __init__(self, forecast: Forecast, *, first_s: float, is_measured: bool = True) -> None:
        """`first_s`: of a plain step of one session; `is_measured`: else all sources always draft."""
        self.forecast, self._first_s, self._is_measured = forecast, first_s, is_measured
        self.used = PLAIN if is_measured else Choice(forecast.sources)
        self.allowed, self.looked_at, self.asleep = self.used.sources, PLAIN.sources, PLAIN.sources
        self.depth, self.promised, self.is_unread, self.is_early = NUM_LEVELS, 0.0, False, False
        self.decisions = deque[DraftDecision](maxlen=KEPT_DECISIONS)
        self.num_decided = dict.fromkeys(DECISIONS, 0)
        self._probe: _Probe | None = None
        self._credit = FIRST_CREDIT * first_s
        self._rests: dict[Choice, int] = {}  # the step before which no probe of it begins
        self._num_sessions = self._num_steps = self._chosen_at = 0
        self._since_s = 0.0  # since it was chosen last
        self._apply()

    # --- what is asked of it ------------------------------------------------------------------------------------------

    def uses(self, source: str) -> bool:
        """Return whether a source is allowed, and has ever sent anything."""
        return source in self.allowed and source in self.forecast.heard

    def metrics(self) -> dict[str, Any]:
        """Return what is foreseen of each choice at the present load, by the names of heartbeats
        (`specq.protocol.stats`): whether it is in use, and tokens a second; how often what was decided, and
        what was last (as `trace_events.DECIDED`)."""
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

    # --- what it is told ----------------------------------------------------------------------------------------------

    def meet(self, num_sessions: int) -> None:
        """Take in how many sessions the next step has."""
        if not self._num_sessions / 2 < num_sessions < 2 * self._num_sessions:
            self._rests.clear()
        if abs(num_sessions - self._num_sessions) > LOAD_CHANGE * self._num_sessions:
            self._num_sessions = num_sessions
            self._decide(is_due=True)

    def learn(self, step: Step) -> None:
        """Take in a step that came at once after another."""
        kind = step.kind
        choice = Choice(kind.sources, kind.is_unread, kind.is_early and bool(kind.sources))
        self.forecast.learn(step, self.forecast.felt(choice))
        if step.is_told and step.num_sessions:
            self._num_steps += 1
            self._pay(step)
            self._since_s += step.seconds
            self._decide(is_due=self._since_s >= CHOOSE_S and self._num_steps >= self._chosen_at + CHOOSE_EVERY)

    def _pay(self, step: Step) -> None:
        """Put by what probes may lose, and take what this one has lost: of a step with prompts, what the sources that
        are tried were waited for."""
        before, unit = self._credit, self._first_s
        if before < MOST_CREDIT * unit:
            self._credit += BUDGET * step.seconds
        elif self._num_steps > FIRST_STEPS:
            self._credit = MOST_CREDIT * unit
        if self._probe is None:
            return
        self._probe.num_steps += 1
        self._probe.num_rounds += step.num_sessions
        if self._probe.is_free:
            return
        if step.rows.prompts:
            lost_s = sum((step.waits.get(name, 0.0) for name in step.kind.sources - self.used.sources), 0.0)
        else:
            usual = self.forecast.foresee(self.used, step.num_sessions, prompts=False)
            lost_s = step.seconds - step.num_tokens / usual.rate
        most_debt = max(MOST_DEBT * unit, MOST_DEBT_S)
        self._credit = min(max(self._credit - lost_s, -most_debt), max(before, MOST_CREDIT * unit))

    # --- what is decided ----------------------------------------------------------------------------------------------

    def _decide(self, *, is_due: bool) -> None:
        """Go on with a probe, or choose, if that is due."""
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
        """End a probe if it has lost or won, or go on with all sessions."""
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
        """Return how far a choice may be from what is foreseen of it beside what is in use: drafts bring the same
        tokens, unread or not."""
        used = self.forecast.felt(self.used)
        return other.of_seconds if choice == used._replace(is_unread=choice.is_unread) else other.deviation

    def _end_probe(self, reason: str, now: Foreseen, other: Foreseen) -> None:
        probe, self._probe = self._probe, None
        assert probe is not None
        self._rests[probe.choice] = self._num_steps + REST
        self._note(reason, now, probe.choice, other)

    def _use(self, choice: Choice, reason: str, now: Foreseen, other: Foreseen) -> None:
        before, self.used, self._probe = self.used, choice, None
        self._note(reason, other, before, now)

    def _note(self, reason: str, now: Foreseen, choice: Choice, other: Foreseen) -> None:
        """Keep a decision: what is in use from now on, and the choice that it was held against."""
        decision = DraftDecision(
            self._num_steps, self._num_sessions, reason, self.forecast.felt(self.used), now.rate, choice, other.rate
        )
        self.decisions.append(decision)
        self.num_decided[reason] += 1
        log.debug("draft_choice_made", **decision.shown())

    def _choose(self) -> None:
        """Use a part of what is in use if that is better, or begin the probe of what may be better by most."""
        used, count = self.forecast.felt(self.used), self._num_sessions
        now = self.forecast.foresee(used, count)
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
            is_free = other.log_rate > now.log_rate + FREE
            if gain > most_gain and (is_free or self._credit > 0) and self._rests.get(one, 0) <= self._num_steps:
                tried, most_gain = (one, other, is_free), gain
        self.asleep = frozenset(name for name, gain in promises.items() if gain < ASLEEP) - used.sources
        if better is not None:
            self._use(better[0], "drafts_fell", now, better[1])
        elif tried is not None:
            choice, other, is_free = tried
            is_known = all(map(self.forecast.is_known, choice.sources - used.sources))
            self._probe = _Probe(choice, count > 1 and not is_known, is_free)
            self._note("probe", now, choice, other)

    def _choices(self, used: Choice) -> list[Choice]:
        """Return the choices that may be made, and what is in use: where drafts are not measured, all sources draft, in
        one way or another; where they are, plain decoding is better than drafts that come too late."""
        found = self.forecast.choices(used)
        if self._is_measured:
            return [one for one in found if one == used or not one.is_early]
        return [one for one in found if one.sources == used.sources]

    def _apply(self) -> None:
        """Set what is asked of the sources from now on."""
        silent = self.forecast.sources - self.forecast.felt(Choice(self.forecast.sources)).sources
        used, probe = self.used, self._probe
        self.looked_at = PLAIN.sources
        if probe is None:
            choice = used
        elif probe.is_look:
            choice, self.looked_at = Choice(used.sources | probe.choice.sources), probe.choice.sources - used.sources
        else:
            choice = probe.choice
        self.allowed, self.is_unread, self.is_early = choice.sources | silent, choice.is_unread, choice.is_early
        self.asleep -= self.allowed
        if choice.sources and self._num_sessions:
            foreseen = self.forecast.foresee(choice, self._num_sessions)
            least = 0 if probe is None else PROBE_DEPTH
            self.depth, self.promised = max(foreseen.depth, least), foreseen.tokens - 1.0
