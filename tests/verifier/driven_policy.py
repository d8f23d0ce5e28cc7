"""A policy driven by made-up steps, without an engine: what all takes and brings is known, so what it decides can be
held against what is best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from specq.protocol import REMOTE, IntpArray
from specq.verifier.control.choices import Choice, SourceTraits, Step
from specq.verifier.control.forecast import Forecast
from specq.verifier.control.policy import Policy
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.models.step_time import StepKind, StepRows, StepTime
from specq.verifier.models.token_yield import NUM_LEVELS, Judged

FIRST_S = 0.005
PLAIN = Choice()


@dataclass
class Made:
    """A source: the chance of a token given the one before, levels that it drafts, seconds of a draft as such, for each
    session and each level, and of one that has not followed the texts; the part by which it slows steps. `is_told`: it
    drafts the given number of levels, and forecasts their time."""

    name: str
    chance: float
    levels: int = 4
    as_such_s: float = 0.0
    session_s: float = 0.0
    level_s: float = 0.0
    join_s: float = 0.0
    slows: float = 0.0
    is_told: bool = False
    may_be_unread: bool = False

    def draft_s(self, num_sessions: int, levels: int) -> float:
        return self.as_such_s + self.session_s * num_sessions + self.level_s * levels

    def traits(self) -> SourceTraits:
        foreseen = self.draft_s if self.is_told else None
        return SourceTraits(self.name, foreseen, self.levels if self.is_told else NUM_LEVELS, self.may_be_unread)


class Served(NamedTuple):
    """Tokens, as many as were to be expected, and seconds of some steps; steps in which each source drafted, and
    sessions that it drafted for."""

    tokens: float
    seconds: float
    num_steps: dict[str, int]
    num_drafts: dict[str, int]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Driven:
    """A policy, the machine that it drives, and the texts.

    row_s, node_s     that a row, and a node besides, adds to a step
    saved_s   that a step saves as it is launched early, for which all drafts come too late; unread_s: by which a source
              is waited for less whose drafts are not read before
    heard     sources that have sent something; noise: standard deviation of the logarithm of a step's seconds
    find_alike   sources that find the same tokens: the longest of their chains is accepted, else each finds its own
    lag   steps that are planned before one is learned from
    prompts   (of how many steps one has some, rows, tokens that these attend to); prompt_s: that a step with some takes
              besides; prompt_row_s: that each row of them takes
    """

    sources: Sequence[Made]
    overlaps: bool = False
    is_measured: bool = True
    row_s: float = 0.00002
    node_s: float = 0.0
    saved_s: float = 0.0
    unread_s: float = 0.0
    noise: float = 0.0
    seed: int = 0
    find_alike: bool = False
    prompts: tuple[int, int, int] = (0, 0, 0)
    prompt_s: float = 0.0
    prompt_row_s: float = 0.00001
    is_told: bool = True
    lag: int = 0
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        curve = StepCurve([1, 4096], [FIRST_S, FIRST_S + 4095 * self.row_s])
        names = {one.name: one.is_told for one in self.sources}
        time = StepTime(names, (curve, curve))
        self.policy = Policy(
            Forecast([one.traits() for one in self.sources], time, overlaps=self.overlaps),
            first_s=FIRST_S,
            is_measured=self.is_measured,
        )
        self.heard = set(names)
        self.rng = np.random.default_rng(self.seed)
        self._before: frozenset[str] = frozenset()

    def run(self, num_steps: int, num_sessions: int = 1) -> Served:
        """Serve a number of steps of a number of sessions."""
        begun, tokens = len(self.steps), 0.0
        for _ in range(num_steps):
            self.policy.forecast.hear(dict.fromkeys(self.heard, 1))
            self.policy.meet(num_sessions)
            step = self.made_step(num_sessions)
            tokens += self._expected_tokens(self._counts(num_sessions), num_sessions)
            self._before = step.kind.sources
            self.steps.append(step)
            if len(self.steps) > self.lag:
                self.policy.learn(self.steps[-1 - self.lag])
        return self._served(begun, tokens)

    def run_plain(self, num_steps: int, num_sessions: int = 1) -> None:
        """Serve so many steps without drafts, so that it is known what these take."""
        used, is_measured = self.policy.used, self.policy._is_measured
        self.policy.used, self.policy._is_measured = PLAIN, False
        self.run(num_steps, num_sessions)
        self.policy.used, self.policy._is_measured = used, is_measured

    def rate(self, names: Sequence[str] = (), num_sessions: int = 1) -> float:
        """Return the tokens a second of some sources that always draft all their levels, or of plain decoding."""
        used = {one.name: num_sessions for one in self.sources if one.name in names}
        tokens = self._expected_tokens(used, num_sessions)
        num_nodes = sum(num_sessions * one.levels for one in self.sources if one.name in used)
        seconds = self._seconds(used, num_sessions + num_nodes, num_nodes, is_early=self.overlaps and not used)
        waits = [one.draft_s(num_sessions, one.levels) for one in self.sources if one.name in used]
        return tokens / (seconds + sum(waits))

    def _served(self, begun: int, tokens: float) -> Served:
        steps = self.steps[begun:]
        drafted = {
            one.name: [step.judged[one.name].num_rounds for step in steps if one.name in step.kind.sources]
            for one in self.sources
        }
        num_steps, num_drafts = ({name: of(own) for name, own in drafted.items()} for of in (len, sum))
        return Served(tokens, sum(step.seconds for step in steps), num_steps, num_drafts)

    def _counts(self, num_sessions: int) -> dict[str, int]:
        """Return for how many sessions each source drafts in time now."""
        policy = self.policy
        used = self._used() if not (self.overlaps and policy.is_early) else []
        return {one.name: 1 if one.name in policy.looked_at else num_sessions for one in used}

    def _used(self) -> list[Made]:
        return [one for one in self.sources if one.name in self.policy.allowed and one.name in self.heard]

    def _levels(self, one: Made) -> int:
        return min(one.levels, self.policy.depth) if one.is_told else one.levels

    def _expected_tokens(self, counts: dict[str, int], num_sessions: int) -> float:
        levels = np.arange(1, NUM_LEVELS + 1)
        misses, found = np.ones(NUM_LEVELS), 0.0
        for one in self.sources:
            if one.name in counts:
                reach = one.chance**levels * (levels <= self._levels(one))
                misses *= 1 - reach * counts[one.name] / num_sessions
                found += counts[one.name] * float(reach.sum())
        return num_sessions + (num_sessions * float((1 - misses).sum()) if self.find_alike else found)

    def _seconds(self, used: dict[str, int], num_rows: int, num_nodes: int, *, is_early: bool = False) -> float:
        slower = 1 + sum(one.slows for one in self.sources if one.name in used)
        seconds = (FIRST_S + (num_rows - 1) * self.row_s) * slower + self.node_s * num_nodes
        return seconds - self.saved_s * is_early

    def made_step(self, num_sessions: int) -> Step:
        """Return what the next step is like."""
        counts, tokens, num_nodes, judged = self._counts(num_sessions), np.ones(num_sessions, np.int64), 0, {}
        for one in self.sources:
            count = counts.get(one.name, 0)
            lengths, judged[one.name] = self._drafted(one, count)
            found = np.append(lengths, np.zeros(num_sessions - count, np.int64))
            tokens = np.maximum(tokens, 1 + found) if self.find_alike else tokens + found
            num_nodes += count * self._levels(one)
        used = self._used()
        is_unread = self.policy.is_unread and len(used) == 1 and used[0].may_be_unread
        names = frozenset(one.name for one in used)
        kind = StepKind(names, self.overlaps and not counts, is_unread, REMOTE not in names)
        every, *of_prompts = self.prompts
        prompts, attended = of_prompts if every and len(self.steps) % every == 0 else (0, 0)
        rows = StepRows(num_sessions + num_nodes + prompts, num_nodes, prompts, attended)
        seconds = self._seconds(counts, rows.total, num_nodes, is_early=kind.is_early)
        seconds = (seconds + self.prompt_s * (prompts > 0) + self.prompt_row_s * prompts) * float(
            self.rng.lognormal(0, self.noise)
        )
        waits = {
            one.name: self._waits(one, counts[one.name]) - self.unread_s * is_unread if one.name in counts else 0.0
            for one in used
        }
        return Step(
            *(kind, rows, self.policy.looked_at, self.policy.depth, num_sessions, int(tokens.sum())),
            seconds=seconds + sum(waits.values()), waits=waits, judged=judged, is_told=self.is_told,
            num_changes=self.policy.num_changes,
        )  # fmt: skip

    def _drafted(self, one: Made, count: int) -> tuple[IntpArray, Judged]:
        """Return how many tokens of each of so many chains are accepted, and what is said of it."""
        levels, places = self._levels(one), np.arange(NUM_LEVELS)
        lengths = np.minimum(self.rng.geometric(1 - one.chance, count) - 1, levels)
        accepted = (lengths[:, None] > places).sum(0)
        tried = (lengths[:, None] >= places).sum(0) * (places < levels)
        nodes = np.full(NUM_LEVELS, count) * (places < levels)
        return lengths, Judged(max(count, 1), *np.array([nodes, tried, accepted], np.float64))

    def _waits(self, one: Made, count: int) -> float:
        return one.draft_s(count, self._levels(one)) + one.join_s * count * (one.name not in self._before)
