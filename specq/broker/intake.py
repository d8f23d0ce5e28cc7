"""The broker's side towards clients: jobs come in, tokens go out.

Rule: submitting twice is harmless. The same id with the same content attaches to the job, and what the client lacks is
sent again; the same id with other content is refused.
"""

from __future__ import annotations

import numpy as np
import structlog

from specq.broker.jobs import Job
from specq.broker.placement import Placement
from specq.broker.state import Send, State
from specq.broker.status import status_report
from specq.messages import (
    Accepted,
    Cancel,
    Failed,
    FetchTokenizer,
    GetStatus,
    Status,
    Submit,
    TokenizerChunk,
)
from specq.types import ModelInfo
from specq.verification import STRATEGIES
from specq.wire import Frames, encode

log = structlog.get_logger(__name__)


class Intake:
    """Handlers of client messages, and what tells clients of their jobs."""

    def __init__(self, state: State, placement: Placement) -> None:
        self.state, self.placement = state, placement
        self._tokenizers: dict[str, list[Frames]] = {}  # by tokenizer hash: its pieces, in order
        self._pieces: dict[tuple[bytes, str], dict[int, Frames]] = {}  # of those on their way
        self._fetching: dict[str, set[bytes]] = {}  # by tokenizer hash: the clients that wait for it

    # --- jobs -------------------------------------------------------------------------------------------------------

    def submit(self, client: bytes, message: Submit, now: float) -> None:
        """Take a job, or attach the client to the one that it is."""
        known = self.state.jobs.get(message.job_id)
        code, reason = self._refusal(message, known)
        if reason:
            self.state.send_front(client, Failed(job_id=message.job_id, code=code, reason=reason))
            return
        self.state.send_front(client, Accepted(job_id=message.job_id))
        if known is not None:
            known.client, known.sent = client, min(message.have, len(known.token_ids))
            self.tell(known)
            return
        self.state.counts["jobs"] += 1
        self.state.jobs.add(Job(message, client, now))
        self.placement.place_waiting()

    def _refusal(self, message: Submit, known: Job | None) -> tuple[str, str]:
        """Return (code, reason) against a job; the reason is "" if there is none."""
        if known is not None:
            return "invalid", "" if known.same_content(message) else f"job {message.job_id} exists with other content"
        verifiers = self.state.roster.verifiers(message.model)
        if not verifiers:
            return "no_verifier", no_verifier(message.model)
        if len(self.state.jobs.active) >= self.state.max_jobs:
            return "busy", f"the queue is full ({self.state.max_jobs} jobs)"
        return "invalid", misfit(message, verifiers[0].model)

    def cancel(self, client: bytes, message: Cancel, now: float) -> None:
        """Stop a job of this client; what is committed stays."""
        job = self.state.jobs.active.get(message.job_id)
        if job is not None and job.client == client:
            job.finish = "cancelled"
            self.finish(job)

    def finish(self, job: Job) -> None:
        """Free the job's workers, keep its result, tell its client."""
        self.state.counts["finished_" + job.finish] += 1
        self.placement.release(job)
        self.state.jobs.retire(job)
        self.tell(job)
        self.placement.place_waiting()

    def fail(self, job: Job, code: str, reason: str) -> None:
        """End a job with a stated failure."""
        log.warning("job_failed", job=job.job_id, code=code, reason=reason)
        job.finish, job.failure = "error", Failed(job_id=job.job_id, code=code, reason=reason)
        self.finish(job)

    def tell(self, job: Job) -> None:
        """Send the client what it lacks; of a failed job the tokens first, then why it failed."""
        if len(job.token_ids) > job.sent or (job.finish and not job.failure):
            self.state.send_front(job.client, job.news(job.sent))
            job.sent = len(job.token_ids)
        if job.failure:
            self.state.send_front(job.client, job.failure)

    # --- state and tokenizer ----------------------------------------------------------------------------------------

    def get_status(self, client: bytes, message: GetStatus, now: float) -> None:
        """Answer with the broker's state."""
        self.state.send_front(client, Status(report=status_report(self.state, now)))

    def fetch_tokenizer(self, client: bytes, message: FetchTokenizer, now: float) -> None:
        """Answer with the pieces of the tokenizer, fetched once from a verifier."""
        verifiers = self.state.roster.verifiers(message.model)
        if not verifiers:
            self.state.send_front(client, Failed(job_id=0, code="no_verifier", reason=no_verifier(message.model)))
            return
        wanted = verifiers[0].model.tokenizer_hash
        if wanted in self._tokenizers:
            self._serve_tokenizer(client, wanted)
            return
        self._fetching.setdefault(wanted, set()).add(client)
        self.state.send_back(verifiers[0].identity, message)

    def tokenizer_chunk(self, verifier: bytes, message: TokenizerChunk, now: float) -> None:
        """Collect a piece; the last one serves all who wait."""
        wanted = message.model.tokenizer_hash
        pieces = self._pieces.setdefault((verifier, wanted), {})
        pieces[message.index] = encode(message)
        if len(pieces) < message.count:
            return
        del self._pieces[verifier, wanted]
        self._tokenizers[wanted] = [pieces[index] for index in sorted(pieces)]
        for client in self._fetching.pop(wanted, set()):
            self._serve_tokenizer(client, wanted)

    def _serve_tokenizer(self, client: bytes, tokenizer_hash: str) -> None:
        self.state.emit(*(Send("front", client, frames) for frames in self._tokenizers[tokenizer_hash]))


def no_verifier(model: str) -> str:
    """Return the message for a client whose model nobody serves."""
    wanted = f" of model {model!r}" if model else ""
    return f"no verifier{wanted} is registered with this broker; start one: specq worker --role target"


def misfit(message: Submit, model: ModelInfo) -> str:
    """Return why a job does not fit a model, or ""."""
    prompt = message.prompt_ids
    if message.params.strategy not in STRATEGIES:
        return f"unknown strategy {message.params.strategy!r}; known are {', '.join(sorted(STRATEGIES))}"
    if not len(prompt):
        return "the prompt is empty"
    if np.any(prompt < 0) or np.any(prompt >= model.num_tokens):
        return f"the prompt has token ids outside the vocabulary of {model.name} (0 to {model.num_tokens - 1})"
    named = [token for token in message.params.token_ids_named() if token >= model.vocab_size]
    if named:
        return f"token id {named[0]} of a parameter is outside the vocabulary of {model.name} (0 to {model.vocab_size - 1})"
    if len(prompt) + message.params.max_tokens > model.max_length:
        return (
            f"a prompt of {len(prompt)} tokens and max_tokens {message.params.max_tokens} exceed the "
            f"{model.max_length} tokens that {model.name} takes"
        )
    return ""
