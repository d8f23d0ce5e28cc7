"""Records of jobs for any journal, random histories for real ones, and the strict journals in memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from specq.journal import JobBound, JobDropped, JobEnded, JobTaken, Record, StoredJob, TokensAdded, pack
from specq.protocol import LogprobRecord, SamplingParams, Speculation, Submit
from specq.simulate.journal import FakeJournal, SharedJournal

__all__ = ["PARAMS", "FakeJournal", "SharedJournal", "added", "ended", "groups", "history", "plain", "taken"]

PARAMS = SamplingParams(temperature=0.5, seed=2**62, stop=("ü",), logit_bias=((3, -1.5),), logprobs=1)


def taken(job_id: int, submitted: float = 1.0) -> JobTaken:
    submit = Submit(
        job_id=job_id,
        params=PARAMS,
        speculation=Speculation(num_candidates=3),
        model="m",
        label='"ä"',
        tenant="alice",
        cache_salt="pepper",
        priority=-2,
        prompt_ids=np.array([1, 2, 2**31 - 1], np.int32),
    )
    return JobTaken(submit, "owner", submitted, 7.5)


def added(job_id: int, base_len: int, tokens: list[int]) -> TokensAdded:
    record = LogprobRecord(1)
    record.tokens, record.top_ids, record.top = [-0.5] * len(tokens), tokens, [-0.25] * len(tokens)
    raw = np.array(tokens, "<i4").tobytes()
    return TokensAdded(job_id, base_len, raw, bytes(len(tokens)), pack(record, 0), 4, 0 if base_len else 16)


def ended(job_id: int, tokens: list[int], at: float = 9.0, finish: str = "length") -> JobEnded:
    one = added(job_id, 0, tokens)
    code, reason = ("engine", "it broke") if finish == "error" else ("", "")
    stats = {"rounds": 3, "positions": [[1, 2]]}
    return JobEnded(job_id, finish, code, reason, stats, at, one.token_ids, one.origins, one.logprobs)


def history(rng: random.Random, num_jobs: int = 12, length: int = 300) -> list[Record]:
    """Return records of jobs that begin, continue, end or are dropped at random."""
    records: list[Record] = []
    texts: dict[int, list[int]] = {}
    over: set[int] = set()
    for _ in range(length):
        job_id = rng.randrange(1, num_jobs)
        if job_id not in texts:
            texts[job_id] = []
            records += [taken(job_id, float(len(records))), JobBound(job_id, f"w{job_id}")]
        elif job_id in over:
            continue
        elif rng.random() < 0.05:
            finish = rng.choice(["stop", "error", "cancelled"])
            records.append(ended(job_id, texts[job_id], float(len(records)), finish))
            over.add(job_id)
        elif rng.random() < 0.02:
            records.append(JobDropped(job_id))
            del texts[job_id]
        else:
            tokens = [rng.randrange(1000) for _ in range(rng.randrange(1, 5))]
            records.append(added(job_id, len(texts[job_id]), tokens))
            texts[job_id] += tokens
    return records


def groups(rng: random.Random, records: list[Record]) -> Iterator[list[Record]]:
    """Cut records into groups of random sizes."""
    while records:
        size = rng.randrange(1, 40)
        yield records[:size]
        records = records[size:]


def plain(job: StoredJob | None) -> StoredJob | None:
    """Return a job as a reader finds it.

    It lacks counts that only a running broker has. An unfinished job also lacks its tokens and weights.
    """
    bare = job and replace(job, rounds=0, draft_tokens=0, cached_tokens=0)
    return bare if not bare or bare.finish else replace(bare, weights="", token_ids=b"", origins=b"", logprobs=b"")
