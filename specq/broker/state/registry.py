"""The workers that the broker knows: their models, their jobs, and whether they are alive.

A worker is alive while it sends anything. Its identity is the one of its socket, new at each process start. A drafter
fits a verifier iff their tokenizers are equal (padding of vocabularies may differ). A drafter without a tokenizer
drafts from the text alone, and fits all verifiers.
"""

from __future__ import annotations

import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specq.broker.state.job import Requirements
from specq.broker.state.rights import NOBODY, Shown
from specq.protocol import (
    ALLOWED_TOKENS,
    BACKGROUND,
    GRAMMAR_TEXTS,
    MANY_DRAFTS,
    OWNERS,
    PROMPT_LOGPROBS,
    Heartbeat,
    Hello,
    ModelInfo,
    fits,
)

HANGING_BEATS = 3
MOST_STEP = 9.0  # a long step may extend the allowed silence by at most this many times, for any reported step time
LATER = ("integer", "invariant")  # begin the names of arithmetics that no version had which stored jobs without them
MOST_PREFIXES = 1024  # remembered per verifier


@dataclass(slots=True)
class Worker:
    """One registered worker and its jobs."""

    identity: bytes
    hello: Hello
    last_seen: float
    shown: Shown = NOBODY  # the key that it registered with
    is_trusted: bool = False  # of a drafter: whether its draft distributions were trusted at the last check
    joined_at: float = 0.0
    progressed: float = 0.0  # when it last had made progress since the heartbeat before, or had no work
    idle_beats: int = 0  # heartbeats since then
    state: str = "ready"
    steps: int = 0
    step_s: float = 0.0  # seconds that it may be silent in a step
    is_unreachable: bool = False  # it never confirmed an `Open`, and has confirmed none since then
    num_tokens: int = 0  # tokens that it has committed
    num_drafts: int = 0  # drafts that it has sent
    accepted_for: Counter[str] = field(default_factory=Counter)  # its drafted tokens that verifiers accepted, by name
    num_unanswered: int = 0  # of a verifier: drafts sent to it since its last message
    sent_bytes: int = 0  # of its messages to this broker, as it encoded them
    received_bytes: int = 0  # the same of messages to it
    wants_silence: bool = False  # of a verifier: its last verdict asked drafters to be silent
    free_slots: int = 0  # less what was placed there since its last heartbeat
    num_others: int = 0  # sessions of other brokers there, by its last heartbeat
    num_brokers: int = 1  # that the journal listed then
    order: int = 0  # its place among equal workers. With several brokers each has another order, from its identity here
    metrics: dict[str, Any] = field(default_factory=dict)  # its counters, from its last heartbeat
    job_ids: set[int] = field(default_factory=set)
    prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)  # keys of prompts that were placed there
    capabilities: frozenset[str] = field(init=False)  # what it can do beyond the oldest version

    def __post_init__(self) -> None:
        self.capabilities = frozenset(self.hello.capabilities)

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def model(self) -> ModelInfo:
        return self.hello.model

    @property
    def dials_out(self) -> bool:
        """Return whether it is a verifier without an address, which is reached over its own connection only."""
        return self.hello.role == "target" and not self.hello.endpoint

    @property
    def knows_owners(self) -> bool:
        """Return whether it keeps sessions of different owners apart, and knows the fields for that."""
        return OWNERS in self.capabilities

    @property
    def knows_grammars(self) -> bool:
        """Return whether it can take part in jobs with a grammar. Of a drafter: whether it reads their verdicts."""
        return GRAMMAR_TEXTS in self.capabilities

    @property
    def reads_many_drafts(self) -> bool:
        """Return whether it reads the drafts of several sessions in one message."""
        return MANY_DRAFTS in self.capabilities

    @property
    def knows_background(self) -> bool:
        """Return whether its sessions in the background yield to others."""
        return BACKGROUND in self.capabilities

    @property
    def weights(self) -> str:
        """Return what a text depends on. Verifiers of equal weights, number format and kernels give the same text."""
        return self._weights(self.model.fingerprint)

    def _weights(self, fingerprint: str) -> str:
        return f"{fingerprint} {self.model.dtype} {self.model.arithmetic}".rstrip()

    def binding(self, weights: str) -> str | None:
        """Return the binding here of a job that is bound to these weights, perhaps by an older version.

        None: the job cannot continue here. A job that began with other end tokens (`ModelInfo.added_eos_ids`) stays
        bound to the former weights. A job that an older version stored without its arithmetic was computed
        neither in integers nor with `batch_invariant`.
        """
        model = self.model
        if not weights or weights in self._forms(model.fingerprint):
            return self.weights
        if not model.former_fingerprint or weights not in self._forms(model.former_fingerprint):
            return None
        return self._weights(model.former_fingerprint) if model.added_eos_ids else self.weights

    def _forms(self, fingerprint: str) -> tuple[str, ...]:
        """Return how jobs name these weights: as now, and as an older version did, without the arithmetic."""
        now, older = self._weights(fingerprint), f"{fingerprint} {self.model.dtype}"
        return (now,) if self.model.arithmetic.startswith(LATER) else (now, older)

    def serves(self, requirements: Requirements) -> bool:
        """Return whether a job of this model can continue here: weights and capabilities fit."""
        return requirements.capabilities <= self.capabilities and self.binding(requirements.weights) is not None

    @property
    def num_sessions(self) -> int:
        """Return how many sessions it has, those of other brokers included."""
        return len(self.job_ids) + self.num_others

    @property
    def load(self) -> float:
        """Return its number of jobs, and the mean of the jobs of each other broker there.

        Each broker corrects its part of an unequal load. If each corrected all of it, they would overshoot together.
        """
        return len(self.job_ids) + self.num_others / self.num_brokers

    @property
    def has_room(self) -> bool:
        """Return whether it can take a job. Each broker may fill its part of a verifier, also if others filled it."""
        most = self.hello.max_sessions
        is_full = 0 < most <= self.num_sessions and most <= len(self.job_ids) * self.num_brokers
        return self.state == "ready" and not is_full

    def beat(self, heartbeat: Heartbeat, now: float, num_brokers: int = 1) -> None:
        """Take over what a heartbeat reports about the worker as a whole."""
        self.last_seen, self.num_unanswered = now, 0
        self.num_others = max(heartbeat.load - len(heartbeat.session_ids), 0) if num_brokers > 1 else 0
        self.num_brokers, self.order = max(num_brokers, 1), zlib.crc32(self.identity) if num_brokers > 1 else 0
        self.idle_beats += 1
        if heartbeat.steps != self.steps or not heartbeat.pending:
            self.progressed, self.idle_beats = now, 0
        self.state, self.steps, self.free_slots = heartbeat.state, heartbeat.steps, heartbeat.free_slots
        self.step_s, self.metrics = heartbeat.step_ms / 1000, heartbeat.metrics

    def is_silent(self, now: float, seconds: float) -> bool:
        """Return whether it was silent for longer than this plus the time of a step."""
        return now - self.last_seen > self._allowed_s(seconds)

    def hangs(self, seconds: float) -> bool:
        """Return whether it sent heartbeats for longer than this, had work, and made no progress.

        After a freeze, a worker sends only one heartbeat, so one is not enough.
        """
        return self.idle_beats >= HANGING_BEATS and self.last_seen - self.progressed > self._allowed_s(seconds)

    def _allowed_s(self, seconds: float) -> float:
        return seconds + min(self.step_s, MOST_STEP * seconds)

    def take(self, num_tokens: int, keys: Iterable[int]) -> None:
        """Note that a job with `num_tokens` tokens and these prompt keys was placed there."""
        self.free_slots -= num_tokens
        for key in keys:
            self.prefixes[key] = None
            self.prefixes.move_to_end(key)
        while len(self.prefixes) > MOST_PREFIXES:
            self.prefixes.popitem(last=False)

    def num_known(self, keys: Iterable[int]) -> int:
        """Return how many of a prompt's keys it has computed before."""
        return sum(key in self.prefixes for key in keys)


