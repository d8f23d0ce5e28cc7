"""Which verdicts of a job its drafters receive, and when.

At once and as they are, as a rule. But while the verifier is so busy that it would verify hardly any draft, a drafter that
receives every verdict only takes processor time and memory bandwidth from it. Then verdicts are held back, and several go as
one: less often the longer that lasts, and at once as rarely as can be where drafters are asked to be silent. A synchronous drafter
receives each, since its round waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specq.broker.effects import Send
from specq.broker.jobs.commits import Commit
from specq.broker.jobs.drafters import Lane
from specq.broker.jobs.job import Job
from specq.protocol import Verdict, encode

BUSY = 850  # thousandths: a `min_accept_prob` that hardly any node reaches
SILENT = 1000  # above it no node is likely enough
MOST_HELD = 32  # verdicts that go as one


def relay(job: Job, commit: Commit, frames: Sequence[bytes]) -> list[Send]:
    """Return what is sent of a verdict that the job has just taken in; nothing if it is held back."""
    lanes = job.drafters.lanes
    if not lanes:
        return []
    held = job.drafters.held
    is_busy = commit.min_accept_prob > BUSY and job.request.speculation.mode != "sync"
    if not is_busy and held.since < 0:
        return _to_all(lanes.values(), list(frames))
    if held.since < 0:
        held.since = commit.base_len
    held.count += 1
    if is_busy and held.count < held.most:
        return []
    growth = 2 if commit.min_accept_prob <= SILENT else MOST_HELD
    held.most = min(growth * held.most, MOST_HELD) if is_busy else 1
    merged = encode(
        Verdict(
            session_id=job.job_id,
            epoch=job.session.epoch,
            base_len=held.since,
            min_accept_prob=commit.min_accept_prob,
            token_ids=job.transcript.since(held.since),
        )
    )
    held.since, held.count = -1, 0
    return _to_all(lanes.values(), merged)


def _to_all(lanes: Iterable[Lane], frames: list[bytes]) -> list[Send]:
    return [Send("front", lane.drafter, frames) for lane in lanes]
