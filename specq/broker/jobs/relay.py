"""What a job's drafters hear of its verdicts.

At once and as they are, as a rule. But while the verifier is so busy that hardly any draft could be worth verifying, a drafter
that listened to every verdict would only take processor time and memory bandwidth from it. Then verdicts are held back, and
several go as one: less often the longer that lasts. A synchronous drafter hears each, since its round waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.broker.jobs.commits import Commit
from specq.broker.jobs.job import Job
from specq.broker.state import Send
from specq.protocol import Verdict, encode

BUSY = 850  # thousandths: how likely a node must be, from which on hardly any is
MOST_HELD = 32  # verdicts that go as one


def relay(job: Job, commit: Commit, frames: Sequence[bytes]) -> list[Send]:
    """Return what is sent of a verdict that the job has just taken in; nothing if it is held back."""
    if not job.drafters:
        return []
    is_busy = commit.min_accept_prob > BUSY and job.speculation.mode != "sync"
    if not is_busy and job.held.since < 0:
        return _to_all(job, list(frames))
    held = job.held
    if held.since < 0:
        held.since = commit.base_len
    held.count += 1
    if is_busy and held.count < held.most:
        return []
    held.most = min(2 * held.most, MOST_HELD) if is_busy else 1
    merged = encode(
        Verdict(
            session_id=job.job_id,
            epoch=job.epoch,
            base_len=held.since,
            min_accept_prob=commit.min_accept_prob,
            token_ids=np.array(job.token_ids[held.since - job.prompt_len :], np.int32),
        )
    )
    held.since, held.count = -1, 0
    return _to_all(job, merged)


def _to_all(job: Job, frames: list[bytes]) -> list[Send]:
    return [Send("front", drafter, frames) for drafter in job.drafters.values()]
