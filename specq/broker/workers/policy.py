"""Decisions about sessions, as pure functions: placement, moves, quarantine, and the meaning of heartbeats.

Placement. Jobs with a common prompt prefix go to one verifier, which computes the prefix once. This holds while that
verifier has not many more jobs than the others. Otherwise the verifier with the fewest jobs takes the job. Verifiers
without KV space come last. The new verifier computes the KV of a moved job again. So jobs move only to a newly joined
verifier, or if the difference is large. Only a few move at once, and none twice within MOVE_INTERVAL_S.

Quarantine. A job that two crashed verifiers held runs alone on its verifier. If necessary, the other jobs of a verifier
wait meanwhile. A job that crashes a verifier alone, twice, is given up. A job that gets well past its position at the
last crash is cleared. So harmless jobs do not delay others for long.

Heartbeats. Sessions are compared by id, epoch and two committed lengths: now, and at the worker's last heartbeat
(`HeartbeatMark`). What was sent after that may still be on its way.

- close: the worker has a session that is not its own, or has another epoch.
- keep: it has what it should have.
- ahead: it has tokens that the broker lacks and missed since the last heartbeat. They were lost on the way to
  the broker.
- behind: it lacks tokens that the broker had at the last heartbeat. They were lost on the way to the worker.
- missing: it lacks a session for the first time. The session may be on its way.
- lost: it lacks a session again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from specq.broker.state.job import BrokerJob
from specq.broker.state.peers import HeartbeatMark
from specq.broker.state.registry import Worker
from specq.journal import Crashes

AFFINITY_SLACK = 8  # more jobs than the least loaded verifier, up to which a common prefix decides
FRESH_S = 10.0  # a verifier counts as just joined for this long
GROSS = 16  # difference in jobs at which they also move to an older verifier
MOVES_AT_ONCE = 8
MOVE_INTERVAL_S = 10.0  # least time between two moves of a job
MIN_TOKENS_LEFT = 16  # for a job to move
LONE_CRASHES = 2  # after which a job is given up


class Move(NamedTuple):
    """A job to move to another verifier."""

    job: BrokerJob
    to: Worker


def choose(able: Sequence[Worker], num_tokens: int, keys: Sequence[int]) -> Worker:
    """Return the verifier for a job with these prompt keys that may need `num_tokens` tokens of KV.

    `able` must not be empty.
    """
    roomy = [worker for worker in able if worker.free_slots >= num_tokens] or able
    least = min(len(worker.job_ids) for worker in roomy)
    near = [worker for worker in roomy if len(worker.job_ids) <= least + AFFINITY_SLACK]
    return min(near, key=lambda worker: (-worker.num_known(keys), len(worker.job_ids), -worker.free_slots))


def moves(alike: Sequence[Worker], jobs: Iterable[BrokerJob], now: float) -> list[Move]:
    """Return the jobs to move between verifiers of equal weights. `jobs` are the movable ones."""
    movable: dict[bytes, list[BrokerJob]] = {}
    for job in sorted(jobs, key=lambda job: job.transcript.length, reverse=True):  # the shortest and cheapest last
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


def after_crash(job: BrokerJob, num_jobs: int) -> Crashes:
    """Return the crashes that count against a job after a crash of a verifier with `num_jobs` jobs."""
    is_lone = job.is_quarantined and num_jobs == 1
    return Crashes(job.crashes.total + 1, job.crashes.lone + is_lone, job.transcript.num_tokens)


def is_given_up(crashes: Crashes) -> bool:
    return crashes.lone >= LONE_CRASHES


def open_to(able: Iterable[Worker], isolated: set[bytes], *, alone: bool, wanted: set[bytes]) -> list[Worker]:
    """Return the verifiers that may take a job.

    - `isolated`: verifiers that run a job in quarantine. They take no other job.
    - `alone`: the job is in quarantine. It needs a verifier without other jobs.
    - `wanted`: verifiers that could run a waiting job in quarantine. While none runs, the one of them with the fewest
      jobs takes no other jobs.
    """
    able = [worker for worker in able if worker.has_room]
    free = [worker for worker in able if worker.identity not in isolated]
    if alone:
        return [worker for worker in free if not worker.job_ids]
    kept = [worker for worker in free if worker.identity in wanted]
    if kept and len(free) == len(able):
        free.remove(min(kept, key=lambda worker: len(worker.job_ids)))
    return free


def to_clear(able: Iterable[Worker], isolated: set[bytes]) -> Worker | None:
    """Return the verifier to free for a job in quarantine.

    None: such a job already runs, or a verifier is already free.
    """
    ready = [worker for worker in able if worker.state == "ready"]
    if any(worker.identity in isolated or not worker.job_ids for worker in ready):
        return None
    return min(ready, key=lambda worker: len(worker.job_ids), default=None)


Kind = Literal["close", "keep", "ahead", "behind", "missing", "lost"]


class Expected(NamedTuple):
    """A session as the broker has it: its committed length, and its state in the worker's last heartbeat."""

    epoch: int
    length: int
    mark: HeartbeatMark


class Reported(NamedTuple):
    """A session as a heartbeat lists it."""

    epoch: int
    length: int


class Action(NamedTuple):
    """What to do about a session. `length`: the reported length, or -1."""

    kind: Kind
    session_id: int
    epoch: int
    length: int = -1


def reconcile(expected: Mapping[int, Expected], reported: Mapping[int, Reported]) -> list[Action]:
    """Return an action for each session of a worker, by id: first the reported ones, then the missing ones."""
    actions = [
        Action(_kind(expected.get(session_id), found), session_id, found.epoch, found.length)
        for session_id, found in reported.items()
    ]
    for session_id in expected.keys() - reported.keys():
        wanted = expected[session_id]
        actions.append(Action("lost" if wanted.mark.is_missing else "missing", session_id, wanted.epoch))
    return actions


def _kind(expected: Expected | None, reported: Reported) -> Kind:
    """Return what to do about a reported session."""
    if expected is None or expected.epoch != reported.epoch:
        return "close"
    if expected.mark.length == expected.length < reported.length:
        return "ahead"
    return "behind" if reported.length < expected.mark.length else "keep"
