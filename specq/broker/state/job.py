"""Jobs: what was asked for, what is committed so far, and who works on it, each in a part of its own.

    request     what was asked for                     JobRequest
    session     the verifier that holds it             JobSession
    durable     what the journal holds of it           Durable; state/ledger.py: as records, and back
    transcript  prompt and committed tokens, the end   state/transcript.py
    stats       what is counted                        state/transcript.py
    readers     the clients that follow it             state/peers.py
    drafters    those who draft for it                 state/peers.py
    explanation what became of drafts, if asked for    specq.protocol.explanation
    crashes     of verifiers that held it              specq.broker.workers.policy
    trace       what happened to it                    state/traces.py
    state       where it stands                        state/lifecycle.py

Rule: the transcript is the truth, once the journal holds it. A client sees a token only after that, and a job can go on
from it on any verifier that has the same weights. Jobs that ended are kept for a while, so that a client that was away
can fetch them; the journal has those that are forgotten here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from specq.broker.state.lifecycle import JobEvent, JobState, after
from specq.broker.state.peers import Drafters, HeartbeatMark, Readers
from specq.broker.state.traces import JobTrace
from specq.broker.state.transcript import JobStats, Transcript
from specq.journal import NO_CRASHES, Crashes
from specq.protocol import Explanation, Int32Array, JobInfo, SamplingParams, Speculation, Submit, Tokens

PREFIX_LENGTHS = (16, 64, 256, 1024)  # tokens of prompts, at which they are compared
QUARANTINE_CRASHES = 2  # verifiers that crashed while they held a job, from which on it runs alone
CLEARED_AFTER = 16  # tokens beyond those that it had at the last crash, after which it no longer does


@dataclass(slots=True)
class Durable:
    """The journal has the job (`is_registered`), its first `num_tokens` generated tokens, its end (`has_ended`)."""

    is_registered: bool = False
    num_tokens: int = 0
    has_ended: bool = False

    def note(self, num_tokens: int, *, ended: bool) -> None:
        """Note that the journal holds the job, with its first `num_tokens` generated tokens and perhaps its end."""
        self.is_registered, self.has_ended = True, self.has_ended or ended
        self.num_tokens = max(self.num_tokens, num_tokens)


@dataclass(slots=True)
class Unconfirmed:
    """The `Open`s of a job that this verifier's heartbeats do not confirm: see `specq.broker.workers.presence`.

    num_opens  how many were sent in a row; since: when the first heartbeat came that lacked the session
    """

    verifier: bytes = b""
    num_opens: int = 0
    since: float = 0.0


class JobSession:
    """Where a job is placed. Times in seconds of the broker's clock.

    verifier      the one that holds the session; b"": none does
    weights       that the tokens come from; "": none were promised yet
    incarnation   of the verifier that holds it, as the journal has it; 0: none
    was_placed    a verifier has held it at some time
    num_failures  verifiers that gave it back
    avoided       verifiers that never confirmed it
    moved_at      when it went from one verifier to another
    """

    __slots__ = (
        *("avoided", "epoch", "incarnation", "mark", "moved_at", "num_failures", "unconfirmed", "verifier"),
        *("was_placed", "weights"),
    )

    def __init__(self) -> None:
        self.verifier, self.epoch = b"", 0
        self.weights, self.incarnation = "", 0
        self.was_placed = False
        self.num_failures = 0
        self.avoided: frozenset[bytes] = frozenset()
        self.moved_at = float("-inf")
        self.mark, self.unconfirmed = HeartbeatMark(), Unconfirmed()

    def open(self, verifier: bytes, epoch: int) -> None:
        """Begin anew at a verifier."""
        self.verifier, self.epoch, self.was_placed = verifier, epoch, True
        self.mark = HeartbeatMark()

    def is_at(self, verifier: bytes, epoch: int) -> bool:
        """Is this verifier's session of this epoch the one that counts?"""
        return self.verifier == verifier and self.epoch == epoch


def sharers(owner: str, tenant: str, cache_salt: str) -> str:
    """Return whose sessions a job shares KV of prefixes and earlier texts with, as `Open.owner` has it: no two (owner,
    tenant, salt) give the same, since no owner's name begins with a plus. A salt is a secret of who chose it, so it
    goes no further."""
    name = bucket(owner, tenant)
    if not cache_salt:
        return name
    digest = hashlib.blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()
    return f"+{digest} {name}"


def bucket(owner: str, tenant: str) -> str:
    """Return in whose name a job takes its turns and its share of the queue; no owner has a slash in its name."""
    return f"{owner}/{tenant}" if tenant else owner


