"""The jobs that wait for a verifier: higher priorities first, the clients of one priority in turn.

Turns are by deficit round robin (Shreedhar and Varghese 1995), with tokens as the cost and the smallest quantum, so that
a client with thousands of jobs waits behind one with a few. Who has nothing waiting keeps no credit. A job that comes
back, since its verifier was lost or the broker restarted, goes first and costs nothing: it was paid for.

Rule: a job whose model has no room holds up no other.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from specq.broker.jobs import Job, Wants

Place = TypeVar("Place")


class _Line:
    """The jobs of one client and priority, oldest first for each thing that they want."""

    def __init__(self) -> None:
        self.credit = 0
        self.jobs: dict[Wants, OrderedDict[int, tuple[tuple[bool, int], Job]]] = {}

    def head(self, able: Callable[[Wants], bool]) -> Job | None:
        """Return the job whose turn it is among those that can be placed."""
        heads = [next(iter(waiting.values())) for wants, waiting in self.jobs.items() if able(wants)]
        return min(heads, key=lambda entry: entry[0])[1] if heads else None


class FairQueue:
    """Jobs by priority, client and what they want."""

    def __init__(self) -> None:
        self._lines: dict[int, OrderedDict[str, _Line]] = {}
        self._wants: dict[int, Wants] = {}  # by job, as of when it was added
        self._suspects: Counter[Wants] = Counter()  # what jobs want that must be alone
        self._turns = count()

    def __len__(self) -> int:
        return len(self._wants)

    def suspects(self) -> list[Wants]:
        """Return what the waiting jobs want that must be alone."""
        self._suspects = +self._suspects
        return list(self._suspects)

    def add(self, job: Job) -> None:
        """Let a job wait; one that waits already keeps its place."""
        if job.job_id in self._wants:
            return
        line = self._lines.setdefault(job.priority, OrderedDict()).setdefault(job.owner, _Line())
        self._wants[job.job_id] = job.wants
        self._suspects[job.wants] += job.wants.alone
        waiting = line.jobs.setdefault(job.wants, OrderedDict())
        waiting[job.job_id] = ((not job.resumed, next(self._turns)), job)
        if job.resumed:
            waiting.move_to_end(job.job_id, last=False)

    def discard(self, job: Job) -> None:
        """Let a job wait no longer."""
        wants = self._wants.pop(job.job_id, None)
        if wants is None:
            return
        self._suspects[wants] -= wants.alone
        lines = self._lines[job.priority]
        line = lines[job.owner]
        del line.jobs[wants][job.job_id]
        if not line.jobs[wants]:
            del line.jobs[wants]
        if not line.jobs:
            del lines[job.owner]
        if not lines:
            del self._lines[job.priority]

    def take(self, place: Callable[[Wants], Place | None]) -> tuple[Job, Place] | None:
        """Remove the next job for which there is a place, and return both; None if there is no place for any."""
        known: dict[Wants, Place | None] = {}

        def able(wants: Wants) -> bool:
            if wants not in known:
                known[wants] = place(wants)
            return known[wants] is not None

        for priority in sorted(self._lines, reverse=True):
            job = self._next(self._lines[priority], able)
            if job is not None:
                found = known[self._wants[job.job_id]]
                assert found is not None, "only jobs that can be placed are taken"
                self.discard(job)
                return job, found
        return None

    def _next(self, lines: OrderedDict[str, _Line], able: Callable[[Wants], bool]) -> Job | None:
        """Return the job of the client that needs the least further credit, and give that credit to all."""
        heads = [(line, job) for line in lines.values() if (job := line.head(able)) is not None]
        if not heads:
            return None
        line, job = min(heads, key=lambda head: cost(head[1]) - head[0].credit)
        missing = max(0, cost(job) - line.credit)
        for other, _ in heads:
            other.credit += missing
        if cost(job):
            line.credit -= cost(job)
            lines.move_to_end(job.owner)
        return job


def cost(job: Job) -> int:
    """Return the tokens that a job may take, which is what its client pays for its turn."""
    return 0 if job.resumed else job.prompt_len + job.tokens_left
