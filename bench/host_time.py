"""The cost of a step on the host: a verifier and the torch engine's own work, around a free forward pass.

The forward pass looks its logits up, so that a token determines the next one. The draft source knows this table, too.
All the rest is what a verifier's process runs, except for the sockets. This includes grafted drafts, the plan, packed
rows, KV slots, judging on the CPU, commits, verdicts and their frames.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from specq.engines import Engine
from specq.engines.native import ForwardOutput, LoadedModel, PassWork
from specq.engines.native.rows import PackedRows, RowTap
from specq.engines.torch.engine import TorchEngine
from specq.engines.torch.forward import KvStore
from specq.protocol import ModelInfo, Open, SamplingParams, encode
from specq.transport import calm_collector
from specq.verifier import Budget, DraftBatch, DraftSource, StepCurve, Verifier

VOCAB, CONTEXT = 64, 40
WARM_UP = 24  # steps that are not counted
LANE = 7
UNLIMITED = 1 << 30
STEP_S, ROW_S = (
    0.02,
    1e-6,
)  # assumed time of a step, and of each row: so small that all drafts are verified
PHASES = "begin", "propose and plan", "engine", "commit and verdicts", "frames"


class Lookup:
    """A forward pass without layers: a token's logits come from a table."""

    arithmetic = "table"
    num_tap_layers = 0
    is_helped = False
    work = PassWork(0, 0)
    jumps: tuple[int, ...] = ()

    def __init__(self) -> None:
        empty = torch.zeros(1, 1, 1, 1)
        self.kv = KvStore(empty, empty)
        self.seconds = 0.0  # in all
        self._table = torch.nn.functional.one_hot(torch.from_numpy(following(np.arange(VOCAB))), VOCAB).float()

    def __call__(self, rows: PackedRows, tap: RowTap | None = None) -> ForwardOutput:
        """Return the logits of the rows."""
        started = time.perf_counter()
        logits = self._table[torch.from_numpy(rows.token_ids[rows.logit_rows])]
        self.seconds += time.perf_counter() - started
        return ForwardOutput(logits, logits[:, :0])


def following(token_ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the next token of each token in the table."""
    return (token_ids * 5 + 3) % VOCAB


class Known(DraftSource):
    """Grafts a chain onto each session: the right tokens, with a wrong last one."""

    name = "known"

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def collect(self, sessions: Sequence[Any], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Return the chains."""
        if not sessions:
            return ()
        levels = [following(np.array([session.token_ids[-1] for session in sessions]))]
        for _ in range(self.depth - 1):
            levels.append(following(levels[-1]))
        levels[-1] = (levels[-1] + 1) % VOCAB
        tokens = np.stack(levels, 1).astype(np.int32)
        count = len(sessions)
        parents = np.tile(np.arange(-1, self.depth - 1, dtype=np.int32), count)
        lengths = [session.length for session in sessions]
        scores = np.full(tokens.size, -0.01, np.float32)
        sizes = np.full(count, self.depth)
        return [DraftBatch(sessions, LANE, lengths, -1, sizes, tokens.ravel(), parents, scores, is_measured=True)]


class Stopwatch:
    """Records when the steps of an engine begin and end."""

    def __init__(self, engine: Engine) -> None:
        self._step = engine.step
        self.began = self.ended = 0.0
        engine.step = self.step  # type: ignore[method-assign, assignment]

    def step(self, *arguments: Any) -> Any:
        """Run a step."""
        self.began = time.perf_counter()
        output = self._step(*arguments)
        self.ended = time.perf_counter()
        return output


class HostService:
    """A verifier with sessions that decode."""

    def __init__(self, num_sessions: int, num_drafts: int) -> None:
        self.forward = Lookup()
        room = UNLIMITED >> 9
        info = ModelInfo("table", "table", "f32", "torch", VOCAB, VOCAB, (), room, "", room)
        engine = TorchEngine(LoadedModel(info, self.forward), threads=1)
        rows = num_sessions * (1 + num_drafts)
        self.verifier = Verifier(
            engine,
            StepCurve([1, rows + 1], [STEP_S, STEP_S + ROW_S * rows]),
            [Known(num_drafts)] if num_drafts else [],
            incarnation=1,
            max_sessions=num_sessions,
            max_step_rows=max(rows, CONTEXT * num_sessions),
            max_uncommitted=UNLIMITED,
            measures_drafts=False,
        )
        self.watch = Stopwatch(engine)
        for i in range(num_sessions):
            self._open(i, room // 2 // num_sessions)
        while any(session.num_pending != 1 for session in self.verifier.sessions.values()):
            self.turn()

    def _open(self, session_id: int, tokens_left: int) -> None:
        token_ids = np.random.default_rng(session_id).integers(0, VOCAB, CONTEXT).astype(np.int32)
        message = Open(
            session_id=session_id,
            epoch=1,
            prompt_len=CONTEXT,
            tokens_left=tokens_left,
            params=SamplingParams(ignore_eos=True),
            token_ids=token_ids,
        )
        self.verifier.handle(message, time.monotonic())

    def turn(self) -> tuple[list[float], int]:
        """Run a step; return the seconds of each phase without the forward pass, and the committed tokens."""
        before, waited = self._num_tokens(), self.forward.seconds
        started = time.perf_counter()
        self.verifier.begin(started)
        begun = time.perf_counter()
        reports = self.verifier.step(time.perf_counter)
        stepped = time.perf_counter()
        for message in reports.packed():
            encode(message)
        ended = time.perf_counter()
        in_engine = self.watch.ended - self.watch.began - (self.forward.seconds - waited)
        times = [begun - started, self.watch.began - begun, in_engine, stepped - self.watch.ended, ended - stepped]
        return times, self._num_tokens() - before

    def _num_tokens(self) -> int:
        return sum(session.length for session in self.verifier.sessions.values())


def measure(
    sessions: Sequence[int], drafts: Sequence[int], repeats: int
) -> Iterator[tuple[int, int, dict[str, list[float]], float]]:
    """Yield results for each number of sessions and of drafted tokens.

    A result has the milliseconds of each phase and in all, for each step. It also has the mean number of tokens that a
    session's step committed.
    """
    for num_drafts, num_sessions in product(drafts, sessions):
        served = HostService(num_sessions, num_drafts)
        for _ in range(WARM_UP):
            served.turn()
        calm_collector()  # as in a verifier's process
        turns = [served.turn() for _ in range(repeats)]
        times = 1e3 * np.array([times for times, _ in turns])  # [repeats, phases]
        found = {phase: times[:, i].tolist() for i, phase in enumerate(PHASES)} | {"in all": times.sum(1).tolist()}
        yield num_sessions, num_drafts, found, sum(count for _, count in turns) / repeats / num_sessions
