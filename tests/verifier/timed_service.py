"""A verifier on a machine that only takes time: a device beside the host, by a virtual clock, for tests of which
sources of drafts are used.

The text is that of `specq.simulate`; what a source foresees of it is drawn by a hash. Sessions come in waves, as a
benchmark's jobs do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np

from specq.drafting import ChainDrafter, Chains, Pending
from specq.drafting.draft_model.source import ColocatedSource
from specq.protocol import (
    NO_SCRATCH,
    SUFFIX,
    SUFFIX_LANE,
    Close,
    Draft,
    Int32Array,
    IntpArray,
    Open,
    SamplingParams,
    ScratchRows,
    Speculation,
    Verdict,
)
from specq.simulate.scenarios import HardwareCurve, Points
from specq.simulate.stubs import mix
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions.grafting import DraftBatch
from specq.verifier.sessions.session import Session
from specq.verifier.sources import Budget, DraftSource
from specq.verifier.trees import NEXT_IDS
from tests.verifier.timed_target import INFO, TEXT, Machine, TimedTarget


def foreseen(session_id: int, length: int, last: int, depth: int, chance: float, seed: int = 0) -> list[int]:
    """Return a chain: up to the first place that is not foreseen the target's own tokens."""
    found, is_right = list[int](), True
    for position in range(length, length + depth):
        token = TEXT.token(session_id, position, last)
        key = session_id * 1_000_003 + position * 7919 + seed * 104_729
        is_right = is_right and mix(mix(key)) / 2**64 < chance
        last = token if is_right else 1 + token % (TEXT.vocab_size - 1)
        found.append(last)
    return found


class TimedChains(ChainDrafter):
    """A draft model on the device, which foresees a token with this chance: a level takes its curve's time by the
    number of sessions, contexts that lag behind `context_ms` for each of their tokens and `catch_up_ms` in all; the
    host `start_s` and `finish_s`, and `session_s` for each session."""

    info = INFO

    def __init__(
        self, machine: Machine, level_ms: Points, chance: float, *, context_ms: float = 0.003, catch_up_ms: float = 2.0,
        start_s: float = 0.0006, finish_s: float = 0.0006, session_s: float = 0.000005,
    ) -> None:  # fmt: skip
        self._machine, self._levels, self.chance = machine, HardwareCurve(level_ms), chance
        self._context_s, self._catch_up_s = context_ms / 1000, catch_up_ms / 1000
        self._start_s, self._finish_s, self._session_s = start_s, finish_s, session_s
        self._texts: dict[int, list[int]] = {}
        self._computed: dict[int, int] = {}  # tokens that have KV
        self._chains: dict[int, list[int]] = {}
        self._begun: Sequence[int] = ()
        self._done_at = 0.0

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """See `ChainDrafter`."""
        self._texts[session_id], self._computed[session_id] = token_ids.tolist(), 0

    def close(self, session_id: int) -> None:
        """See `ChainDrafter`."""
        for known in (self._texts, self._computed, self._chains):
            known.pop(session_id, None)

    def commit(self, session_ids: Sequence[int], num_tokens: IntpArray, token_ids: Int32Array) -> IntpArray:
        """See `ChainDrafter`."""
        found, start, tokens = [], 0, token_ids.tolist()
        for session_id, count in zip(session_ids, num_tokens.tolist(), strict=True):
            own, start = tokens[start : start + count], start + count
            chain = self._chains.pop(session_id, [])
            pairs = enumerate(zip(own, chain, strict=False))
            followed = next((i for i, (a, b) in pairs if a != b), min(len(own), len(chain)))
            self._texts[session_id] += own
            self._computed[session_id] += followed
            found.append(followed)
        return np.array(found, np.intp)

    def start(self, session_ids: Sequence[int], depth: int, width: int) -> Pending[Chains]:
        """See `ChainDrafter`."""
        self._machine.work(self._start_s + self._session_s * len(session_ids))
        behind = sum(max(len(self._texts[i]) - self._computed[i] - 2, 0) for i in session_ids)
        seconds = depth * self._levels(len(session_ids)) + (self._catch_up_s + behind * self._context_s) * (behind > 0)
        self._done_at, self._begun = self._machine.launch(seconds), session_ids
        for i in session_ids:
            self._computed[i] = len(self._texts[i])
            self._chains[i] = foreseen(i, len(self._texts[i]), self._texts[i][-1], depth, self.chance)
        return Pending(self._collect)

    def _collect(self) -> Chains:
        self._machine.wait(self._done_at)
        self._machine.work(self._finish_s + self._session_s * len(self._begun))
        token_ids = np.array([self._chains[i] for i in self._begun], np.int32)[:, :, None]
        return Chains(token_ids, np.full(token_ids.shape, np.log(self.chance), np.float32), [()] * len(self._begun))


