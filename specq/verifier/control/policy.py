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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import structlog

from specq.protocol import REMOTE, Float64Array
from specq.verifier.control.choices import DECISIONS, Choice, DraftDecision, Sources, SourceTraits, Step
from specq.verifier.models.goodput import best_by_goodput
from specq.verifier.models.step_time import StepKind, StepRows, StepTime
from specq.verifier.models.token_yield import NUM_LEVELS, TokenYield

log = structlog.get_logger(__name__)

PLAIN = Choice()
BUDGET = 0.01  # of the tokens
# In plain steps of one session: what may be lost at first, what is put by at most, and what one probe may overdraw.
FIRST_CREDIT, MOST_CREDIT, MOST_DEBT = 20.0, 6.0, 1.0
MARGIN = 0.015  # of the logarithm of a rate, by which another choice must be better
FREE = 0.03  # by which one is foreseen to be better whose probe costs nothing
# Standard deviations: a probe begins if a choice may be better by so many, and ends if it is worse by so many.
OPTIMISM, DOUBT = 1.5, 0.6
WARM_UP = 2  # steps of a probe before it may end
LOOK_STEPS, LEAST_STEPS = 6, 4  # of one session at most; of all sessions at least, before the choice is used
FULL_STEPS, FULL_ROUNDS = 16, 60  # of all sessions, after which a probe has lost
REST = 32  # steps after a lost probe before the next one of the same choice
KNOWN_ROUNDS = 12.0  # that a source's counts must be worth, so that it is not tried with one session first
SHARED = 0.5  # of what two sources add that find tokens independently, before it is known how much they find alike
RATIO_PRIOR, RATIO_MEMORY, RATIO_STEPS = 30.0, 300.0, 8.0  # tokens; rounds; steps
HORIZON = 40  # steps over which the first one of a source that joins is spread
PROMPT_FADE = 0.03  # of what is known of rows of prompts, with each step
ROUND_TRIPS, ROUND_TRIP_FADE, MOST_ROUND_TRIP_S = 2, 0.1, 1.0  # before a remote drafter's silence says something
LOAD_CHANGE = 0.1  # of the sessions: from there on the choice is made anew
CHOOSE_EVERY = 4  # steps, where nothing is being tried
ALL_SETS, MOST_DEVIATION = 4, 0.3  # sources up to which all sets of them are choices; of what seconds are foreseen
ASLEEP = -0.1  # of the logarithm of the rate: a source that cannot bring more need not follow the texts
KEPT_DECISIONS = 64


