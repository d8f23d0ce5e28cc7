"""Measure the step times of an engine at start-up, on a few short sessions.

If kernels are not compiled per size, `quick_step_times` is used. It measures a few sizes briefly, and reuses the times
of an earlier start. `specq.verifier.StepCurve` learns larger sizes in service, and corrects errors there.

The user's cache holds the times of earlier starts. There is one file per machine, model and number of threads.

Rules: a missing or malformed file counts as empty, and the caller measures again. A written file becomes the newest
file, even if the wall clock was set back.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path

import numpy as np

from specq.config import cache_dir
from specq.engines.interface import Engine
from specq.engines.room import free_slots
from specq.protocol import NO_TAP, ConfigError, Int32Array, SamplingParams, SessionStep, Tap, Tree
from specq.runtime import whole_file

MOST_FILES = 64
MOST_SIZES = 64
MOST_SECONDS = 3600.0
LATER_NS = 1_000_000  # added to the time of the newest file if the clock was set back


def step_times_file(*what: object) -> Path:
    """Return the cache file of the times. `what` lists everything that the times depend on."""
    digest = hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()[:24]
    return cache_dir() / "steps" / f"{digest}.json"


def recall(path: Path) -> dict[int, float]:
    """Return {rows: seconds}, rows ascending; empty if the file is missing or malformed."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        times = {int(rows): float(seconds) for rows, seconds in said.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return times if _is_sound(times) else {}


def keep(path: Path, times: Mapping[int, float]) -> None:
    """Write the times, and drop the oldest files beyond MOST_FILES. A cache that cannot be written is not an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps({str(rows): seconds for rows, seconds in times.items()}), encoding="utf-8")
        _drop_oldest(path)
    except OSError:
        pass


def _drop_oldest(newest: Path) -> None:
    others = {file: file.stat().st_mtime_ns for file in newest.parent.glob("*.json") if file != newest}
    latest = max(others.values(), default=0)
    if newest.stat().st_mtime_ns <= latest:  # the clock was set back since then
        os.utime(newest, ns=(latest + LATER_NS, latest + LATER_NS))
    for file in sorted(others, key=others.__getitem__, reverse=True)[MOST_FILES - 1 :]:
        file.unlink(missing_ok=True)


def _is_sound(times: Mapping[int, float]) -> bool:
    sizes = list(times)
    rising = sizes == sorted(sizes) and all(size >= 1 for size in sizes)
    return rising and 2 <= len(sizes) <= MOST_SIZES and all(0 < seconds < MOST_SECONDS for seconds in times.values())


SESSIONS = 8
CONTEXT = 8  # tokens
REPEATS, LEAST_REPEATS = 7, 2
PATIENCE_S = 2.0  # after this, no further round begins beyond LEAST_REPEATS
QUICK_ROUND_S, QUICK_S = 1.0, 2.0  # after these times, no further size begins, and no further round of sizes
QUICK_ROWS = 64
REFINED_ROWS = 16  # up to here recalled times are measured once more, and the smaller one counts
QUICK_CONTEXT = 2  # tokens: one row of each session, before the timed step
CHECKED = (1, 8)  # row counts at which recalled times are checked
SAME = 1.3  # largest accepted ratio between a recalled and a measured time


def step_times(
    engine: Engine,
    sizes: Sequence[int],
    settle: Callable[[], None] = lambda: None,
    patience_s: float = PATIENCE_S,
    most_sessions: int = SESSIONS,
    block_slots: int = 1,
    most_each: int = 0,
) -> list[float]:
    """Return the minimum seconds of a step for each size, over a few rounds. Disturbances only add time.

    - settle: waits until the device has finished its work.
    - patience_s: after this time only the LEAST_REPEATS rounds are completed.
    - most_sessions: the most sessions of a step.
    - block_slots: KV slots per block; a session takes whole blocks.
    - most_each: rows per session. Larger steps have more than SESSIONS sessions if the KV memory allows. 0: always
      SESSIONS sessions.

    Raises ConfigError if the KV memory is too small for these steps. See `Engine.step_times`.
    """
    _check_kv(engine, max(sizes), CONTEXT, min(SESSIONS, most_sessions), block_slots)
    random = np.random.default_rng(0)  # contexts that are not in a prefix cache
    few, kv_slots = min(SESSIONS, most_sessions), engine.info.kv_slots
    fitting = min(most_sessions, kv_slots // (2 * max(block_slots, CONTEXT + most_each)), max(sizes) // CONTEXT)

    def num_sessions(size: int) -> int:
        return max(few, min(-(-size // most_each), fitting)) if most_each else few

    started, rounds = time.monotonic(), list[list[float]]()
    while len(rounds) < LEAST_REPEATS or (len(rounds) < REPEATS and time.monotonic() < started + patience_s):
        rounds.append([_time_step(engine, size, random, settle, most_sessions=num_sessions(size)) for size in sizes])
    return [min(times) for times in zip(*rounds, strict=True)]


def warm_up_steps(engine: Engine, sizes: Sequence[int], layers: tuple[int, ...], most_sessions: int) -> None:
    """Run steps of these sizes with few and many sessions, to prepare them before service.

    The steps return hidden states of `layers` (see `Tap`), if any. An engine may prepare few sessions with many rows in
    another way than many sessions with few rows.
    """
    random = np.random.default_rng(1)
    for size in sizes:
        for num_sessions in {min(-(-size // QUICK_ROWS), most_sessions), min(size, most_sessions)}:
            _time_step(engine, size, random, lambda: None, QUICK_CONTEXT, num_sessions, Tap(layers))


def quick_step_times(engine: Engine, sizes: Sequence[int], recalled: Mapping[int, float]) -> dict[int, float]:
    """Return the minimum seconds of a step for the first of these ascending sizes.

    The result has at least two sizes if `sizes` has two.

    - recalled: the result of an earlier start. It is returned again, with any times that are now smaller. It is ignored
      if step times have changed, or if the sizes differ.

    Raises ConfigError if the KV memory is too small for the largest size that may be measured.
    """
    _check_kv(engine, max(REFINED_ROWS, *sizes[:2], *(size for size in sizes if size <= QUICK_ROWS)), QUICK_CONTEXT)
    random = np.random.default_rng(0)
    _quick_step(engine, min(CHECKED), random)  # the first step has extra work
    if all(size in recalled for size in sizes[:2]) and _holds(recalled, engine, random):
        few = [size for size in recalled if size <= REFINED_ROWS]
        return {**recalled, **{size: min(recalled[size], _quick_step(engine, size, random)) for size in few}}
    started = time.perf_counter()
    times: dict[int, float] = {}
    for size in sizes:
        late = time.perf_counter() - started > QUICK_ROUND_S
        if len(times) >= 2 and (late or size > QUICK_ROWS):
            break
        times[size] = _quick_step(engine, size, random)
    for _ in range(REPEATS - 1):
        if time.perf_counter() - started > QUICK_S:
            break
        times = {size: min(seconds, _quick_step(engine, size, random)) for size, seconds in times.items()}
    return times


def least_kv_slots(num_rows: int, context: int, num_sessions: int, block_slots: int = 1) -> int:
    """Return the fewest KV slots, in whole blocks, for timing a step of `num_rows` rows.

    Each session has `context` - 1 tokens before the step.
    """
    before = -(-(context - 1) // block_slots)  # blocks of a session
    slacks = np.full(num_sessions, before * block_slots - (context - 1))
    further = next(num for num in count() if free_slots(num, block_slots, slacks) >= num_rows)
    return block_slots * (num_sessions * before + further)


def _check_kv(engine: Engine, num_rows: int, context: int, most_sessions: int = SESSIONS, block_slots: int = 1) -> None:
    """Raise ConfigError if the engine's KV memory is too small for steps of `num_rows` rows."""
    info, num_sessions = engine.info, min(num_rows, most_sessions)
    least = least_kv_slots(num_rows, context, num_sessions, block_slots)
    if info.kv_slots < least:
        raise ConfigError(
            f"{info.name} has {info.kv_slots} KV slots (--kv-slots); give at least {least}, or 0 for as many as "
            f"memory allows: at start-up, steps of up to {num_rows} rows are timed beside the contexts of "
            f"{num_sessions} sessions, and a job takes as many as its prompt and completion have tokens"
        )


