"""The models alone, in this process: times of forward passes, and the drafter's predictions.

The module also measures steps by their rows, with helper cores and without, in turn.

Rule: the two curves are compared with each other. So they are measured in the same minute, step by step. The curves at
a verifier's start are different. They are estimates, or come from earlier processes, in a quiet and a busy hour.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, islice

import numpy as np

from specq.drafting import DRAFTERS, Drafter, Expansion
from specq.engines import ENGINES, Engine, helped, prefill
from specq.models import resolve_model
from specq.protocol import SamplingParams, SessionStep, Tree
from specq.verifier import StepCurve

TIMED_ROWS = (1, 2, 4, 8, 16, 32)  # of one session, whose prompt is computed once
TURNS = 4
MOST_ROWS = 512  # limit of the comparison

Times = Mapping[int, Sequence[float]]  # rows -> seconds


def curves_in_turn(engine: Engine) -> tuple[StepCurve, StepCurve]:
    """Return the step curves without and with helper cores. They are equal if the engine has none."""
    modes = (False, True) if engine.is_helped else (False,)
    times: dict[bool, dict[int, list[float]]] = {mode: {rows: [] for rows in TIMED_ROWS} for mode in modes}
    for _ in range(TURNS):
        for rows in TIMED_ROWS:
            for mode, found in times.items():
                with helped(engine, is_helped=mode):
                    found[rows] += [ms / 1e3 for ms in step_times(engine, 1, rows, 1)]
    return comparable(times[False], times[modes[-1]])


def comparable(unhelped: Times, with_help: Times) -> tuple[StepCurve, StepCurve]:
    """Return the curves from the times without and with help.

    Fewer cores cannot compute faster. If they seem to, the helpers were disturbed, and both curves get the slower time.
    """
    alone, together = (
        StepCurve(list(found), [typical(times) for times in found.values()]) for found in (unhelped, with_help)
    )
    sizes = range(1, MOST_ROWS + 1)
    return StepCurve(sizes, [max(alone(rows), together(rows)) for rows in sizes]), together


STEP_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PASS_ROWS = (1, 2, 4, 6, 8, 12, 16)
CONTEXT = 192  # tokens
SESSIONS = 8  # at least; one row each is compared with as many rows of one session
MOST_OF_A_STEP = 0.5  # largest part that counts as the cost of a separate session
# Pause before each pass. A process that waited for a message is slower at first (caches, branch prediction, clock
# frequency). A drafter sleeps between messages; a verifier with work never does.
PAUSE_S = 0.001
HOST_S = 0.0004
SOME_ROWS, SOME = 4, 20  # of steps and passes, compared alone and with others
NUM_CHOICES = 8  # of the drafter, searched for the target's token

Points = list[list[float]]


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Pin this thread to these cores meanwhile, if the system allows it.

    The measured process is pinned in the same way.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cores) or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def load_engine(model: str, threads: int, helper_cores: Sequence[int] = ()) -> Engine:
    """Load the target as a verifier does, with help on `helper_cores` if given."""
    path = resolve_model(model, "target")
    engine: Engine = ENGINES.resolve("auto").make(path, name=model, threads=threads, helper_cores=tuple(helper_cores))
    return engine


def load_proposer(model: str) -> Drafter:
    """Load the draft model as a drafter does."""
    proposer: Drafter = DRAFTERS.resolve("draft-model").make(resolve_model(model, "draft"), name=model)
    return proposer


class Models:
    """The pair, each on its cores in service, with all measured times in milliseconds.

    Times of the target's steps are stored by help and by (sessions, rows of each). Times of the drafter's passes are
    stored by rows.
    """

    def __init__(
        self,
        engine: Engine,
        proposer: Drafter,
        target_cores: Sequence[int],
        draft_cores: Sequence[int],
        num_sessions: int = 1,
    ) -> None:
        """Take the models and their cores.

        num_sessions  most sessions over which the rows of a step are divided.
        """
        self._engine, self._proposer = engine, proposer
        self._target_cores, self._draft_cores = target_cores, draft_cores
        self._shapes = {rows: shape_of(rows, num_sessions) for rows in STEP_ROWS if not rows % min(rows, num_sessions)}
        shapes = dict.fromkeys([*self._shapes.values(), (1, SESSIONS), (SESSIONS, 1)])
        ways = (False, True) if engine.is_helped else (False,)
        self._steps: dict[bool, dict[tuple[int, int], list[float]]] = {
            is_helped: {shape: [] for shape in shapes} for is_helped in ways
        }
        self._passes: dict[int, list[float]] = {rows: [] for rows in PASS_ROWS}

    def sweep(self, repeats: int) -> None:
        """Time every size `repeats` times, in turns."""
        with pinned(self._target_cores):
            for is_helped, steps in [*self._steps.items()] * repeats:
                with helped(self._engine, is_helped=is_helped):
                    for shape, times in steps.items():
                        times.extend(step_times(self._engine, *shape, 1))
        with pinned(self._draft_cores):
            for rows, times in [*self._passes.items()] * repeats:
                times.extend(pass_times(self._proposer, rows, 1))

    def step_ms(self, *, is_helped: bool = False) -> Points:
        """Return [rows, milliseconds] of decoding steps, in which each session's nodes are a star.

        The `session_us` of each session is subtracted. The list is empty for helped steps without helpers.
        """
        one_ms, steps = self.session_us() / 1e3, self._steps.get(is_helped, {})
        return [[rows, typical(steps[shape]) - shape[0] * one_ms] for rows, shape in self._shapes.items() if steps]

    def session_us(self) -> float:
        """Return the extra time of a row if it belongs to a separate session.

        It is never the whole time of a step.
        """
        steps = self._steps[False]
        many, one = (typical(steps[shape]) for shape in ((SESSIONS, 1), (1, SESSIONS)))
        least = min(typical(of[shape]) / shape[0] for of in self._steps.values() for shape in self._shapes.values())
        return 1e3 * min(max(0.0, (many - one) / (SESSIONS - 1)), MOST_OF_A_STEP * least)

    def pass_ms(self) -> Points:
        """Return [rows, milliseconds] of passes that expand this number of nodes, three children each."""
        return [[rows, typical(times)] for rows, times in self._passes.items()]

    def some_steps(self, *, is_helped: bool = False) -> list[float]:
        """Return the milliseconds of some equal steps."""
        with helped(self._engine, is_helped=is_helped):
            return step_times(self._engine, 1, SOME_ROWS, SOME)

    @property
    def can_be_helped(self) -> bool:
        return True in self._steps

    def some_passes(self) -> list[float]:
        """Return the milliseconds of some equal passes."""
        return pass_times(self._proposer, SOME_ROWS, SOME)

    def choices(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Points:
        """See `choices`."""
        with pinned(self._draft_cores):
            return choices(self._proposer, texts)


def typical(times: Sequence[float]) -> float:
    """Return the lower quartile of times, because disturbances only add time."""
    return float(np.quantile(times, 0.25))


def shape_of(rows: int, num_sessions: int) -> tuple[int, int]:
    """Return (sessions, rows of each): as many sessions as there are rows."""
    sessions = min(rows, num_sessions)
    return sessions, rows // sessions


# --- the target ---------------------------------------------------------------------------------------------------


def step_times(engine: Engine, num_sessions: int, rows: int, repeats: int, busy_s: float | None = None) -> list[float]:
    """Return the milliseconds of `repeats` decoding steps, with `rows` of each session.

    An uncounted step comes first. Between the steps the core does other work.
    """
    context = (1 + np.arange(CONTEXT) % 1000).astype(np.int32)
    starts = dict.fromkeys(range(num_sessions), CONTEXT - 1)
    for session_id in starts:
        prefill(engine, [(session_id, context + session_id, CONTEXT - 1)])
    times = []
    for _ in range(repeats + 1):
        steps = [SessionStep(i, start, context[-1:], SamplingParams(), _star(rows - 1)) for i, start in starts.items()]
        until = time.monotonic() + (HOST_S if busy_s is None else busy_s)
        while time.monotonic() < until:
            pass
        began = time.perf_counter()
        judged = engine.step(steps).judgements
        times.append(1e3 * (time.perf_counter() - began))
        starts = {one.session_id: starts[one.session_id] + 1 + len(one.path) for one in judged}
    for session_id in starts:
        engine.close(session_id)
    return times[1:]


def _star(num_nodes: int) -> Tree:
    return Tree(
        np.arange(1, num_nodes + 1, dtype=np.int32), np.full(num_nodes, -1, np.int32), np.zeros(num_nodes, np.float32)
    )


# --- the drafter --------------------------------------------------------------------------------------------------


def pass_times(proposer: Drafter, rows: int, repeats: int, pause_s: float = PAUSE_S) -> list[float]:
    """Return the milliseconds of `repeats` passes that expand `rows` nodes, three children each.

    An uncounted pass comes first.
    """
    context = (1 + np.arange(CONTEXT) % 1000).astype(np.int32)
    proposer.open(0, context, SamplingParams())
    ids = count()
    first = [next(ids) for _ in range(max(PASS_ROWS))]
    proposer.expand([Expansion(0, -1, tuple(first))])
    passes = ([Expansion(0, node, tuple(islice(ids, 3))) for node in first[:rows]] for _ in range(repeats + 1))
    return _timed(proposer, passes, pause_s)


def foresight_times(proposer: Drafter, repeats: int, pause_s: float = PAUSE_S) -> list[float]:
    """Return the milliseconds of `repeats` passes of a parallel draft model, after an uncounted one.

    The context of each pass is one token longer. `pass_times` would request nodes that an earlier pass predicted.
    """
    proposer.open(0, (1 + np.arange(CONTEXT) % 1000).astype(np.int32), SamplingParams())

    def passes() -> Iterator[list[Expansion]]:
        for number in range(repeats + 1):
            yield [Expansion(0, -1, (3 * number, 3 * number + 1, 3 * number + 2))]
            proposer.commit(0, np.array([1 + number], np.int32), ())

    return _timed(proposer, passes(), pause_s)


def _timed(proposer: Drafter, passes: Iterable[list[Expansion]], pause_s: float) -> list[float]:
    """Return the milliseconds of each pass except the first, and close their session."""
    times = []
    for requests in passes:
        time.sleep(pause_s)
        began = time.perf_counter()
        proposer.expand(requests)
        times.append(1e3 * (time.perf_counter() - began))
    proposer.close(0)
    return times[1:]


def choices(proposer: Drafter, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Points:
    """Return [claim, rank] for each position of the target's texts, given as (prompt, the target's answer)."""
    found: Points = []
    for prompt, tokens in texts:
        proposer.open(0, np.array(prompt, np.int32), SamplingParams())
        for token in tokens:
            ids = tuple(range(NUM_CHOICES))
            (children,) = proposer.expand([Expansion(0, -1, ids)])
            ranked = children.token_ids.tolist()
            rank = ranked.index(token) if token in ranked else NUM_CHOICES
            found.append([round(math.exp(float(children.scores[0])), 4), rank])
            proposer.commit(0, np.array([token], np.int32), [ids[rank]] if rank < len(ranked) else [])
        proposer.close(0)
    return found
