"""The pair in this process, without sockets. It is a verifier with one source of drafts at a time.

Steps are timed by their rows, with help from other cores and without, in turn (`hardware`). Levels of drafts are timed
by their sessions. Then a few bundled prompts are completed greedily: plainly, plainly all at a time, and with each
source of drafts. Each method has its own verifier over the one engine. All methods complete a prompt before the next
one, because a machine's speed drifts.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from specq.config import Config, options_of
from specq.doctor.hardware import MOST_ROWS, curves_in_turn, foresight_times, load_proposer, pass_times, pinned, typical
from specq.doctor.prediction import PLAIN, Costs, PredictedMethod, significant
from specq.doctor.watching import Prompt, StepWatch, Watched, WatchedRun, opened
from specq.drafting.draft_model.source import ColocatedSource
from specq.drafting.lookahead.source import LookaheadDecoder
from specq.engines import ENGINES
from specq.processes.deployment import divide_cores, this_machine, with_helpers
from specq.processes.target import build_verifier
from specq.protocol import GRAMMAR, Open
from specq.runtime import Tell
from specq.samples import codec_of, load_prompts
from specq.verifier import Choice, DraftSource, StepCurve, Verifier

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
        self.max_sessions = verifier.max_sessions
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
