"""What is decided about sessions, as pure functions: which verifier a job goes to and which jobs move when one joins,
which jobs crash verifiers, and what a worker's heartbeat says of its sessions.

Placement. Jobs whose prompts begin alike go to the same verifier, which then computes the common part once, as long as
that verifier does not carry many more than the others. Else the one with the fewest jobs takes it; verifiers without KV
room come last. A job that moves is computed anew at the other end, so jobs move only to a verifier that has just
joined, or where the difference is gross, a few at a time, and not twice within a while.

Quarantine. A job that was there when a verifier crashed, twice, runs alone, one such job on a verifier and nothing
beside it; if need be the other jobs of a verifier wait meanwhile. One that crashes a verifier alone, twice, is given
up. One that gets well past where it was at the last crash is cleared, so that harmless jobs keep nobody waiting for
long.

Heartbeats. Sessions are compared by id and epoch, and by two lengths: the committed length now, and that at the
worker's last heartbeat (`HeartbeatMark`), since what was sent after that may merely be on its way.

    close    the worker has a session that is not its own, or is of another epoch
    keep     it has what it should have
    ahead    it has tokens that the broker lacks, and did not receive since the last heartbeat: they were lost on the
             way here
    behind   it lacks tokens that the broker had at the last heartbeat: they were lost on the way there
    missing  it lacks a session, for the first time: that may be on its way
    lost     it lacks a session again
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from specq.broker.state.job import BrokerJob
from specq.broker.state.peers import HeartbeatMark
from specq.broker.state.registry import Worker
from specq.journal import Crashes

AFFINITY_SLACK = 8  # jobs more than the least loaded verifier has, up to which a common prefix decides
FRESH_S = 10.0  # a verifier has just joined
GROSS = 16  # jobs of difference from which they move to one that has been there for long
MOVES_AT_ONCE = 8
MOVE_INTERVAL_S = 10.0  # least time between two moves of a job
MIN_TOKENS_LEFT = 16  # for a job to move
LONE_CRASHES = 2  # after which a job is given up


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


def after_crash(job: BrokerJob, num_jobs: int) -> Crashes:
    """Return what counts against a job after a crash of a verifier that carried `num_jobs`."""
    is_lone = job.is_quarantined and num_jobs == 1
    return Crashes(job.crashes.total + 1, job.crashes.lone + is_lone, job.transcript.num_tokens)


def is_given_up(crashes: Crashes) -> bool:
    return crashes.lone >= LONE_CRASHES


def open_to(able: Iterable[Worker], isolated: set[bytes], *, alone: bool, quarantined_wait: bool) -> list[Worker]:
    """Return those of the verifiers that may take a job.

    isolated          verifiers that run a job in quarantine: they take nothing else
    alone             the job is in quarantine: it needs a verifier without any
    quarantined_wait  jobs in quarantine wait: while none runs, the verifier with the fewest jobs takes no others
    """
    able = [worker for worker in able if worker.has_room]
    free = [worker for worker in able if worker.identity not in isolated]
    if alone:
        return [worker for worker in free if not worker.job_ids]
    if quarantined_wait and len(free) == len(able) and free:
        free.remove(min(free, key=lambda worker: len(worker.job_ids)))
    return free


def to_clear(able: Iterable[Worker], isolated: set[bytes]) -> Worker | None:
    """Return the verifier whose jobs shall wait, so that one in quarantine can run there; None if one does or could
    already."""
    ready = [worker for worker in able if worker.state == "ready"]
    if any(worker.identity in isolated or not worker.job_ids for worker in ready):
        return None
    return min(ready, key=lambda worker: len(worker.job_ids), default=None)


Kind = Literal["close", "keep", "ahead", "behind", "missing", "lost"]


class Expected(NamedTuple):
    """A session as the broker has it: its committed length, and what the worker's last heartbeat said of it."""

    epoch: int
    length: int
    mark: HeartbeatMark


class Reported(NamedTuple):
    """A session as a heartbeat lists it."""

    epoch: int
    length: int


class Action(NamedTuple):
    """What to do about a session; `length`: as it was reported, -1 if it was not."""

    kind: Kind
    session_id: int
    epoch: int
    length: int = -1


def reconcile(expected: Mapping[int, Expected], reported: Mapping[int, Reported]) -> list[Action]:
    """Return an action for each session of a worker, by id: first the reported ones, then those that it lacks."""
    actions = [
        Action(_kind(expected.get(session_id), found), session_id, found.epoch, found.length)
        for session_id, found in reported.items()
    ]
    for session_id in expected.keys() - reported.keys():
        wanted = expected[session_id]
        actions.append(Action("lost" if wanted.mark.is_missing else "missing", session_id, wanted.epoch))
    return actions


def _kind(expected: Expected | None, reported: Reported) -> Kind:
    """Return what to do about a session that was reported."""
    if expected is None or expected.epoch != reported.epoch:
        return "close"
    if expected.mark.length == expected.length < reported.length:
        return "ahead"
    return "behind" if reported.length < expected.mark.length else "keep"
