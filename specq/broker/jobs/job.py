"""Jobs: what was asked for, what is committed so far, and who works on it.

A job's transcript is the truth, once the journal holds it: a client sees a token only after that, and a job can be
continued from it on any verifier that has the same weights. Jobs that ended are kept for a while, so that a client that
was away can fetch them; the journal has those that are forgotten here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from specq.broker.admission.bucket import Bucket
from specq.broker.admission.roles import NOBODY, Shown
from specq.broker.jobs.commits import Commit
from specq.journal import NO_CRASHES, JobCrashed, JobEnded, JobTaken, StoredJob, TokensAdded, pack, unpack
from specq.protocol import Failed, Int32Array, JobInfo, LogprobRecord, Submit, Tokens

MAX_READERS = 8  # clients that follow one job
PREFIX_LENGTHS = (16, 64, 256, 1024)  # tokens of prompts, at which they are compared
QUARANTINE_CRASHES = 2  # verifiers that died while they held a job, from which on it runs alone


@dataclass(slots=True)
class JobStats:
    """Counts of one job, as its last `Tokens` carries them (a round is one step of one session, plain or not)."""

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_lengths: list[int] = field(default_factory=list)  # [i] = rounds in which i nodes were accepted
    draft_bytes: int = 0
    verdict_bytes: int = 0
    forward_us: int = 0
    queue_us: int = 0
    verifier: dict[str, Any] = field(default_factory=dict)  # specq.protocol.session_stats.SessionStats

    def add(self, commit: Commit) -> None:
        """Count one verdict."""
        accepted = commit.num_accepted
        self.rounds += 1
        self.draft_tokens += commit.num_nodes
        self.accepted_tokens += accepted
        if accepted >= len(self.accepted_lengths):
            self.accepted_lengths.extend([0] * (accepted + 1 - len(self.accepted_lengths)))
        self.accepted_lengths[accepted] += 1
        self.verdict_bytes += commit.num_bytes
        if commit.us:
            self.forward_us += commit.us[0]
            self.queue_us += commit.us[1]
        if commit.stats:
            self.verifier = commit.stats

    def to_dict(self) -> dict[str, Any]:
        """Return the counts under the names that `Tokens.stats` uses."""
        own = {name: getattr(self, name) for name in self.__slots__ if name != "verifier"}
        return self.verifier | own


@dataclass(slots=True)
class Reader:
    """A client that follows a job: the generated tokens that it was sent, and whether it knows that the job is taken."""

    sent: int
    shown: Shown = NOBODY  # the key that it came with
    info: bool = False  # it wants to know what the job is
    greeted: bool = False
    missed: bool = False  # it did not take the last message: until the next tick nothing is sent to it
    num_missed: int = 0  # ticks in a row before which that happened


class Requirements(NamedTuple):
    """What a job needs of a verifier: a model by name, once it has tokens the weights that they came from, and whether it
    must be `alone` there; `avoided`: verifiers that it goes to only where there are no others."""

    model: str
    weights: str
    alone: bool = False
    avoided: frozenset[bytes] = frozenset()


@dataclass(slots=True)
class Held:
    """Verdicts that drafters have not heard yet: see `specq.broker.jobs.relay`.

    since   the committed length at which they begin, -1 if there are none; count: how many; most: how many go as one
    """

    since: int = -1
    count: int = 0
    most: int = 1


@dataclass(slots=True)
class Unconfirmed:
    """The `Open`s of a job that this verifier's heartbeats do not confirm: see `specq.broker.workers.confirmation`.

    num_opens  how many were sent in a row; since: when the first heartbeat came that lacked the session
    """

    verifier: bytes = b""
    num_opens: int = 0
    since: float = 0.0


class Job:
    """One submitted prompt and its completion. `owner` is whose it is; times in seconds since 1970."""

    def __init__(self, message: Submit, owner: str = "", submitted: float = 0.0, deadline: float = 0.0) -> None:
        self.submit = message
        self.job_id, self.model, self.params = message.job_id, message.model, message.params
        self.speculation, self.priority = message.speculation, message.priority
        self.prompt_ids: Int32Array = message.prompt_ids
        self.prompt_len = len(message.prompt_ids)
        self.owner, self.submitted, self.deadline, self.ended = owner, submitted, deadline, 0.0
        self.token_ids: list[int] = []
        self.logprobs = LogprobRecord(message.params.logprobs)
        self.accepted = bytearray()  # 1 where the token was drafted, 0 where it is the target's own
        self.finish = ""
        self.failure: Failed | None = None  # what the client is told of a job that failed
        self.stats = JobStats()
        self.final_stats: dict[str, Any] = {}  # of a job that ended in an earlier life of the broker
        self.readers: dict[bytes, Reader] = {}
        self.registered = False  # the journal has the job,
        self.journaled = 0  # so many of its generated tokens,
        self.sealed = False  # and its end
        self.weights = ""  # that the tokens come from
        self.placed = 0  # the incarnation of the verifier that holds it, as the journal has it
        self.resumed = False  # was placed before
        self.verifier = b""  # who holds the session; b"": nobody yet
        self.epoch = 0
        self.drafters: dict[int, bytes] = {}  # lane -> drafter
        self.next_lane = 0
        self.budgets: dict[int, Bucket] = {}  # lane -> what it may still send, see `specq.broker.admission.limits`
        self.held = Held()
        self.missed_by: set[bytes] = set()  # drafters in whose last heartbeat it was missing
        self.confirmed: dict[bytes, int] = {}  # drafter -> committed length at its last heartbeat
        self.unheld = False  # missing from the verifier's last heartbeat
        self.unconfirmed = Unconfirmed()
        self.avoided: frozenset[bytes] = frozenset()  # verifiers that never confirmed it
        self.lagging = -1  # committed length at the verifier's last heartbeat
        self.failures = 0  # verifiers that gave the session back
        self.crashes = NO_CRASHES  # of verifiers that held it
        self.moved_at = float("-inf")  # from one verifier to another

    @classmethod
    def restored(cls, stored: StoredJob) -> Job:
        """Return a job as the journal has it."""
        job = cls(stored.submit, stored.owner, stored.submitted, stored.deadline)
        job.token_ids = np.frombuffer(stored.token_ids, "<i4").tolist()
        job.accepted = bytearray(stored.accepted)
        job.logprobs = unpack(stored.logprobs, job.params.logprobs)
        job.weights, job.placed, job.crashes = stored.weights, stored.placed, stored.crashes
        job.finish, job.ended = stored.finish, stored.ended
        job.final_stats, job.resumed = stored.stats, bool(stored.weights)
        job.stats.rounds, job.stats.draft_tokens = stored.rounds, stored.draft_tokens
        job.stats.accepted_tokens = job.accepted.count(1)
        if stored.code:
            job.failure = Failed(job_id=job.job_id, code=stored.code, reason=stored.reason)
        job.journal(len(job.token_ids), ended=bool(job.finish))
        return job

    @cached_property
    def prefix_keys(self) -> tuple[int, ...]:
        """Return what tells prompts that begin alike: see `specq.broker.workers.policy`."""
        lengths = [length for length in PREFIX_LENGTHS if length < self.prompt_len]
        return tuple(hash(self.prompt_ids[:length].tobytes()) for length in [*lengths, self.prompt_len])

    @property
    def length(self) -> int:
        """Committed length, the prompt included: what `base_len` counts."""
        return self.prompt_len + len(self.token_ids)

    @property
    def tokens_left(self) -> int:
        return self.params.max_tokens - len(self.token_ids)

    @property
    def requirements(self) -> Requirements:
        return Requirements(self.model, self.weights if self.token_ids else "", self.is_quarantined, self.avoided)

    @property
    def is_quarantined(self) -> bool:
        """May it be what brings verifiers down? See `specq.broker.workers.quarantine`."""
        return self.crashes.total >= QUARANTINE_CRASHES

    def context(self) -> Int32Array:
        """Return i32[length]: the prompt and what is committed."""
        return np.concatenate([self.prompt_ids, np.array(self.token_ids, np.int32)])

    def same_content(self, message: Submit) -> bool:
        """Is this the job that the message asks for?"""
        same = (message.params, message.speculation) == (self.params, self.speculation)
        return same and message.model in ("", self.model) and np.array_equal(message.prompt_ids, self.prompt_ids)

    def commit(self, commit: Commit) -> int:
        """Append what a verdict adds; return how many of its tokens were known, -1 if it does not fit: a gap, an overlap that
        disagrees, or more tokens than were asked for."""
        tokens = commit.token_ids
        start = commit.base_len - self.prompt_len
        known = len(self.token_ids) - start
        if known < 0 or start < 0 or self.token_ids[start:] != tokens[:known]:
            return -1
        if start + len(tokens) > self.params.max_tokens:
            return -1
        self.token_ids.extend(tokens[known:])
        self.accepted.extend(commit.flags[known:])
        self.finish = self.finish or commit.finish
        return known

    # --- the journal ------------------------------------------------------------------------------------------------

    def journal(self, length: int, *, ended: bool) -> None:
        """Note that the journal holds the job, with so many generated tokens and perhaps its end."""
        self.registered, self.sealed = True, self.sealed or ended
        self.journaled = max(self.journaled, length)

    def taken(self) -> JobTaken:
        """Return the record of the job itself."""
        return JobTaken(replace(self.submit, model=self.model), self.owner, self.submitted, self.deadline)

    def added(self, commit: Commit, known: int) -> TokensAdded:
        """Return the record of what a verdict added beyond the tokens that were known."""
        base_len = commit.base_len - self.prompt_len + known
        logprobs = pack(self.logprobs, base_len) if self.params.logprobs >= 0 else b""
        raw, flags = commit.raw[4 * known :], commit.flags[known:]
        return TokensAdded(self.job_id, base_len, raw, flags, logprobs, commit.num_nodes)

    def crashed(self) -> JobCrashed:
        """Return the record of what is held against the job."""
        return JobCrashed(self.job_id, self.crashes)

    def end_record(self) -> JobEnded:
        """Return the record of the job's end."""
        failure = self.failure
        return JobEnded(
            self.job_id,
            self.finish,
            failure.code if failure else "",
            failure.reason if failure else "",
            self.stats.to_dict(),
            self.ended,
            np.array(self.token_ids, "<i4").tobytes(),
            bytes(self.accepted),
            pack(self.logprobs, 0),
        )

    # --- clients ----------------------------------------------------------------------------------------------------

    def attach(self, client: bytes, have: int, shown: Shown = NOBODY, *, info: bool = False) -> None:
        """Let a client follow the job; of too many, the one that came first no longer does."""
        self.readers.pop(client, None)
        self.readers[client] = Reader(min(max(have, 0), len(self.token_ids)), shown, info)
        if len(self.readers) > MAX_READERS:
            del self.readers[next(iter(self.readers))]

    def info(self, wall: float) -> JobInfo:
        """Return what the job is, `wall` seconds after 1970."""
        return JobInfo(
            job_id=self.job_id,
            params=self.params,
            model=self.model,
            label=self.submit.label,
            ended=self.sealed,
            elapsed_ms=max(0, int(((self.ended or wall) - self.submitted) * 1000)),
            prompt_ids=self.prompt_ids,
        )

    def delta(self, have: int) -> Tokens:
        """Return what a client that has so many generated tokens lacks of those in the journal."""
        end = self.journaled
        have = min(have, end)
        top = (end - have) * max(self.params.logprobs, 0)
        lengths = {"logprobs": end - have, "top_ids": top, "top_logprobs": top}
        arrays = self.logprobs.arrays(have)
        ended = self.sealed and not self.failure
        return Tokens(
            job_id=self.job_id,
            base_len=have,
            finish=self.finish if ended else "",
            stats=self.final_stats or self.stats.to_dict() if ended else {},
            token_ids=np.array(self.token_ids[have:end], np.int32),
            accepted=np.frombuffer(self.accepted[have:end], np.uint8),
            **{name: array[: lengths[name]] for name, array in arrays.items()},
        )
