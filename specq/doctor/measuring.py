"""The pair in this process, without sockets: a verifier with one source of drafts at a time.

Each round has its verdict and its time. Rule: the time is bounded. The prompts of a verifier end after MOST_S, complete
or not.

Steps are timed by their rows, with help from other cores and without, in turn (`hardware`). Levels of drafts are timed
by their sessions. Then a few bundled prompts are completed greedily: plainly, plainly all at a time, and with each
source of drafts. Each method has its own verifier over the one engine. All methods complete a prompt before the next
one, because a machine's speed drifts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import ceil
from typing import Any

import numpy as np

from specq.config import Config, options_of
from specq.doctor.hardware import MOST_ROWS, curves_in_turn, foresight_times, load_proposer, pass_times, pinned, typical
from specq.doctor.prediction import PLAIN, Costs, PredictedMethod, PredictedRound, PredictedRounds, significant
from specq.drafting.draft_model.source import ColocatedSource
from specq.drafting.lookahead.source import LookaheadDecoder
from specq.engines import ENGINES, Engine
from specq.processes.deployment import divide_cores, this_machine, with_helpers
from specq.processes.target import build_verifier
from specq.protocol import GRAMMAR, Close, EngineError, Message, Open, SamplingParams, SessionFailed, Verdict
from specq.runtime import Tell
from specq.samples import codec_of, load_prompts
from specq.verifier import Choice, DraftSource, StepCurve, Verifier

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


PROMPTS = (("gsm8k", 2), ("humaneval", 2))  # data sets, and the number of prompts of each
STEP_ROWS = (1, 2, 4, 8, 16, 32)  # shown in the report
PASSES, PASS_ROWS = 20, 4


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """The results of the pair.

    `runs` begin with plain decoding, of one prompt at a time and of all.
    """

    costs: Costs
    runs: tuple[WatchedRun, ...]
    methods: tuple[PredictedMethod, ...]
    device: str

    def figures(self) -> dict[str, Any]:
        """Return the measured times, in milliseconds.

        For steps it is the curve of the start, multiplied by the runs' slowness.
        """
        costs, level = self.costs, self.costs.level
        return {
            "steps_took_times_the_curve": significant(slowness(self.runs)),
            "step_ms_by_rows": {rows: _ms(costs.step(rows)) for rows in STEP_ROWS},
            "step_ms_by_rows_without_help": {rows: _ms(costs.unhelped_step(rows)) for rows in STEP_ROWS},
            "draft_level_ms_by_sessions": {n: _ms(level(n)) for n in (1, 8)} if level else {},
            "draft_worker_pass_ms": _ms(costs.pass_s),
            "host_ms": _ms(costs.host_s),
            "host_ms_of_each_further_session": _ms(costs.host_more_s),
        }


def _ms(seconds: float) -> float:
    return significant(1e3 * seconds)


def measure(config: Config, most_sessions: int, tell: Tell, num_places: int = 1) -> MeasuredPair:
    """Measure the pair of a placed configuration on the cores that its verifier would have.

    most_sessions  largest number of sessions of interest.
    num_places     tokens that a pass of its draft model predicts.
    """
    here = this_machine()
    shares = divide_cores(len(here.cores), 1, 1)
    target_cores, other_cores = ([here.cores[i] for i in part] for part in (shares.targets[0], shares.broker))
    section = with_helpers(config, other_cores) if len(here.cores) > 1 else config.target
    prompts = [
        prompt.token_ids for name, num in PROMPTS for prompt in load_prompts((name,), num, codec_of(section.model))
    ]
    asked = replace(
        section,
        threads=section.threads or len(target_cores),
        max_sessions=max(most_sessions, len(prompts)),
        lookahead=ENGINES.resolve(section.engine).colocates,
        prompt_lookup="suffix",
        shared_tokens=0,
    )
    with pinned(target_cores):
        tell("loading the models, and timing steps and drafts")
        pair = _Pair(build_verifier(asked, "doctor"), prompts)
        try:
            runs, drafted = _runs(pair, tell)
        finally:
            pair.engine.shutdown()
    has_spare_core = len(here.cores) > 1 and not here.has_gpu and config.draft.model and not options_of(config.draft)
    pass_s = _pass_s(config.draft.model, num_places, other_cores, tell) if has_spare_core else 0.0
    step, unhelped = (scaled(curve, slowness(runs)) for curve in (pair.curve, pair.unhelped))
    methods = tuple(_method(source, watched, run, runs[0], step) for source, watched, run in drafted)
    costs = Costs(step, unhelped, *host_times(runs[0], runs[1]), pair.level(), pass_s, num_places)
    return MeasuredPair(costs, runs, methods, pair.engine.info.arithmetic)


class _Pair:
    """One engine, the sources of drafts, and the measured curves."""

    def __init__(self, verifier: Verifier, prompts: Sequence[Prompt]) -> None:
        self.engine, self.prompts = verifier.engine, prompts
        self.unhelped, self.curve = verifier.control.curves if self.engine.overlaps else curves_in_turn(self.engine)
        others = verifier.sources.mailbox.name, GRAMMAR  # what depends on draft workers, or on what jobs ask for
        self.sources = [source for source in verifier.sources.sources if source.name not in others]
        self.max_sessions = verifier.planner.max_sessions
        for source in self.sources:
            if isinstance(source, ColocatedSource):
                source.measure_levels(self.max_sessions)
        self.watch = None if self.engine.overlaps else StepWatch(self.engine)
        self._ids = count()

    def level(self) -> StepCurve | None:
        """Return the seconds of a level of the colocated drafter, by sessions."""
        return next((one.levels for one in self.sources if isinstance(one, ColocatedSource)), None)

    def watched(self, source: DraftSource | None = None) -> Watched:
        """Return a verifier with one source of drafts, or with none."""
        verifier = Verifier(
            self.engine,
            deepcopy(self.curve),
            [] if source is None else [source],
            incarnation=1,
            unhelped_curve=deepcopy(self.unhelped),
            max_sessions=self.max_sessions,
            measures_drafts=False,
        )
        return Watched(verifier, self.curve, 1 + scratch_rows(source, self.curve, 1), self.watch)

    def opened(self, prompts: Sequence[Prompt]) -> list[Open]:
        """Return the messages that open sessions with these prompts."""
        return [opened(next(self._ids), prompt) for prompt in prompts]


def _runs(pair: _Pair, tell: Tell) -> tuple[tuple[WatchedRun, ...], list[tuple[DraftSource, Watched, WatchedRun]]]:
    """Let all methods complete each prompt in turn, because a machine's speed drifts.

    Returns all runs, two without drafts first, and the runs with each source.
    """
    plain, at_once = pair.watched(), pair.watched()
    drafted = [(source, pair.watched(source)) for source in pair.sources]
    for number, prompt in enumerate(pair.prompts, 1):
        tell(f"completing prompt {number} of {len(pair.prompts)} in {1 + len(drafted)} ways")
        for watched in (plain, *(watched for _, watched in drafted)):
            watched.complete(pair.opened([prompt]))
    at_once.complete(pair.opened(pair.prompts))
    plainly = plain.run(PLAIN, 1), at_once.run(PLAIN, len(pair.prompts))
    found = [(source, watched, watched.run(source.name, 1)) for source, watched in drafted]
    return (*plainly, *(run for _, _, run in found)), found


def _method(
    source: DraftSource, watched: Watched, run: WatchedRun, plain: WatchedRun, step: StepCurve
) -> PredictedMethod:
    levels = partial(_levels, source, watched.verifier) if isinstance(source, ColocatedSource) else None
    own_s = max(run.own_s - plain.own_s, 0.0)
    return PredictedMethod(run.method, run.rounds, own_s, partial(scratch_rows, source, step), levels)


def _levels(source: ColocatedSource, verifier: Verifier, num_sessions: int) -> int:
    return verifier.control.forecast.foresee(Choice(frozenset({source.name})), num_sessions).depth


def slowness(runs: Sequence[WatchedRun]) -> float:
    """Return the factor by which steps took longer than the curve predicts.

    Contexts are longer than for the curve, and the machine may have become slower.
    """
    curve_s = sum(run.curve_s for run in runs)
    return sum(run.engine_s for run in runs) / curve_s if curve_s else 1.0


def scaled(curve: StepCurve, factor: float) -> StepCurve:
    """Return the curve of steps that take `factor` times as long."""
    sizes = range(1, MOST_ROWS + 1)
    return StepCurve(sizes, [factor * curve(rows) for rows in sizes])


def scratch_rows(source: DraftSource | None, curve: StepCurve, num_sessions: int) -> int:
    """Return the number of scratch rows that a source gives each of `num_sessions` sessions."""
    if not isinstance(source, LookaheadDecoder):
        return 0
    return source.free_columns(num_sessions, curve) * (source.ngram - 1)


def host_times(one: WatchedRun, several: WatchedRun) -> tuple[float, float]:
    """Return the host's seconds for a round of plain decoding.

    The first number is for one session, the second for each further one.
    """
    more_s = (several.own_s - one.own_s) / max(several.num_sessions - 1, 1)
    return max(one.own_s, 0.0), max(more_s, 0.0)


def _pass_s(model: str, num_places: int, cores: Sequence[int], tell: Tell) -> float:
    """Return the seconds of a draft worker's pass on its own core."""
    tell("timing a draft worker's passes")
    with pinned(cores):
        proposer = load_proposer(model)
        times = pass_times(proposer, PASS_ROWS, PASSES) if num_places == 1 else foresight_times(proposer, PASSES)
        return typical(times) / 1e3
