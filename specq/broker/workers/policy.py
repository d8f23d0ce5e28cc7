"""Which verifier a job goes to, and which jobs move when a verifier joins: pure functions of what is known of the
verifiers.

Jobs whose prompts begin alike go to the same verifier, which then computes the common part once, as long as that
verifier does not carry many more than the others. Else the one with the fewest jobs takes it; verifiers without KV room
come last.

Rule: a job that moves is computed anew at the other end, so jobs move only to a verifier that has just joined, or where
the difference is gross, a few at a time, and not twice within a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specq.broker.jobs.job import BrokerJob
from specq.broker.workers.registry import Worker

AFFINITY_SLACK = 8  # jobs more than the least loaded verifier has, up to which a common prefix decides
FRESH_S = 10.0  # a verifier has just joined
GROSS = 16  # jobs of difference from which they move to one that has been there for long
MOVES_AT_ONCE = 8
MOVE_INTERVAL_S = 10.0  # least time between two moves of a job
MIN_TOKENS_LEFT = 16  # for a job to move


class Move(NamedTuple):
    """A job that shall go on at another verifier."""

    job: BrokerJob
    to: Worker


def choose(able: Sequence[Worker], num_tokens: int, keys: Sequence[int]) -> Worker:
    """Return the verifier for a job that may need `num_tokens` tokens of KV and whose prompt has these keys; `able` has
    one."""
    roomy = [worker for worker in able if worker.free_slots >= num_tokens] or able
    least = min(len(worker.job_ids) for worker in roomy)
    near = [worker for worker in roomy if len(worker.job_ids) <= least + AFFINITY_SLACK]
    return min(near, key=lambda worker: (-worker.num_known(keys), len(worker.job_ids), -worker.free_slots))


def moves(alike: Sequence[Worker], jobs: Iterable[BrokerJob], now: float) -> list[Move]:
    """Return the jobs that shall move between verifiers of equal weights; `jobs` are those that may."""
    movable: dict[bytes, list[BrokerJob]] = {}
    for job in sorted(jobs, key=lambda job: job.transcript.length, reverse=True):  # the shortest, the cheapest, last
        if job.transcript.tokens_left >= MIN_TOKENS_LEFT and now >= job.session.moved_at + MOVE_INTERVAL_S:
            movable.setdefault(job.session.verifier, []).append(job)
    loads = {worker.identity: len(worker.job_ids) for worker in alike}
    found: list[Move] = []
    for to in sorted((w for w in alike if w.has_room), key=lambda w: loads[w.identity]):
        room = to.hello.max_sessions - loads[to.identity] if to.hello.max_sessions else MOVES_AT_ONCE
        gap = 2 if now < to.joined_at + FRESH_S else GROSS
        while room > 0 and len(found) < MOVES_AT_ONCE:
            giver = max((i for i in loads if movable.get(i)), key=lambda i: loads[i], default=to.identity)
            if loads[giver] - loads[to.identity] < gap:
                break
            found.append(Move(movable[giver].pop(), to))
            loads[giver] -= 1
            loads[to.identity] += 1
            room -= 1
    return found