def ability(capability: str) -> str:
    """Return a capability of verifiers in a user's words."""
    known = {
        OWNERS: "supports cache_salt",
        PROMPT_LOGPROBS: "supports prompt_logprobs",
        ALLOWED_TOKENS: "supports allowed_token_ids",
    }
    if capability in known:
        return known[capability]
    return f"builds grammars of the kind {capability.rpartition('/')[2]}"


def incapable(verifiers: Sequence[Worker], needed: frozenset[str]) -> str:
    """Return why no verifier of a model has all the needed capabilities, or ""."""
    if not needed or any(needed <= worker.capabilities for worker in verifiers):
        return ""
    common = frozenset.intersection(*[worker.capabilities for worker in verifiers])
    missing = sorted(needed - common)
    why, are_new = "all have an older version", any(worker.knows_grammars for worker in verifiers)
    if are_new and missing == [PROMPT_LOGPROBS]:
        engines = sorted({worker.model.engine for worker in verifiers})
        why = f"its engine, {' or '.join(engines)}, does not return them"
    elif are_new and not {OWNERS, PROMPT_LOGPROBS, ALLOWED_TOKENS} & set(missing):
        why = "the package llguidance is not installed there, or the model has no tokenizer.json"
    return f"no verifier of {verifiers[0].model.name} here {' and '.join(map(ability, missing))}: {why}"


