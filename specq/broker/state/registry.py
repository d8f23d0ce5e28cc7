"""The workers that the broker knows: what they run, what they carry, whether they are alive.

A worker is alive while it sends anything; it is known by the identity of its socket, which is new at each start
of the process. A drafter fits a verifier iff their tokenizers are equal (padding of the vocabularies may differ); one
without a tokenizer of its own, which drafts from the text alone, fits all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from specq.broker.state.rights import NOBODY, Shown
from specq.protocol import OWNERS, Heartbeat, Hello, ModelInfo, fits

HANGING_BEATS = 3
MOST_STEP = 9.0  # times the silence that is allowed anyway, that a step may add to it, whatever a worker says
MOST_PREFIXES = 1024  # that are remembered of a verifier


@dataclass(slots=True)
class Worker:
    """One registered worker and the jobs that it carries."""

    identity: bytes
    hello: Hello
    last_seen: float
    shown: Shown = NOBODY  # the key that it registered with
    is_trusted: bool = False  # of a drafter: what it says its tokens were drawn from was believed at the last look
    joined_at: float = 0.0
    progressed: float = 0.0  # when it last had worked since the heartbeat before, or had nothing to do
    idle_beats: int = 0  # heartbeats since then
    state: str = "ready"
    steps: int = 0
    step_s: float = 0.0  # that it may be silent in a step
    is_unreachable: bool = False  # it never confirmed an `Open`, and has confirmed none since then
    num_tokens: int = 0  # that it has committed
    num_drafts: int = 0  # that it has sent
    wants_silence: bool = False  # of a verifier: its last verdict asked drafters to be silent
    free_slots: int = 0  # what was placed there since its last heartbeat taken off
    metrics: dict[str, Any] = field(default_factory=dict)  # what it has counted, as of its last heartbeat
    job_ids: set[int] = field(default_factory=set)
    prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)  # keys of prompts that were placed there

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def model(self) -> ModelInfo:
        return self.hello.model

    @property
    def knows_owners(self) -> bool:
        """Does it keep sessions of different owners apart, and know the fields about that?"""
        return OWNERS in self.hello.capabilities

    @property
    def weights(self) -> str:
        """What a text depends on: verifiers of equal weights, number format and kernels say the same."""
        return self._weights(self.model.fingerprint)

    def _weights(self, fingerprint: str) -> str:
        return f"{fingerprint} {self.model.dtype} {self.model.arithmetic}".rstrip()

    def binding(self, weights: str) -> str | None:
        """Return what a job that is bound to these weights, perhaps by an older version, is bound to here; None: it
        cannot go on here. A job that began under other ends of a text (`ModelInfo.added_eos_ids`) stays bound to the
        former weights."""
        model, former = self.model, self._weights(self.model.former_fingerprint)
        if weights in ("", self.weights, f"{model.fingerprint} {model.dtype}"):
            return self.weights
        if not model.former_fingerprint or weights not in (former, f"{model.former_fingerprint} {model.dtype}"):
            return None
        return former if model.added_eos_ids else self.weights

    def serves(self, weights: str, *, apart: bool) -> bool:
        """Can a job go on here that is bound to these weights ("": to none), and whose owner's texts must be kept
        `apart` or need not be?"""
        return self.binding(weights) is not None and (self.knows_owners or not apart)

    @property
    def has_room(self) -> bool:
        full = 0 < self.hello.max_sessions <= len(self.job_ids)
        return self.state == "ready" and not full

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """Take in what a heartbeat says of the worker as a whole."""
        self.last_seen = now
        self.idle_beats += 1
        if heartbeat.steps != self.steps or not heartbeat.pending:
            self.progressed, self.idle_beats = now, 0
        self.state, self.steps, self.free_slots = heartbeat.state, heartbeat.steps, heartbeat.free_slots
        self.step_s, self.metrics = heartbeat.step_ms / 1000, heartbeat.metrics

    def is_silent(self, now: float, seconds: float) -> bool:
        """Has it sent nothing for longer than this and a step?"""
        return now - self.last_seen > self._allowed_s(seconds)

    def hangs(self, seconds: float) -> bool:
        """Has it been beating for longer than this, with work to do, and done none of it? (One that was frozen beats
        once.)"""
        return self.idle_beats >= HANGING_BEATS and self.last_seen - self.progressed > self._allowed_s(seconds)

    def _allowed_s(self, seconds: float) -> float:
        return seconds + min(self.step_s, MOST_STEP * seconds)

    def take(self, num_tokens: int, keys: Iterable[int]) -> None:
        """Note that a job was placed there, with `num_tokens` tokens and these keys of its prompt."""
        self.free_slots -= num_tokens
        for key in keys:
            self.prefixes[key] = None
            self.prefixes.move_to_end(key)
        while len(self.prefixes) > MOST_PREFIXES:
            self.prefixes.popitem(last=False)

    def num_known(self, keys: Iterable[int]) -> int:
        """Return how many of a prompt's keys it has computed before."""
        return sum(key in self.prefixes for key in keys)


class WorkerRegistry:
    """All registered workers, by identity; `hung`: the incarnations of those that stood still with work to do."""

    def __init__(self) -> None:
        self._workers: dict[bytes, Worker] = {}
        self.hung: set[int] = set()

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    def get(self, identity: bytes) -> Worker | None:
        return self._workers.get(identity)

    def add(self, worker: Worker) -> None:
        self._workers[worker.identity] = worker

    def remove(self, identity: bytes) -> Worker | None:
        return self._workers.pop(identity, None)

    def verifiers(self, model: str = "") -> list[Worker]:
        """Return the verifiers of a model ("": any)."""
        targets = [w for w in self._workers.values() if w.hello.role == "target"]
        return [w for w in targets if model in ("", w.model.name)]

    def served_models(self) -> list[str]:
        """Return the names of the models of all verifiers, each once, in order."""
        return sorted({worker.model.name for worker in self.verifiers()})

    def alike(self) -> list[list[Worker]]:
        """Return the verifiers that say the same, together."""
        groups: dict[tuple[str, str], list[Worker]] = {}
        for worker in self.verifiers():
            groups.setdefault((worker.model.name, worker.weights), []).append(worker)
        return list(groups.values())

    def drafters(self) -> list[Worker]:
        return [w for w in self._workers.values() if w.hello.role == "draft"]

    def drafters_for(self, model: ModelInfo) -> list[Worker]:
        return [w for w in self.drafters() if fits(w.model, model)]

    def dead(self, now: float, seconds: float) -> list[Worker]:
        """Return the workers that were silent, or have stood still, for longer than this."""
        return [w for w in self._workers.values() if w.is_silent(now, seconds) or w.hangs(seconds)]


def least_loaded(workers: Iterable[Worker]) -> Worker | None:
    """Return the worker with room that carries the fewest jobs, or None."""
    able = [w for w in workers if w.has_room]
    return min(able, key=lambda w: len(w.job_ids), default=None)
