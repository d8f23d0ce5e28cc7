"""A policy driven by made-up steps, without an engine: what all takes and brings is known, so what it decides can be held
against what is best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from specq.protocol import REMOTE
from specq.verifier.control.choices import Choice, SourceTraits, Step
from specq.verifier.control.policy import Policy
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.models.step_time import Kind, Rows, StepTime
from specq.verifier.models.token_yield import NUM_LEVELS, Judged

FIRST_S = 0.005
PLAIN = Choice()


@dataclass
class Made:
    """A source: the chance of a token given the one before, levels that it drafts, seconds of a draft as such, for each
    session and each level, and of one that has not followed the texts; the part by which it slows steps. `is_told`: it
    drafts as many levels as it is told, and says before what they take."""

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
    """Tokens and seconds of some steps; steps in which each source drafted, and sessions that it drafted for."""

    tokens: int
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
    saved_s, unread_s   that a plain step saves as it is launched early, and one whose drafts are not read before
    heard     sources that have sent something; noise: standard deviation of the logarithm of a step's seconds
    find_alike   sources that find the same tokens: the longest of their chains is accepted, else each finds its own
    prompts   (how many steps have some, rows, tokens that these attend to); prompt_row_s: that each row of them takes
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
    prompts: tuple[float, int, int] = (0.0, 0, 0)
    prompt_row_s: float = 0.00001
    is_told: bool = True
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        curve = StepCurve([1, 4096], [FIRST_S, FIRST_S + 4095 * self.row_s])
        names = [one.name for one in self.sources]
        self.policy = Policy(
            [one.traits() for one in self.sources], StepTime(names, (curve, curve)), overlaps=self.overlaps,
            first_s=FIRST_S, is_measured=self.is_measured,
        )  # fmt: skip
        self.heard = set(names)
        self.rng = np.random.default_rng(self.seed)
        self._before: frozenset[str] = frozenset()

    def run(self, num_steps: int, num_sessions: int = 1) -> Served:
        """Serve so many steps of so many sessions."""
        begun = len(self.steps)
        for _ in range(num_steps):
            self.policy.hear(dict.fromkeys(self.heard, 1))
            self.policy.meet(num_sessions)
            step = self._step(num_sessions)
            self._before = step.kind.sources
            self.steps.append(step)
            self.policy.learn(step)
        return self.served(begun)

    def served(self, begun: int = 0) -> Served:
        """Return what the steps were from one on."""
        steps = self.steps[begun:]
        drafted = {
            one.name: [step.judged[one.name].num_rounds for step in steps if one.name in step.kind.sources]
            for one in self.sources
        }
        return Served(
            sum(step.num_tokens for step in steps), sum(step.seconds for step in steps),
            {name: len(found) for name, found in drafted.items()}, {name: sum(found) for name, found in drafted.items()},
        )  # fmt: skip

    def rate(self, names: Sequence[str] = (), num_sessions: int = 1, num_steps: int = 1500) -> float:
        """Return the tokens a second of some sources that always draft, or of plain decoding."""
        sources = [one for one in self.sources if one.name in names]
        changes = {name: value for name, value in vars(self).items() if name in self.__dataclass_fields__}
        fixed = Driven(**(changes | {"sources": sources, "is_measured": False, "steps": [], "noise": 0.0}))
        return fixed.run(num_steps, num_sessions).rate

    def _step(self, num_sessions: int) -> Step:
        policy, rng = self.policy, self.rng
        used = [one for one in self.sources if one.name in policy.allowed and one.name in self.heard]
        judged, tokens, num_nodes = {}, np.ones(num_sessions, np.int64), 0
        for one in self.sources:
            count = 0 if one not in used else 1 if one.name in policy.looked_at else num_sessions
            levels = min(one.levels, policy.depth) if one.is_told else one.levels
            lengths = np.minimum(rng.geometric(1 - one.chance, count) - 1, levels) if one.chance < 1 else levels
            lengths = np.broadcast_to(lengths, count)
            accepted = (lengths[:, None] > np.arange(NUM_LEVELS)).sum(0)
            verified = (lengths[:, None] >= np.arange(NUM_LEVELS)).sum(0) * (np.arange(NUM_LEVELS) < levels)
            judged[one.name] = Judged(max(count, 1), verified.astype(float), accepted.astype(float))
            found = np.append(lengths, np.zeros(num_sessions - count, np.int64))
            tokens = np.maximum(tokens, 1 + found) if self.find_alike else tokens + found
            num_nodes += count * levels
        names = frozenset(one.name for one in used)
        is_unread = policy.is_unread and len(used) == 1 and used[0].may_be_unread
        kind = Kind(names, self.overlaps and not names, is_unread, REMOTE not in names)
        waits = {one.name: self._waits(one, num_sessions) for one in used}
        prompts, attended = self.prompts[1:] if rng.random() < self.prompts[0] else (0, 0)
        rows = Rows(num_sessions + num_nodes + prompts, num_nodes, prompts, attended)
        seconds = (FIRST_S + (rows.total - 1) * self.row_s) * (1 + sum(one.slows for one in used))
        seconds += self.node_s * num_nodes + self.prompt_row_s * prompts
        seconds -= self.saved_s * kind.is_early + self.unread_s * is_unread
        return Step(
            *(kind, rows, policy.looked_at, policy.depth, num_sessions, int(tokens.sum())),
            seconds=seconds * float(rng.lognormal(0, self.noise)) + sum(waits.values()),
            waits=waits, judged=judged, is_told=self.is_told,
        )  # fmt: skip

    def _waits(self, one: Made, num_sessions: int) -> float:
        count = 1 if one.name in self.policy.looked_at else num_sessions
        levels = min(one.levels, self.policy.depth)
        return one.draft_s(count, levels) + one.join_s * count * (one.name not in self._before)