class WorkerRegistry:
    """All registered workers, by identity. `hung`: incarnations of workers that made no progress with work to do."""

    def __init__(self) -> None:
        self._workers: dict[bytes, Worker] = {}
        self._verifiers: dict[bytes, Worker] = {}  # the verifiers among them
        self._fitting: dict[str, dict[str, list[Worker]]] = {}  # drafters by a target's tokenizer and their fingerprint
        self.hung: set[int] = set()

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    def get(self, identity: bytes) -> Worker | None:
        return self._workers.get(identity)

    def add(self, worker: Worker) -> None:
        self._workers[worker.identity] = worker
        if worker.hello.role == "target":
            self._verifiers[worker.identity] = worker
        self._fitting.clear()

    def remove(self, identity: bytes) -> Worker | None:
        self._fitting.clear()
        verifier = self._verifiers.pop(identity, None)
        if verifier is not None and all(one.name != verifier.name for one in self._verifiers.values()):
            for drafter in self.drafters():
                drafter.accepted_for.pop(verifier.name, None)
        return self._workers.pop(identity, None)

    def verifiers(self, model: str = "") -> list[Worker]:
        """Return the verifiers of a model. "": of any model."""
        return [w for w in self._verifiers.values() if model in ("", w.model.name)]

    def served_models(self) -> list[str]:
        """Return the sorted names of the models of all verifiers, each once."""
        return sorted({worker.model.name for worker in self.verifiers()})

    def alike(self) -> list[list[Worker]]:
        """Return the verifiers in groups of equal model and weights."""
        groups: dict[tuple[str, str], list[Worker]] = {}
        for worker in self.verifiers():
            groups.setdefault((worker.model.name, worker.weights), []).append(worker)
        return list(groups.values())

    def drafters(self) -> list[Worker]:
        return [w for w in self._workers.values() if w.hello.role == "draft"]

    def drafters_for(self, model: ModelInfo) -> Mapping[str, list[Worker]]:
        """Return the drafters that fit a target, by the fingerprint of their model."""
        if model.tokenizer_hash not in self._fitting:
            found = self._fitting[model.tokenizer_hash] = dict[str, list[Worker]]()
            for worker in self.drafters():
                if fits(worker.model, model):
                    found.setdefault(worker.model.fingerprint, []).append(worker)
        return self._fitting[model.tokenizer_hash]

    def dead(self, now: float, seconds: float) -> list[Worker]:
        """Return the workers that were silent, or made no progress, for longer than this."""
        return [w for w in self._workers.values() if w.is_silent(now, seconds) or w.hangs(seconds)]


def least_loaded(workers: Iterable[Worker]) -> Worker | None:
    """Return the worker with space that has the fewest jobs, or None. There may be a thousand workers."""
    best, least = None, 0.0
    for worker in workers:
        load = len(worker.job_ids) + worker.num_others / worker.num_brokers  # `worker.load`, in half the time
        if best is not None and (load > least or (load == least and worker.order >= best.order)):
            continue
        if worker.has_room:
            best, least = worker, load
    return best