class TimedSource(DraftSource):
    """Drafts chains on the host, in so many seconds a round, and `session_s` for each session but the first, whether or
    not they are used; `num_scratch` rows of each session come along."""

    uses_scratch = True

    def __init__(
        self, machine: Machine, name: str, lane: int, seconds: float, chance: float, depth: int = 4,
        num_scratch: int = 0,
        begin_s: float = 0.0, *, session_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.name, self._lane = name, lane  # type: ignore[misc]
        self._machine, self._seconds, self._chance, self._depth = machine, seconds, chance, depth
        self._num_scratch, self._begin_s, self._session_s = num_scratch, begin_s, session_s

    def begin(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        """See `DraftSource`."""
        self._machine.work(self._begin_s if sessions else 0.0)
        return bool(sessions) and self.name != SUFFIX

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """See `DraftSource`."""
        sessions = [session for session in sessions if session.takes_drafts and not session.waits]
        if not sessions:
            return ()
        self._machine.work(self._seconds + self._session_s * (len(sessions) - 1))
        chains = [
            foreseen(one.session_id, one.length, one.token_ids[-1], self._depth, self._chance, self._lane)
            for one in sessions
        ]
        parents = np.tile(np.arange(-1, self._depth - 1), len(sessions)).astype(np.int32)
        return [
            DraftBatch(
                sessions=sessions,
                lanes=self._lane,
                base_lens=[one.length for one in sessions],
                first_ids=NEXT_IDS,
                sizes=np.full(len(sessions), self._depth),
                token_ids=np.array(chains, np.int32).reshape(-1),
                parent_ids=parents,
                scores=np.full(parents.shape, np.log(self._chance), np.float32),
            )
        ]

    def scratch(self, session: Session) -> ScratchRows:
        """See `DraftSource`."""
        if not self._num_scratch:
            return NO_SCRATCH
        ids = np.ones(self._num_scratch, np.int32)
        return ScratchRows(ids, ids * -1, ids * session.length)


class FarDrafters:
    """Draft workers so far away. They answer a verdict by a chain, in `pass_s`, unless they are busy or it asks for
    silence; each drafts for some of the sessions. A draft takes `draft_s` of the verifier's host."""

    def __init__(
        self,
        round_trip_s: float,
        chance: float,
        *,
        num_workers: int = 12,
        depth: int = 8,
        pass_s: float = 0.0025,
        draft_s: float = 0.00005,
    ) -> None:
        self.round_trip_s, self.num_sent = round_trip_s, 0
        self._chance, self._depth, self._pass_s, self._draft_s = chance, depth, pass_s, draft_s
        self._coming: list[tuple[float, int, Draft]] = []  # by arrival
        self._free_at = [0.0] * num_workers
        self._next_ids: dict[int, int] = {}

    def hear(self, verdict: Verdict, last: int, now: float) -> None:
        """Take a verdict after which the text ends with this token."""
        if verdict.finish or verdict.min_accept_prob > 1000:
            return
        session_id, length = verdict.session_id, verdict.base_len + len(verdict.token_ids)
        heard, worker = now + self.round_trip_s / 2, session_id % len(self._free_at)
        if self._free_at[worker] > heard:
            return
        self._free_at[worker] = sent = heard + self._pass_s
        first_id = self._next_ids.get(session_id, 0)
        self._next_ids[session_id] = first_id + self._depth
        draft = Draft(
            session_id=session_id, epoch=1, lane=0, base_len=length, first_id=first_id,
            token_ids=np.array(foreseen(session_id, length, last, self._depth, self._chance), np.int32),
            parent_ids=np.array([-1, *range(first_id, first_id + self._depth - 1)], np.int32),
            scores=np.full(self._depth, np.log(self._chance), np.float16),
        )  # fmt: skip
        heappush(self._coming, (sent + self.round_trip_s / 2, self.num_sent, draft))
        self.num_sent += 1

    def deliver(self, verifier: Verifier, machine: Machine) -> None:
        """Hand over what has arrived by now, as far as there is time for it; the rest is dropped, as by the worker's
        loop."""
        before = machine.now
        while self._coming and self._coming[0][0] <= before:
            arrived, _, draft = heappop(self._coming)
            if machine.now - before <= verifier.sources.mail_s:
                machine.work(self._draft_s)
                verifier.handle(draft, arrived)
        verifier.sources.account(machine.now - before)


@dataclass(slots=True)
class Served:
    """What a time of service gave: `seconds_of` by the set of sources in use."""

    seconds: float = 0.0
    tokens: int = 0
    seconds_of: dict[frozenset[str], float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def share(self, source: str) -> float:
        """Return the part of the time in which a source was used."""
        return sum(seconds for arm, seconds in self.seconds_of.items() if source in arm) / self.seconds


class TimedService:
    """A verifier, and waves of jobs for it. `loop_s`: what the host does between two steps, and `session_loop_s` for
    each session of them; `far`: draft workers, if there are any."""

    def __init__(
        self, target: TimedTarget, sources: Iterable[DraftSource], *, mode: str = "async", loop_s: float = 0.0,
        session_loop_s: float = 0.0, prompt_len: int = 100, num_tokens: int = 128, far: FarDrafters | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        self.machine, self.mode = target.machine, mode
        self.verifier = Verifier(
            target, StepCurve(sizes, target.step_times(sizes)), sources, incarnation=1, max_sessions=256, **options
        )
        self._loop_s, self._session_loop_s = loop_s, session_loop_s
        self._prompt_len, self._num_tokens = prompt_len, num_tokens
        self._next_id, self._far = 1, far
        self._lengths: dict[int, int] = {}  # of the texts of the sessions that run
        self.chains: TimedChains  # of the draft model, where `gpu` makes it

    def serve(self, seconds: float, num_sessions: int) -> Served:
        """Serve waves of so many jobs for so long; the last one ends."""
        return self.serve_uneven(seconds, [self._num_tokens] * num_sessions)

    def serve_uneven(self, seconds: float, num_tokens: Sequence[int]) -> Served:
        """Serve waves of jobs of so many tokens each; see `serve`."""
        served, began = Served(), self.machine.now
        while self.machine.now - began < seconds:
            for count in num_tokens:
                self._open(count)
            while self._is_busy:
                self._step(served)
        served.seconds = self.machine.now - began
        return served

    def serve_on(self, seconds: float, num_sessions: int, apart_s: float) -> Served:
        """Serve so many jobs at a time for so long, each behind the last one of its client; the first ones begin
        `apart_s` one after the other."""
        served, began, num_begun = Served(), self.machine.now, 0
        while self.machine.now - began < seconds or self._is_busy:
            while num_begun < num_sessions and self.machine.now - began >= num_begun * apart_s:
                self._open(self._num_tokens)
                num_begun += 1
            if not self._is_busy:
                self.machine.now = began + num_begun * apart_s
                continue
            num_ended = self._step(served)
            for _ in range(num_ended if self.machine.now - began < seconds else 0):
                self._open(self._num_tokens)
        served.seconds = self.machine.now - began
        return served

    @property
    def _is_busy(self) -> bool:
        return self.verifier.has_work or len(self.verifier.sessions) > 0

    def _step(self, served: Served) -> int:
        """Serve one step; return how many sessions have come to their end."""
        verifier, machine, num_ended = self.verifier, self.machine, 0
        before, arm = machine.now, verifier.policy.allowed
        verifier.begin(machine.now, machine)
        machine.work(self._loop_s + self._session_loop_s * len(verifier.sessions))
        if self._far is not None:
            self._far.deliver(verifier, machine)
        for verdict in list(verifier.step(machine)):
            assert isinstance(verdict, Verdict)
            served.tokens += len(verdict.token_ids)
            if self._far is not None and self.mode != "plain":
                self._far.hear(verdict, int(verdict.token_ids[-1]), machine.now)
            if verdict.finish:
                text = verifier.sessions[verdict.session_id].token_ids
                prompt, own = text[: self._prompt_len], text[self._prompt_len :]
                assert len(own) == self._lengths.pop(verdict.session_id)
                assert TEXT.follows(verdict.session_id, prompt, own), "not what the target alone would say"
                verifier.handle(Close(session_id=verdict.session_id, epoch=1), machine.now)
                num_ended += 1
        served.seconds_of[arm] = served.seconds_of.get(arm, 0.0) + machine.now - before
        return num_ended

    def _open(self, num_tokens: int) -> None:
        session_id, self._next_id = self._next_id, self._next_id + 1
        self._lengths[session_id] = num_tokens
        message = Open(
            session_id=session_id, epoch=1, prompt_len=self._prompt_len, tokens_left=num_tokens,
            params=SamplingParams(max_tokens=num_tokens), speculation=Speculation(mode=self.mode),
            token_ids=TEXT.prompt(session_id, self._prompt_len),
        )  # fmt: skip
        assert self.verifier.handle(message, self.machine.now) == []


def h200_target(machine: Machine) -> TimedTarget:
    """Return a target of 7B as on an H200."""
    return TimedTarget(
        machine, [(1, 3.45), (8, 3.75), (64, 4.9), (128, 5.2), (256, 6.4), (512, 10.0)],
        overlaps=True, launch_s=0.0007, collect_s=0.0005, session_s=0.000004,
    )  # fmt: skip


def gpu(mode: str = "async", chance: float = 0.85, suffix: float = 0.3, chain: int = 8, **options: Any) -> TimedService:
    """Return a service as on an H200 with a target of 7B, a draft model of 0.5B and suffix decoding, which foresee
    tokens with these chances."""
    machine = Machine()
    target = h200_target(machine)
    levels = [(1, 0.5), (8, 0.52), (64, 0.8)]
    curve = StepCurve([1, 8, 64], [seconds / 1000 for _, seconds in levels])
    chains = TimedChains(machine, levels, chance)
    drafter = ColocatedSource(chains, curve, fan_out=1, chain=chain)
    texts = TimedSource(machine, SUFFIX, SUFFIX_LANE, 0.0001, suffix)
    service = TimedService(
        target, [drafter, texts][: 1 + (suffix > 0)], mode=mode, loop_s=0.0004, session_loop_s=0.00001, **options
    )
    service.chains = chains
    return service
