"""Measure the step times of an engine at start-up, on a few short sessions, and keep those learned in service.

Engines that prepare each size measure each size. Others time one step of one row.

The user's cache holds the times that earlier processes have learned. There is one file per machine, model and number of
threads.

Rules: a missing or malformed file counts as empty, and the caller estimates. A written file becomes the newest
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
QUICK_ROWS = 64  # of a session
QUICK_CONTEXT = 2  # tokens: one row of each session, before the timed step


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


def one_row_step_s(engine: Engine) -> float:
    """Return the seconds of a step of one row, after a first one, which may have extra work.

    Raises ConfigError if the KV memory is too small.
    """
    _check_kv(engine, 1, QUICK_CONTEXT)
    random = np.random.default_rng(0)
    return [_time_step(engine, 1, random, lambda: None, QUICK_CONTEXT) for _ in range(2)][-1]


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
