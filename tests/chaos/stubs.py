"""The models of the chaos world: toys that take time, and one whose text depends on which session says it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from specq.protocol import Int32Array, Judgement, SessionStep
from specq.testing.toy import ToyEngine, next_token
from specq.testing.toy_drafters import ToyProposer

STEP_S, ROW_S, PASS_S = 0.03, 0.0002, 0.02
MOODS, MOOD = 4, 7

Moods = defaultdict[int, set[int]]  # job -> the moods in which parts of its text were said


class SlowEngine(ToyEngine):
    """The toy target with steps that take as long as a large model's."""

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        return [STEP_S + ROW_S * size for size in sizes]


class MoodyEngine(SlowEngine):
    """Each session says a text of its own, as under `probabilistic`: what one session said does not follow from
    another.

    So a text is right iff each of its tokens follows from all that comes before it, in one of the moods.
    """

    def __init__(self, moods: Moods, rng: random.Random) -> None:
        super().__init__()
        self.moods, self.rng = moods, rng
        self.mood: dict[int, int] = {}

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        """Start a session in a mood."""
        self.mood[session_id] = self.rng.randrange(MOODS)
        self.moods[session_id].add(self.mood[session_id])
        return super().open(session_id, token_ids)

    def _run(self, step: SessionStep) -> Judgement | None:
        seed = step.params.seed + MOOD * self.mood[step.session_id]
        return super()._run(replace(step, params=replace(step.params, seed=seed)))


def moody_text_is_right(prompt: Sequence[int], token_ids: Sequence[int], seed: int, moods: set[int]) -> bool:
    """Does each token follow from those before it?"""
    context = list(prompt)
    for token in token_ids:
        if token not in {next_token(context, seed + MOOD * mood) for mood in moods}:
            return False
        context.append(token)
    return True


def slow_proposer(wrong_every: int) -> ToyProposer:
    """Return a proposer that takes time and is wrong now and then."""
    proposer = ToyProposer(wrong_every=wrong_every)
    proposer.pass_s = PASS_S
    return proposer