def _holds(recalled: Mapping[int, float], engine: Engine, random: np.random.Generator) -> bool:
    """Return whether steps take about the recalled time.

    The smaller of two measurements counts at each checked size.
    """
    for size in CHECKED:
        seconds = recalled.get(size, 0.0)
        found = min(_quick_step(engine, size, random) for _ in range(2)) if seconds else 0.0
        if not found or not seconds / SAME <= found <= seconds * SAME:
            return False
    return True


def _quick_step(engine: Engine, num_rows: int, random: np.random.Generator) -> float:
    return _time_step(engine, num_rows, random, lambda: None, QUICK_CONTEXT)


def prefill(engine: Engine, contexts: Iterable[tuple[int, Int32Array, int]]) -> None:
    """Open sessions and compute their missing KV in one step.

    A session is an id, a context, and the number of tokens that need KV.
    """
    steps = [
        SessionStep(session_id, start, context[start:count], SamplingParams(), judged=False)
        for session_id, context, count in contexts
        if (start := engine.open(session_id, context)) < count
    ]
    if steps:
        engine.step(steps)


def _time_step(
    engine: Engine,
    num_rows: int,
    random: np.random.Generator,
    settle: Callable[[], None],
    context: int = CONTEXT,
    most_sessions: int = SESSIONS,
    tap: Tap = NO_TAP,
) -> float:
    """Return the seconds of a step with `num_rows` rows, divided among short sessions."""
    num_sessions = min(num_rows, most_sessions)
    shares = [len(part) for part in np.array_split(np.arange(num_rows), num_sessions)]
    steps = [
        _profiled(-1 - i, rows, engine, random, context) for i, rows in enumerate(shares)
    ]  # real sessions have ids >= 0
    try:
        prefill(engine, [(s.session_id, np.concatenate([before, s.token_ids]), len(before)) for s, before in steps])
        settle()
        started = time.perf_counter()
        engine.step([step for step, _ in steps], tap)
        return time.perf_counter() - started
    finally:
        for step, _ in steps:
            engine.close(step.session_id)


def _profiled(
    session_id: int, num_rows: int, engine: Engine, random: np.random.Generator, length: int
) -> tuple[SessionStep, Int32Array]:
    """Return a decoding step of `num_rows` rows, and the context before it.

    As many of the rows are nodes as the engine takes.
    """
    num_nodes = min(num_rows - 1, engine.max_chain or num_rows)
    parents = np.arange(num_nodes, dtype=np.int32) - 1 if engine.max_chain else np.full(num_nodes, -1, np.int32)
    tokens = random.integers(0, engine.info.vocab_size, length - 1 + num_rows, np.int32)
    context, own = tokens[: length - 1], tokens[length - 1 : len(tokens) - num_nodes]
    tree = Tree(tokens[len(tokens) - num_nodes :], parents, np.zeros(num_nodes, np.float32))
    return SessionStep(session_id, len(context), own, SamplingParams(), tree), context
