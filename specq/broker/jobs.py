"""Jobs: what was asked for, what is committed so far, and who works on it.

A job's transcript here is the truth: a client sees a token only after `Job.commit` has taken it, and a job can be
continued from it on any verifier. Finished jobs are kept for a while, so that a client that was away can fetch them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specq.broker.commits import Commit
from specq.logprob_record import LogprobRecord
from specq.messages import Failed, Submit, Tokens
from specq.types import Int32Array

KEEP_FINISHED = 1000


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
    verifier: dict[str, Any] = field(default_factory=dict)  # specq.session.SessionStats

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
        return own | self.verifier


class Job:
    """One submitted prompt and its completion."""

    def __init__(self, message: Submit, client: bytes, now: float) -> None:
        self.job_id, self.model, self.params = message.job_id, message.model, message.params
        self.speculation = message.speculation
        self.prompt_ids: Int32Array = message.prompt_ids
        self.prompt_len = len(message.prompt_ids)
        self.client, self.submitted = client, now
        self.token_ids: list[int] = []
        self.logprobs = LogprobRecord(message.params.logprobs)
        self.accepted: list[int] = []  # 1 where the token was drafted, 0 where it is the target's own
        self.finish = ""
        self.failure: Failed | None = None  # what the client is told of a job that failed
        self.sent = message.have  # tokens handed to the client's socket
        self.stats = JobStats()
        self.verifier = b""  # who holds the session; b"": nobody yet
        self.epoch = 0
        self.drafters: dict[int, bytes] = {}  # lane -> drafter
        self.next_lane = 0
        self.confirmed: dict[bytes, int] = {}  # drafter -> committed length at its last heartbeat
        self.unheld = False  # missing from the verifier's last heartbeat
        self.lagging = -1  # committed length at the verifier's last heartbeat
        self.failures = 0  # verifiers that gave the session back or died with it

    @property
    def length(self) -> int:
        """Committed length, the prompt included: what `base_len` counts."""
        return self.prompt_len + len(self.token_ids)

    @property
    def tokens_left(self) -> int:
        return self.params.max_tokens - len(self.token_ids)

    def context(self) -> Int32Array:
        """Return i32[length]: the prompt and what is committed."""
        return np.concatenate([self.prompt_ids, np.array(self.token_ids, np.int32)])

    def same_content(self, message: Submit) -> bool:
        """Is this the job that the message asks for?"""
        same = (message.params, message.speculation, message.model) == (self.params, self.speculation, self.model)
        return same and np.array_equal(message.prompt_ids, self.prompt_ids)

    def commit(self, commit: Commit) -> int:
        """Append what a verdict adds; return how many of its tokens were known, -1 if it does not fit: a gap, or an
        overlap that disagrees."""
        tokens = commit.token_ids
        start = commit.base_len - self.prompt_len
        known = len(self.token_ids) - start
        if known < 0 or start < 0 or self.token_ids[start:] != tokens[:known]:
            return -1
        flags = [1] * commit.num_accepted + [0] * (len(tokens) - commit.num_accepted)
        self.token_ids.extend(tokens[known:])
        self.accepted.extend(flags[known : len(tokens)])
        self.finish = self.finish or commit.finish
        return known

    def news(self, have: int) -> Tokens:
        """Return what a client that has so many generated tokens lacks."""
        return Tokens(
            job_id=self.job_id,
            base_len=have,
            finish="" if self.failure else self.finish,
            stats=self.stats.to_dict() if self.finish else {},
            token_ids=np.array(self.token_ids[have:], np.int32),
            accepted=np.array(self.accepted[have:], np.uint8),
            **self.logprobs.arrays(have),
        )


class Jobs:
    """All jobs by id: those that wait or run, and the most recent of the finished."""

    def __init__(self) -> None:
        self.active: OrderedDict[int, Job] = OrderedDict()
        self.finished: OrderedDict[int, Job] = OrderedDict()

    def get(self, job_id: int) -> Job | None:
        return self.active.get(job_id) or self.finished.get(job_id)

    def add(self, job: Job) -> None:
        self.active[job.job_id] = job

    def retire(self, job: Job) -> None:
        """Move a job to the finished; the oldest of these is forgotten when there are too many."""
        self.active.pop(job.job_id, None)
        self.finished[job.job_id] = job
        while len(self.finished) > KEEP_FINISHED:
            self.finished.popitem(last=False)

    def waiting(self) -> list[Job]:
        """Return the jobs without a verifier, oldest first."""
        return [job for job in self.active.values() if not job.verifier]