@dataclass(frozen=True, eq=False)
class JobRequest:
    """A `Submit` that names its model, whose it is, and when it came; times are the journal's, deadline 0: none."""

    submit: Submit
    owner: str = ""
    submitted: float = 0.0
    deadline: float = 0.0

    @property
    def bucket(self) -> str:
        return bucket(self.owner, self.submit.tenant)

    @property
    def model(self) -> str:
        return self.submit.model

    @property
    def params(self) -> SamplingParams:
        return self.submit.params

    @property
    def speculation(self) -> Speculation:
        return self.submit.speculation

    @property
    def priority(self) -> int:
        return self.submit.priority

    @property
    def prompt_ids(self) -> Int32Array:
        return self.submit.prompt_ids  # i32[prompt_len]

    @property
    def prompt_len(self) -> int:
        return len(self.submit.prompt_ids)

    @property
    def max_length(self) -> int:
        """Return the tokens that the job may have in the end, the prompt included."""
        return self.prompt_len + self.params.max_tokens

    def prefix_keys(self, sharers: str) -> tuple[int, ...]:
        """Return hashes of the prompt's beginnings, which prompts of the same `sharers` that begin alike share: see
        `specq.broker.workers.policy`."""
        return tuple(hash((sharers, of_prompt)) for of_prompt in self._prefix_hashes)

    @cached_property
    def _prefix_hashes(self) -> tuple[int, ...]:
        lengths = [length for length in PREFIX_LENGTHS if length < self.prompt_len]
        return tuple(hash(self.prompt_ids[:length].tobytes()) for length in [*lengths, self.prompt_len])

    def has_content(self, message: Submit) -> bool:
        """Does the message ask for the same, under the same label? One without a model does not care which it is."""
        mine, submit = self.submit, message
        if submit.digest:
            return submit.digest == mine.digest and message.model in ("", self.model)
        same = (submit.params, submit.speculation, submit.label) == (mine.params, mine.speculation, mine.label)
        return same and message.model in ("", self.model) and np.array_equal(message.prompt_ids, self.prompt_ids)


class Requirements(NamedTuple):
    """What a job needs of a verifier: a model by name, once it has tokens the weights that they came from, and whether
    it must be `alone` there; `avoided`: verifiers that it goes to only where there are no others; `apart`: the verifier
    keeps the texts of different owners apart."""

    model: str
    weights: str
    alone: bool = False
    avoided: frozenset[bytes] = frozenset()
    apart: bool = False


class BrokerJob:
    """One submitted prompt and its completion."""

    __slots__ = (
        *("__weakref__", "_state", "crashes", "drafters", "durable", "explanation", "job_id", "readers", "request"),
        *("session", "stats", "trace", "transcript"),
    )

    def __init__(self, request: JobRequest) -> None:
        self.job_id, self.request = request.submit.job_id, request
        self._state = JobState.NEW
        self.transcript = Transcript(request.prompt_ids, request.params)
        self.stats, self.durable, self.readers = JobStats(), Durable(), Readers()
        self.session, self.drafters = JobSession(), Drafters()
        self.crashes: Crashes = NO_CRASHES
        self.trace: JobTrace | None = None
        self.explanation = Explanation() if request.submit.explain else None

    @property
    def state(self) -> JobState:
        return self._state

    def note(self, event: JobEvent) -> None:
        """Change the state as the table says: the only place that does."""
        self._state = after(self._state, event)

    @property
    def has_details(self) -> bool:
        """Do its verdicts and tokens say more than tokens and their origins?"""
        return self.explanation is not None or self.transcript.logprobs.num_top >= 0

    @property
    def requirements(self) -> Requirements:
        weights = self.session.weights if self.transcript.token_ids else ""
        apart = bool(self.request.submit.cache_salt)
        return Requirements(self.request.model, weights, self.is_quarantined, self.session.avoided, apart)

    @property
    def is_quarantined(self) -> bool:
        """May it be what crashes verifiers? See `specq.broker.workers.policy`."""
        return self.crashes.total >= QUARANTINE_CRASHES

    @property
    def is_cleared(self) -> bool:
        """Is it past what would have crashed the verifier, if it is in quarantine?"""
        return self.is_quarantined and self.transcript.num_tokens >= self.crashes.length + CLEARED_AFTER

    def info(self, now: float) -> JobInfo:
        """Return what the job is at this time of the journal."""
        request = self.request
        return JobInfo(
            job_id=self.job_id,
            params=request.params,
            model=request.model,
            label=request.submit.label,
            ended=self.durable.has_ended,
            elapsed_ms=max(0, int(((self.transcript.ended_at or now) - request.submitted) * 1000)),
            prompt_ids=request.prompt_ids,
        )

    def delta(self, have: int) -> Tokens:
        """Return what a client that has `have` generated tokens lacks of those in the journal."""
        transcript, end = self.transcript, self.durable.num_tokens
        have = min(have, end)
        top = (end - have) * max(transcript.logprobs.num_top, 0)
        lengths = {"logprobs": end - have, "top_ids": top, "top_logprobs": top}
        arrays = transcript.logprobs.arrays(have)
        ended = self.durable.has_ended and not transcript.failure
        return Tokens(
            job_id=self.job_id,
            base_len=have,
            finish=transcript.finish if ended else "",
            stats=self.stats.to_dict() if ended else {},
            token_ids=np.array(transcript.token_ids[have:end], np.int32),
            origins=np.frombuffer(transcript.origins[have:end], np.uint8),
            **{name: array[: lengths[name]] for name, array in arrays.items()},
            **(self.explanation.arrays(have, end) if self.explanation else {}),
        )
