"""A verifier at work in this process, with each round's verdict and time.

Rule: the time is bounded. The prompts of a verifier end after MOST_S, complete or not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from specq.doctor.prediction import PredictedRound, PredictedRounds
from specq.engines import Engine
from specq.protocol import Close, EngineError, Message, Open, SamplingParams, SessionFailed, Verdict
from specq.verifier import StepCurve, Verifier

NUM_TOKENS = 64  # of each prompt
MOST_S = 2.5  # of each run
USUAL = 0.9  # of all steps

Prompt = Sequence[int]


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """The measurements of some prompts, run together.

    texts       token ids of each prompt that was begun.
    own_s       time of a turn besides the engine's step, see `usual`.
    engine_s    time of all steps.
    curve_s     time that the step curve predicts for their rows.
    """

    method: str
    num_sessions: int
    rounds: PredictedRounds
    texts: tuple[tuple[int, ...], ...]
    seconds: float
    own_s: float
    engine_s: float
    curve_s: float

    @property
    def num_steps(self) -> float:
        return len(self.rounds.rounds) / self.num_sessions

    @property
    def num_tokens(self) -> int:
        return sum(1 + one.accepted for one in self.rounds.rounds)

    def agrees_with(self, other: WatchedRun) -> bool:
        """Return whether the texts are the same, up to the shorter one's end."""
        pairs = [(a[: len(b)], b[: len(a)]) for a, b in zip(self.texts, other.texts, strict=False)]
        return all(ours == theirs for ours, theirs in pairs)


class StepWatch:
    """An engine, with the time of its last step."""

    def __init__(self, engine: Engine) -> None:
        self._step, self.last_s = engine.step, 0.0
        engine.step = self.step  # type: ignore[method-assign, assignment]

    def step(self, *arguments: Any) -> Any:
        """Run a step."""
        began = time.perf_counter()
        output = self._step(*arguments)
        self.last_s = time.perf_counter() - began
        return output


class Watched:
    """A verifier at work, and the contents of its verdicts."""

    def __init__(self, verifier: Verifier, curve: StepCurve, rows_each: int, watch: StepWatch | None) -> None:
        """Take the verifier and its step watch.

        rows_each  rows of each session besides its nodes.
        watch      None if steps overlap with the host's work.
        """
        self.verifier, self.curve, self._rows_each, self.watch = verifier, curve, rows_each, watch
        self.left_s = MOST_S
        self.rounds: list[PredictedRound] = []
        self.texts: dict[int, list[int]] = {}
        self.seconds: list[float] = []  # of each counted turn
        self.own_s: list[float] = []
        self.engine_s = self.curve_s = 0.0

    def complete(self, sessions: Sequence[Open]) -> None:
        """Complete these prompts together, until all have ended or the time is over.

        A turn counts while all sessions decode, from their second verdict to the second-to-last. The first verdict
        includes the prompt, and the last one is cut short.
        """
        for message in sessions:
            self.texts[message.session_id] = []
            self.verifier.handle(message, time.monotonic())
        left, began = {message.session_id for message in sessions}, time.perf_counter()
        while left and self.left_s > time.perf_counter() - began:
            is_counted = all(self.texts[session_id] for session_id in left)
            turned = time.perf_counter()
            verdicts = self._turn()
            seconds = time.perf_counter() - turned
            ended = {verdict.session_id for verdict in verdicts if verdict.finish}
            if is_counted and not ended and len(verdicts) == len(left):
                self._count(verdicts, seconds)
            left -= ended
        self.left_s -= time.perf_counter() - began
        for session_id in [message.session_id for message in sessions]:
            self.verifier.handle(Close(session_id=session_id, epoch=1), time.monotonic())

    def _turn(self) -> list[Verdict]:
        self.verifier.begin(time.monotonic(), time.monotonic)
        verdicts = [_verdict(message) for message in self.verifier.step(time.monotonic)]
        for verdict in verdicts:
            self.texts[verdict.session_id] += verdict.token_ids.tolist()
        return verdicts

    def _count(self, verdicts: Sequence[Verdict], seconds: float) -> None:
        rounds = [round_of(verdict) for verdict in verdicts]
        rows = self._rows_each * len(verdicts) + sum(sum(one.nodes) for one in rounds)
        self.rounds += rounds
        self.seconds.append(seconds)
        engine_s = self.watch.last_s if self.watch is not None else self.curve(rows)
        self.own_s.append(seconds - engine_s)
        self.engine_s += engine_s
        self.curve_s += self.curve(rows)

    def run(self, method: str, num_sessions: int) -> WatchedRun:
        """Return the measurements."""
        texts = tuple(tuple(text) for text in self.texts.values())
        rounds = PredictedRounds(tuple(self.rounds))
        return WatchedRun(
            method, num_sessions, rounds, texts, sum(self.seconds), usual(self.own_s), self.engine_s, self.curve_s
        )


def usual(seconds: Sequence[float]) -> float:
    """Return the mean without the largest value.

    A session's first draft includes its prompt, and other processes disturb.
    """
    kept = sorted(seconds)[: ceil(USUAL * len(seconds))]
    return sum(kept) / max(len(kept), 1)


def opened(session_id: int, prompt: Prompt) -> Open:
    return Open(
        session_id=session_id,
        epoch=1,
        prompt_len=len(prompt),
        tokens_left=NUM_TOKENS,
        params=SamplingParams(max_tokens=NUM_TOKENS),
        explain=True,
        token_ids=np.array(prompt, np.int32),
    )


def _verdict(message: Message) -> Verdict:
    if isinstance(message, SessionFailed):
        raise EngineError(f"the engine cannot complete a bundled prompt: {message.reason}")
    assert isinstance(message, Verdict), "sessions that are explained have verdicts of their own"
    return message


def round_of(verdict: Verdict) -> PredictedRound:
    """Return a round from the nodes of a verdict, with parents before their children."""
    depths: list[int] = []
    for parent in verdict.node_parents.tolist():
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    nodes = tuple(np.bincount(depths)[1:].tolist()) if depths else ()
    return PredictedRound(len(verdict.token_ids) - 1, nodes)