class Foreseen(NamedTuple):
    """What a choice is expected to bring: the logarithm of tokens a second and its standard deviation, the tokens of a
    session's round, and the number of levels that pay."""

    log_rate: float
    deviation: float
    tokens: float
    depth: int

    @property
    def rate(self) -> float:
        return math.exp(self.log_rate)


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
    used         the choice in use; decisions: the last ones
    """

    def __init__(
        self,
        sources: Iterable[SourceTraits],
        time: StepTime,
        *,
        overlaps: bool,
        first_s: float,
        is_measured: bool = True,
    ) -> None:
        """`first_s`: of a plain step of one session; `is_measured`: else all sources always draft."""
        self._traits = {one.name: one for one in sources}
        self._time, self._overlaps, self._first_s, self._is_measured = time, overlaps, first_s, is_measured
        self.sources: Sources = frozenset(self._traits)
        self.yields = {name: TokenYield() for name in self._traits}
        self.used = PLAIN if is_measured else Choice(self.sources)
        self.allowed, self.looked_at, self.asleep = self.used.sources, PLAIN.sources, PLAIN.sources
        self.depth, self.promised, self.is_unread = NUM_LEVELS, 0.0, False
        self.decisions = deque[DraftDecision](maxlen=KEPT_DECISIONS)
        self.num_decided = dict.fromkeys(DECISIONS, 0)
        self._heard: Sources = frozenset()
        self._probe: _Probe | None = None
        self._credit = FIRST_CREDIT * first_s
        self._ratios: dict[Choice, tuple[float, float]] = {}  # tokens that a choice brought, and that were foreseen
        self._rests: dict[Choice, int] = {}  # the step before which no probe of it begins
        self._joined_s: dict[str, float] = {}  # for how long each source has drafted without a break
        self._prompts: Float64Array = np.zeros(
            4
        )  # of a step, means: whether it has some, rows, tokens attended; tokens
        self._round_trip_s = 0.0
        self._num_sessions = self._num_steps = 0
        self._apply()

    # --- what is asked of it ------------------------------------------------------------------------------------------

    def uses(self, source: str) -> bool:
        """Return whether a source is allowed, and has ever sent anything."""
        return source in self.allowed and source in self._heard

    def metrics(self) -> dict[str, Any]:
        """Return what is foreseen of each choice at the present load, by the names of heartbeats
        (`specq.protocol.stats`): whether it is in use, and tokens a second; how often what was decided, and
        what was last (as `trace_events.DECIDED`)."""
        if not self._num_sessions:
            return {"choices": {}, "decisions": {}}
        choices = {
            str(one): [int(one == self._felt(self.used)), round(self.foresee(one, self._num_sessions).rate, 2)]
            for one in self._choices()
        }
        decisions = {name: count for name, count in self.num_decided.items() if count}
        decided = self.decisions[-1].numbers() if self.decisions else []
        return {"choices": choices, "decisions": decisions, "decided": decided}

    # --- what it is told ----------------------------------------------------------------------------------------------

    def hear(self, num_sent: Mapping[str, int]) -> None:
        """Take in how many nodes each source has sent in all: one that has sent nothing is always allowed, and not
        compared, so that whoever joins is heard."""
        self._heard |= {source for source, count in num_sent.items() if count}

    def learn_round_trip(self, seconds: float) -> None:
        """Take in how long after a verdict the first draft came that had seen it."""
        self._round_trip_s += ROUND_TRIP_FADE * (min(seconds, MOST_ROUND_TRIP_S) - self._round_trip_s)

    def meet(self, num_sessions: int) -> None:
        """Take in how many sessions the next step has."""
        if abs(num_sessions - self._num_sessions) > LOAD_CHANGE * self._num_sessions:
            self._num_sessions = num_sessions
            self._decide(is_due=True)

    def learn(self, step: Step) -> None:
        """Take in a step that came at once after another; `step.is_told`: the modes of its sessions let drafts pay or
        not. Others only say what steps take."""
        used, joins = self._felt(Choice(step.kind.sources, step.kind.is_unread)), self._join(step)
        if not joins:
            waited_s = sum(self._waited_s(name, step) for name in step.waits)
            self._time.learn(step.kind, step.rows, max(step.seconds - waited_s, 0.0))
        if not (step.is_told and step.num_sessions):
            return
        self._prompts += PROMPT_FADE * (
            np.array([step.rows.prompts > 0, step.rows.prompts, step.rows.attended, step.num_tokens]) - self._prompts
        )
        for name, one in self.yields.items():
            if name not in used.sources:
                one.pass_by()
            elif self._says_something(name, step):
                self._learn_wait(name, step, joins=name in joins)
                if one.learn(step.judged[name], is_unread=step.kind.is_unread):
                    log.debug("drafts_changed", source=name)
        if used.sources and not step.looked_at:
            self._learn_ratio(used, step)
        self._num_steps += 1
        self._num_sessions = step.num_sessions
        self._pay(step)
        self._decide(is_due=self._num_steps % CHOOSE_EVERY == 0)

    def _join(self, step: Step) -> Sources:
        """Return the sources that were silent in the step before."""
        for name in self._joined_s.keys() - step.kind.sources:
            del self._joined_s[name]
        joins = frozenset(step.kind.sources) - self._joined_s.keys()
        for name in step.kind.sources:
            self._joined_s[name] = self._joined_s.get(name, -step.seconds) + step.seconds
        return joins

    def _says_something(self, name: str, step: Step) -> bool:
        """Return whether a step says something of a source: draft workers have had the time to answer, and prompts have
        left room for its drafts."""
        is_late = name == REMOTE and self._joined_s[name] < ROUND_TRIPS * self._round_trip_s
        return not is_late and bool(step.judged[name].tried.any() or not step.rows.prompts)

    def _waited_s(self, name: str, step: Step) -> float:
        """Return for how long a source was waited for; of drafts that were not read before the step was launched, for
        how long it would have been: what that saves is the step's."""
        return float(self._foreseen_s(name, step)[1][0]) if step.kind.is_unread else step.waits[name]

    def _foreseen_s(self, name: str, step: Step) -> tuple[float, Float64Array]:
        """Return what was foreseen of a draft at the start, and for how long the source is expected to be waited
        for."""
        count = step.judged[name].num_rounds
        foreseen_s = self._traits[name].draft_s(count, step.depth)
        return foreseen_s, self._time.wait(name).of(count, np.array([foreseen_s]))

    def _learn_wait(self, name: str, step: Step, *, joins: bool) -> None:
        if not step.kind.is_unread:
            count, (foreseen_s, _) = step.judged[name].num_rounds, self._foreseen_s(name, step)
            self._time.wait(name).learn(count, step.waits.get(name, 0.0), foreseen_s, joins=joins)

    def _learn_ratio(self, used: Choice, step: Step) -> None:
        """Learn how many tokens a choice brings, relative to what is foreseen of its sources."""
        ratio = self._ratio(used)
        foreseen = self.foresee(used, step.num_sessions).tokens / ratio
        keep = math.exp(-min(step.num_sessions / RATIO_MEMORY, 1 / RATIO_STEPS))
        brought, expected = self._ratios.get(used, (0.0, 0.0))
        self._ratios[used] = keep * brought + step.num_tokens, keep * expected + step.num_sessions * foreseen

    def _ratio(self, choice: Choice) -> float:
        brought, expected = self._ratios.get(choice, (0.0, 0.0))
        return (brought + RATIO_PRIOR) / (expected + RATIO_PRIOR)

    def _pay(self, step: Step) -> None:
        """Put by what probes may lose, and take what this one has lost: of a step with prompts, what the sources that
        are tried were waited for."""
        before, unit = self._credit, self._first_s
        if before < MOST_CREDIT * unit:
            self._credit += BUDGET * step.seconds
        if self._probe is None:
            return
        self._probe.num_steps += 1
        self._probe.num_rounds += step.num_sessions
        if self._probe.is_free:
            return
        if step.rows.prompts:
            lost_s = sum((step.waits.get(name, 0.0) for name in step.kind.sources - self.used.sources), 0.0)
        else:
            lost_s = step.seconds - step.num_tokens / self.foresee(self.used, step.num_sessions, prompts=False).rate
        self._credit = min(max(self._credit - lost_s, -MOST_DEBT * unit), max(before, MOST_CREDIT * unit))

    # --- what is foreseen ---------------------------------------------------------------------------------------------

    def _felt(self, choice: Choice) -> Choice:
        """Return a choice without draft workers that were never heard."""
        return choice if REMOTE in self._heard else choice.without(REMOTE)

    def kind(self, choice: Choice) -> StepKind:
        """Return what the steps of a choice are like."""
        sources = self._felt(choice).sources
        return StepKind(sources, self._overlaps and not sources, choice.is_unread, REMOTE not in sources)

    def foresee(self, choice: Choice, num_sessions: int, *, prompts: bool = True) -> Foreseen:
        """Return what a choice is expected to bring; `prompts`: in steps of which some have rows of prompts."""
        kind = self.kind(choice)
        sources = sorted(kind.sources)
        reach, misses, offered = np.zeros(NUM_LEVELS), np.ones(NUM_LEVELS), np.zeros(NUM_LEVELS)
        of_tokens, waits_s, doubted_s = 0.0, np.zeros(NUM_LEVELS + 1), np.zeros(NUM_LEVELS + 1)
        for name in sources:
            one, traits = self.yields[name], self._traits[name]
            own, most = one.reach(), traits.most_levels if traits.levels_s is not None or not one.most else one.most
            own[most:] = 0.0
            reach, misses = np.maximum(reach, own), misses * (1 - own)
            offered[:most] += one.offered(is_unread=choice.is_unread)
            of_tokens = max(of_tokens, one.variance)
            wait_s = self._time.wait(name).of(num_sessions, traits.drafts_s(num_sessions))
            waits_s, doubted_s = waits_s + wait_s, doubted_s + wait_s / (one.worth + 1)
        levels = reach + SHARED * (1 - misses - reach)
        tokens = 1.0 + np.concatenate(([0.0], np.cumsum(levels)))  # with 0, 1, ... levels
        num_nodes = num_sessions * np.concatenate(([0.0], np.cumsum(offered)))
        first, last = (1, NUM_LEVELS + 1) if sources else (0, 1)
        seconds = waits_s + self._seconds(kind, num_sessions, num_nodes, tokens if prompts else None)
        depth, _ = best_by_goodput(tokens[first:last], seconds[first:last])
        depth += first
        brought = float(tokens[depth]) * (self._ratio(self._felt(choice)) if sources else 1.0)
        of_seconds = min(self._time.deviation(kind, num_sessions), MOST_DEVIATION)
        return Foreseen(
            math.log(num_sessions * brought / seconds[depth]),
            math.sqrt(of_tokens / tokens[depth] ** 2 + of_seconds**2 + (doubted_s[depth] / seconds[depth]) ** 2),
            brought,
            depth,
        )

    def _seconds(
        self, kind: StepKind, num_sessions: int, num_nodes: Float64Array, tokens: Float64Array | None
    ) -> Float64Array:
        """Return what steps take without what sources are waited for. Each token that is brought has its part of rows
        of prompts, since a text that ends makes room for another."""
        num_rows = num_sessions + np.ceil(num_nodes).astype(np.intp)
        seconds: Float64Array = self._time.times(kind, num_rows, num_nodes)
        part, rows, attended, of_tokens = self._prompts.tolist()
        if tokens is None or part < PROMPT_FADE / 2:
            return seconds
        share = np.minimum(num_sessions * tokens * part / max(of_tokens, part), 1.0)
        mixed = StepRows(round(rows / part), prompts=round(rows / part), attended=round(attended / part))
        seconds += share * (self._time.times(kind, num_rows, num_nodes, mixed) - seconds)
        return seconds

    def _choices(self) -> list[Choice]:
        """Return all choices, those of few sources first."""
        names = sorted(self._felt(Choice(self.sources)).sources)
        sizes = range(len(names) + 1) if len(names) <= ALL_SETS else (0, 1, 2, len(names))
        found = [Choice(frozenset(one)) for size in sizes for one in combinations(names, size)]
        found += [Choice(one.sources, True) for one in found if self._may_be_unread(one.sources)]
        used = self._felt(self.used)
        return found if used in found else [*found, used]

    def _may_be_unread(self, sources: Sources) -> bool:
        return len(sources) == 1 and self._traits[next(iter(sources))].may_be_unread

    # --- what is decided ----------------------------------------------------------------------------------------------

    def _decide(self, *, is_due: bool) -> None:
        """Go on with a probe, or choose, if that is due."""
        if self._is_measured and self._num_sessions:
            if self._probe is not None:
                self._go_on(self._probe)
            if self._probe is None and is_due:
                self._choose()
        self._apply()

    def _go_on(self, probe: _Probe) -> None:
        """End a probe if it has lost or won, or go on with all sessions."""
        if probe.num_steps < WARM_UP:
            return
        now, other = (self.foresee(one, self._num_sessions) for one in (self.used, probe.choice))
        gain = other.log_rate - now.log_rate
        if gain + DOUBT * other.deviation < 0:
            self._end_probe("probe_lost", now, other)
        elif probe.is_look:
            if gain > MARGIN or probe.num_steps >= LOOK_STEPS:
                probe.is_look, probe.num_steps, probe.num_rounds = False, 0, 0
        elif gain > MARGIN and probe.num_steps >= LEAST_STEPS:
            self._use(probe.choice, "probe_won", now, other)
        elif probe.num_steps >= FULL_STEPS and probe.num_rounds >= FULL_ROUNDS:
            self._end_probe("probe_lost", now, other)

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
            self._num_steps, self._num_sessions, reason, self._felt(self.used), now.rate, choice, other.rate
        )
        self.decisions.append(decision)
        self.num_decided[reason] += 1
        log.debug("drafts_decided", **decision.shown())

    def _choose(self) -> None:
        """Use a part of what is in use if that is better, or begin the probe of what may be better by most."""
        used, count = self._felt(self.used), self._num_sessions
        now = self.foresee(used, count)
        better, best_rate = None, now.log_rate + MARGIN
        tried, most_gain = None, MARGIN
        promises = dict.fromkeys(self.sources, -math.inf)
        for one in self._choices():
            if one == used:
                continue
            other = self._joining(one, used)
            if one.sources < used.sources and other.log_rate > best_rate:
                better, best_rate = (one, other), other.log_rate
            gain = other.log_rate + OPTIMISM * other.deviation - now.log_rate
            promises |= {name: max(promises[name], gain) for name in one.sources}
            is_free = other.log_rate > now.log_rate + FREE
            if gain > most_gain and (is_free or self._credit > 0) and self._rests.get(one, 0) <= self._num_steps:
                tried, most_gain = (one, other, is_free), gain
        self.asleep = frozenset(name for name, gain in promises.items() if gain < ASLEEP) - used.sources
        if better is not None:
            self._use(better[0], "drafts_fell", now, better[1])
        elif tried is not None:
            choice, other, is_free = tried
            self._probe = _Probe(choice, self._is_look(choice.sources - used.sources), is_free)
            self._note("probe", now, choice, other)

    def _joining(self, choice: Choice, used: Choice) -> Foreseen:
        """Return what a choice is expected to bring if it is used from now on: the sources that join it compute the
        texts first."""
        other = self.foresee(choice, self._num_sessions)
        join_s = sum(self._time.wait(name).join_s for name in choice.sources - used.sources)
        part = join_s * other.rate / (HORIZON * other.tokens)  # of a step's seconds, session by session
        return other._replace(log_rate=other.log_rate - part)

    def _is_look(self, added: Sources) -> bool:
        """Return whether a probe that adds these begins with one session."""
        return self._num_sessions > 1 and any(
            self.yields[name].worth < KNOWN_ROUNDS or not self._time.wait(name).num_seen for name in added
        )

    def _apply(self) -> None:
        """Set what is asked of the sources from now on."""
        silent = self.sources - self._felt(Choice(self.sources)).sources
        used, probe = self.used, self._probe
        self.looked_at = PLAIN.sources
        if probe is None:
            choice = used
        elif probe.is_look:
            choice, self.looked_at = Choice(used.sources | probe.choice.sources), probe.choice.sources - used.sources
        else:
            choice = probe.choice
        self.allowed, self.is_unread = choice.sources | silent, choice.is_unread
        self.asleep -= self.allowed
        if choice.sources and self._num_sessions:
            foreseen = self.foresee(choice, self._num_sessions)
            self.depth, self.promised = foreseen.depth, foreseen.tokens - 1.0
