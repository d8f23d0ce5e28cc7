"""The workers that the broker knows: what they run, what they carry, whether they are alive.

A worker is alive while anything is heard from it; it is known by the identity of its socket, which is new at each start
of the process. A drafter fits a verifier iff their tokenizers are equal (padding of the vocabularies may differ); one
without a tokenizer of its own, which drafts from the text alone, fits all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from specq.messages import Heartbeat, Hello
from specq.types import ModelInfo


@dataclass(slots=True)
class Worker:
    """One registered worker and the jobs that it carries."""

    identity: bytes
    hello: Hello
    heard: float
    state: str = "ready"
    steps: int = 0
    free_slots: int = 0
    job_ids: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def model(self) -> ModelInfo:
        return self.hello.model

    @property
    def weights(self) -> str:
        """What a text depends on: verifiers of equal weights and number format say the same."""
        return f"{self.model.fingerprint} {self.model.dtype}"

    @property
    def has_room(self) -> bool:
        full = 0 < self.hello.max_sessions <= len(self.job_ids)
        return self.state == "ready" and not full

    def beat(self, heartbeat: Heartbeat) -> None:
        """Take in what a heartbeat says of the worker as a whole."""
        self.state, self.steps, self.free_slots = heartbeat.state, heartbeat.steps, heartbeat.free_slots


class Roster:
    """All registered workers, by identity."""

    def __init__(self) -> None:
        self._workers: dict[bytes, Worker] = {}

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

    def drafters(self) -> list[Worker]:
        return [w for w in self._workers.values() if w.hello.role == "draft"]

    def least_loaded(self, workers: Iterable[Worker]) -> Worker | None:
        """Return the worker with room that carries the fewest jobs, or None."""
        able = [w for w in workers if w.has_room]
        return min(able, key=lambda w: len(w.job_ids), default=None)

    def drafters_for(self, model: ModelInfo) -> list[Worker]:
        return [w for w in self.drafters() if fits(w.model, model)]

    def silent(self, before: float) -> list[Worker]:
        """Return the workers that were not heard since then."""
        return [w for w in self._workers.values() if w.heard < before]


def fits(draft: ModelInfo, target: ModelInfo) -> bool:
    """Can drafts of one model be hints for the other?"""
    return draft.tokenizer_hash in ("", target.tokenizer_hash)


def mismatch(draft: ModelInfo, targets: list[ModelInfo]) -> str:
    """Return why a draft model fits none of the targets, naming both sides."""
    served = ", ".join(f"{t.name} ({t.num_tokens} tokens, tokenizer {t.tokenizer_hash[:12]})" for t in targets)
    return (
        f"draft model {draft.name} ({draft.num_tokens} tokens, tokenizer {draft.tokenizer_hash[:12]}) does not share "
        f"the tokenizer of any target: {served}. Vocabulary, merges and added tokens must be equal"
    )
