"""The forecast of a choice of drafts: its tokens and its seconds.

Tokens come from what each source has brought (`specq.verifier.models.token_yield`). Seconds come from what steps have
taken (`specq.verifier.models.step_time`).

Several sources find the same tokens, and drafts may be late. So each set of sources also has a ratio. It is the tokens
that came, divided by the forecast tokens. Steps whose prompts left no room for drafts do not count for it. Each token
has its share of prompt rows. The reason: a text that ends makes room for another prompt.

Pure: no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
import structlog

from specq.protocol import GRAMMAR, REMOTE, Float64Array
from specq.verifier.control.choices import Choice, Sources, SourceTraits, Step
from specq.verifier.models.goodput import best_by_goodput
from specq.verifier.models.step_time import StepKind, StepRows, StepTime
from specq.verifier.models.token_yield import NUM_LEVELS, SILENCE_FADE, TokenYield

log = structlog.get_logger(__name__)

OPTIONAL: Sources = frozenset({REMOTE, GRAMMAR})  # sources that not every verifier has work for
SHARED = 0.5  # part that counts of the tokens that further sources would add if they were independent
# The ratio of tokens: the weight of its prior 1 in tokens, its memory in rounds, its shortest memory in steps.
RATIO_PRIOR, RATIO_MEMORY, RATIO_STEPS = 30.0, 300.0, 8.0
MOST_KEPT = 256  # results in the cache
HORIZON = 40  # steps that repay the first step of a joining source, and what a probe is forecast to win
PROMPT_FADE, MOST_MIXED = 0.005, 0.99  # weight of a new step in the means of prompt rows; most steps with prompts
ONE_PROMPT = StepRows(1, prompts=1)
# Round trips before the silence of draft workers counts, the weight of a new round trip, its most seconds.
ROUND_TRIPS, ROUND_TRIP_FADE, MOST_ROUND_TRIP_S = 2, 0.1, 1.0
ALL_SETS, MOST_DEVIATION = 4, 0.3  # most sources of which all sets are choices; most relative deviation of step times
KNOWN_ROUNDS = 12.0  # worth of a source's counts from which its probe skips the part with one session


class Foreseen(NamedTuple):
    """The forecast of a choice.

    log_rate     the natural logarithm of tokens a second.
    deviation    the standard deviation of `log_rate`.
    of_seconds   the part of `deviation` that comes from the seconds.
    tokens       tokens of a session's round.
    depth        the number of levels with the highest rate.
    """

    log_rate: float
    deviation: float
    of_seconds: float
    tokens: float
    depth: int

    @property
    def rate(self) -> float:
        return math.exp(self.log_rate)


class Forecast:
    """What is known of one verifier's sources, and the forecasts that follow from it.

    sources    all sources.
    `heard`    the sources that have ever sent a node.
    yields     what each source brings.
    """

    def __init__(self, sources: Iterable[SourceTraits], time: StepTime, *, overlaps: bool) -> None:
        self._traits = {one.name: one for one in sources}
        self._time, self._overlaps = time, overlaps
        self.sources: Sources = frozenset(self._traits)
        self.heard: Sources = frozenset()
        self.yields = {name: TokenYield() for name in self._traits}
        self._ratios: dict[Sources, tuple[float, float, int]] = {}  # tokens that came, tokens forecast, the last step
        self._joined_s: dict[str, float] = {}  # for how long each source has drafted without a break
        self._looked_at: Sources = frozenset()  # in the last step
        # Means over steps: part with prompts, prompt rows, tokens that these attend to, tokens of decoding sessions.
        self._prompts = [0.0] * 4
        self._drafts_s = lru_cache(MOST_KEPT)(lambda name, num_sessions: self._traits[name].drafts_s(num_sessions))
        self._round_trip_s = 0.0
        self._num_steps = 0

    # --- learning -----------------------------------------------------------------------------------------------------

    def hear(self, num_sent: Mapping[str, int]) -> None:
        """Note how many nodes each source has sent in all.

        Draft workers and grammars that have sent none are always allowed and not compared. So a worker that joins can
        send, and verifiers without such jobs are not concerned.
        """
        self.heard |= {source for source, count in num_sent.items() if count}

    def learn_round_trip(self, seconds: float) -> None:
        """Learn the seconds from a verdict to the first draft that knows it."""
        self._round_trip_s += ROUND_TRIP_FADE * (min(seconds, MOST_ROUND_TRIP_S) - self._round_trip_s)

    def learn(self, step: Step, used: Choice) -> None:
        """Learn from a step with the choice `used`. If it cannot show if drafts pay (`is_told`), learn only seconds."""
        joins = self._join(step)
        if not joins and step.seconds > 0:  # 0: the clock stands still
            waited_s = sum(self._waited_s(name, step) for name in step.waits)
            self._time.learn(step.kind, step.rows, max(step.seconds - waited_s, 0.0))
        if not (step.is_told and step.num_sessions):
            return
        self._num_steps += 1
        rows = step.rows
        of_step = rows.prompts > 0, rows.prompts, rows.attended, step.num_tokens
        self._prompts = [mean + PROMPT_FADE * (one - mean) for mean, one in zip(self._prompts, of_step, strict=True)]
        for name, one in self.yields.items():
            if used.is_early or name not in used.sources:
                one.pass_by()
                continue
            self._learn_wait(name, step, joins=name in joins)
            depth = NUM_LEVELS if self._traits[name].levels_s is None else step.depth
            if self._says_something(name, step) and one.learn(step.judged[name], depth):
                log.debug("draft_yield_changed", source=name)
        has_room = step.rows.nodes or not step.rows.prompts
        if used.sources and has_room and not (step.looked_at or used.is_early):
            self._learn_ratio(used.sources, step)

    def _join(self, step: Step) -> Sources:
        """Return the sources that join: in the step before they were silent, or drafted for one session only."""
        for name in self._joined_s.keys() - step.kind.sources:
            del self._joined_s[name]
        joins = step.kind.sources - (self._joined_s.keys() - (self._looked_at - step.looked_at))
        self._looked_at = step.looked_at
        for name in step.kind.sources:
            self._joined_s[name] = self._joined_s.get(name, -step.seconds) + step.seconds
        return joins

    def _says_something(self, name: str, step: Step) -> bool:
        """Return whether the step shows how good a source's drafts are.

        It must wait for drafts. Draft workers need the time to answer. Prompts must leave room for nodes.
        """
        if step.kind.is_early:
            return False
        is_late = name == REMOTE and self._joined_s[name] < ROUND_TRIPS * self._round_trip_s
        return not is_late and bool(step.judged[name].nodes.any() or not step.rows.prompts)

    def _waited_s(self, name: str, step: Step) -> float:
        """Return the seconds that a step waited for a source.

        If the step was launched before its drafts were read, return the expected wait. The seconds that this launch
        saves then count for the step.
        """
        if not step.kind.is_unread:
            return step.waits[name]
        count, foreseen_s = self._draft_of(name, step)
        return float(self._time.wait(name).of(count, np.array([foreseen_s]))[0])

    def _learn_wait(self, name: str, step: Step, *, joins: bool) -> None:
        if not step.kind.is_unread:
            count, foreseen_s = self._draft_of(name, step)
            self._time.wait(name).learn(count, step.waits.get(name, 0.0), foreseen_s, joins=joins)

    def _draft_of(self, name: str, step: Step) -> tuple[int, float]:
        """Return for how many sessions a source drafted, and the seconds of such a draft as measured at start-up."""
        count = step.judged[name].num_rounds
        return count, self._traits[name].draft_s(count, step.depth)

    def _learn_ratio(self, used: Sources, step: Step) -> None:
        """Learn how many tokens these sources bring together, relative to their forecast."""
        foreseen = float(self._tokens(sorted(used))[step.depth])
        keep = math.exp(-min(step.num_sessions / RATIO_MEMORY, 1 / RATIO_STEPS))
        brought, expected = self._brought(used)
        brought, expected = keep * brought + step.num_tokens, keep * expected + step.num_sessions * foreseen
        self._ratios[used] = brought, expected, self._num_steps

    def _brought(self, sources: Sources) -> tuple[float, float]:
        """Return the tokens that came with these sources, and the tokens forecast. Both fade while others are used."""
        brought, expected, last = self._ratios.get(sources, (0.0, 0.0, 0))
        keep = (1 - SILENCE_FADE) ** (self._num_steps - last)
        return keep * brought, keep * expected

    def _ratio(self, sources: Sources) -> float:
        brought, expected = self._brought(sources)
        return (brought + RATIO_PRIOR) / (expected + RATIO_PRIOR)

    # --- forecasts ----------------------------------------------------------------------------------------------------

    def felt(self, choice: Choice) -> Choice:
        """Return a choice without draft workers and grammars, if they have never sent a node."""
        silent = OPTIONAL - self.heard
        return choice if choice.sources.isdisjoint(silent) else choice._replace(sources=choice.sources - silent)

    def kind(self, choice: Choice) -> StepKind:
        """Return the kind of steps that a choice has."""
        sources = self.felt(choice).sources
        is_early = self._overlaps and (choice.is_early or not sources)
        return StepKind(sources, is_early, choice.is_unread, REMOTE not in sources)

    def choices(self, used: Choice) -> list[Choice]:
        """Return all choices, with few sources first.

        With more than ALL_SETS sources, only the sets of none, one, two or all of them are choices. Drafts are verified
        unread only after some were read. Otherwise nothing separates the wait for them from the step.
        """
        names = sorted(self.felt(Choice(self.sources)).sources)
        sizes = range(len(names) + 1) if len(names) <= ALL_SETS else (0, 1, 2, len(names))
        found = [Choice(frozenset(one)) for size in sizes for one in combinations(names, size)]
        read = [one.sources for one in found if all(self._time.wait(name).num_seen for name in one.sources)]
        found += [Choice(one, is_unread=True) for one in read if self.may_be_unread(one)]
        if self._overlaps and names == [REMOTE]:  # steps always wait for other sources
            found += [Choice(frozenset(names), is_early=True)]
        used = self.felt(used)
        return found if used in found else [*found, used]

    def may_be_unread(self, sources: Sources) -> bool:
        """Return whether drafts of these sources can be verified before they are read, and the policy chooses that."""
        return len(sources) == 1 and self._traits[next(iter(sources))].may_be_unread

    def foresee(self, choice: Choice, num_sessions: int, *, prompts: bool = True) -> Foreseen:
        """Return the forecast of a choice. `prompts`: count the prompt rows that the tokens entail."""
        choice, kind = self.felt(choice), self.kind(choice)
        sources = [] if choice.is_early else sorted(kind.sources)
        tokens = self._tokens(sources)
        nodes = self._nodes(sources, num_sessions, is_unread=choice.is_unread)
        waits_s, doubted_s, of_tokens = np.zeros(NUM_LEVELS + 1), np.zeros(NUM_LEVELS + 1), 0.0
        for name in sources:
            one, of_name = self.yields[name], self._time.wait(name)
            wait_s = of_name.of(num_sessions, self._drafts_s(name, num_sessions))
            waits_s, doubted_s = waits_s + wait_s, doubted_s + wait_s / (one.worth + 1)
            of_tokens = max(of_tokens, one.variance)
        first, last = (1, NUM_LEVELS + 1) if sources else (0, 1)
        seconds = waits_s + self._seconds(kind, num_sessions, num_sessions * nodes, tokens if prompts else None)
        depth, _ = best_by_goodput(tokens[first:last], seconds[first:last])
        depth += first
        brought = float(tokens[depth]) * self._ratio(frozenset(sources))
        of_steps = min(self._time.deviation(kind, num_sessions), MOST_DEVIATION)
        of_seconds = math.hypot(of_steps, doubted_s[depth] / seconds[depth])
        return Foreseen(
            math.log(num_sessions * brought / seconds[depth]),
            math.hypot(math.sqrt(of_tokens) / tokens[depth], of_seconds),
            of_seconds,
            brought,
            depth,
        )

    def _tokens(self, names: Sequence[str]) -> Float64Array:
        """Return f64[NUM_LEVELS + 1]: the tokens of a session's round with 0, 1, ... levels."""
        tokens = np.ones(NUM_LEVELS + 1)
        if not names:
            return tokens
        reaches = [self._reach(name) for name in names]
        reach = reaches[0]
        if len(reaches) > 1:
            misses = np.prod([1 - one for one in reaches], axis=0)
            reach = np.max(reaches, axis=0)
            reach += SHARED * (1 - misses - reach)
        tokens[1:] += reach.cumsum()
        return tokens

    def _reach(self, name: str) -> Float64Array:
        """Return f64[NUM_LEVELS]: the part of a source's rounds in which a node of each level is accepted."""
        own = self.yields[name].reach()
        own[self._most_levels(name) :] = 0.0
        return own

    def _nodes(self, names: Iterable[str], num_sessions: int, *, is_unread: bool) -> Float64Array:
        """Return f64[NUM_LEVELS + 1]: the nodes of a session's round with 0, 1, ... levels."""
        nodes = np.zeros(NUM_LEVELS + 1)
        for name in names:
            most, level_size = self._most_levels(name), self._traits[name].level_size
            verified = self.yields[name].nodes()[:most]
            if level_size is not None:
                size = level_size(num_sessions)
                verified = np.full(most, float(size)) if is_unread else np.minimum(verified, size)
            nodes[1 : most + 1] += verified
        return nodes.cumsum()

    def _most_levels(self, name: str) -> int:
        one, traits = self.yields[name], self._traits[name]
        return traits.most_levels if traits.levels_s is not None or not one.most else one.most

    def _seconds(
        self, kind: StepKind, num_sessions: int, num_nodes: Float64Array, tokens: Float64Array | None
    ) -> Float64Array:
        """Return f64[NUM_LEVELS + 1]: the seconds of steps, without the waits for sources.

        With `tokens`, f64[NUM_LEVELS + 1] of a session's round, each token has its prompt rows. The reason is
        that a text that ends makes room for another prompt. A step with many tokens has more of these rows, but it
        waits for a prompt only once.
        """
        num_rows = num_sessions + np.ceil(num_nodes).astype(np.intp)
        seconds: Float64Array = self._time.times(kind, num_rows, num_nodes)
        part, rows, attended, of_tokens = self._prompts
        if tokens is None or part < PROMPT_FADE / 2:
            return seconds
        mixed = StepRows(round(rows / part), prompts=round(rows / part), attended=round(attended / part))
        with_one = self._time.times(kind, num_rows, num_nodes, ONE_PROMPT)
        with_all = self._time.times(kind, num_rows, num_nodes, mixed)
        share = num_sessions * tokens / max(of_tokens, part)  # of the tokens of a usual step
        chance = 1.0 - (1.0 - min(part, MOST_MIXED)) ** share
        seconds += chance * (with_one - seconds) + share * part * (with_all - with_one)
        return seconds

    def lost_s(self, step: Step, used: Choice) -> float:
        """Return the seconds that a step lost because it did not draft as the choice in use.

        Prompts may leave no room for drafts. If such a choice is in use, only the wait for other sources is lost then.
        """
        kind, count, rows = self.kind(used), step.num_sessions, step.rows
        if rows.prompts and kind.sources:
            return sum((step.waits.get(name, 0.0) for name in step.kind.sources - kind.sources), 0.0)
        lost_s = step.seconds - step.num_tokens / self.foresee(used, count, prompts=False).rate
        if rows.prompts:
            mixed = StepRows(rows.prompts, prompts=rows.prompts, attended=rows.attended)
            one, none = np.array([count]), np.zeros(1)
            lost_s -= float((self._time.times(kind, one, none, mixed) - self._time.times(kind, one, none))[0])
        return lost_s

    def joining(self, choice: Choice, used: Choice, num_sessions: int) -> Foreseen:
        """Return the forecast of a choice that begins now: new sources compute the texts first."""
        other = self.foresee(choice, num_sessions)
        join_s = sum(self._time.wait(name).join_s for name in choice.sources - used.sources)
        part = join_s * other.rate / (HORIZON * other.tokens)  # relative to the seconds of HORIZON steps
        return other._replace(log_rate=other.log_rate - part)

    def is_known(self, source: str) -> bool:
        """Return whether enough is known of a source that its probe can skip the part with one session."""
        return self.yields[source].worth >= KNOWN_ROUNDS and self._time.wait(source).num_seen > 0
