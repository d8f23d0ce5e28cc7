"""A steady load on a broker: so many toy jobs at a time, each checked when it ends, and what the user sees of each.

A job that is refused before it began is submitted again. What was lost (a job that failed), doubled (ended twice) or
wrong (another text) is counted in the report, never raised.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Self

from specq import Client
from specq.client.events import Event, JobDone, NewTokens, RequestFailed
from specq.client.request import Request, read_request
from specq.protocol import JobError


class Asked(NamedTuple):
    """A job: its prompt, the text that must come of it, and its parameters."""

    prompt: list[int]
    expected: list[int]
    params: dict[str, Any] = {"ignore_eos": True}  # noqa: RUF012 - nobody changes it


Prompts = Iterable[Asked]
REFUSALS = ("busy", "no_verifier")
AGAIN_S = 0.3  # until a refused job is submitted again


@dataclass
class Running:
    """A job that runs; `advanced` is when its last tokens came, `tokens` how many there are."""

    asked: Asked
    advanced: float
    job_id: int
    tokens: int = 0


@dataclass
class Tally:
    """What came of the jobs; `arrivals`: (time, tokens) of all that came."""

    counts: Counter[str] = field(default_factory=Counter)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def rate(self, start: float, end: float) -> float:
        """Return the tokens a second that came between two times."""
        return sum(num for at, num in self.arrivals if start <= at < end) / (end - start)


class Load:
    """Keeps `num_jobs` jobs under way until the block is left, spread over the clients."""

    def __init__(self, clients: Sequence[Client], prompts: Prompts, num_jobs: int) -> None:
        self.clients, self.tally, self.running = clients, Tally(), dict[str, Running]()
        self._prompts, self._num_jobs = iter(prompts), num_jobs
        self._lock, self._ids, self._open = threading.Lock(), count(1), True

    def __enter__(self) -> Self:
        for _ in range(self._num_jobs):
            self._submit()
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False

    def _submit(self) -> None:
        with self._lock:  # the threads of several clients
            asked, number = next(self._prompts), next(self._ids)
        name, client = f"load {number}", self.clients[number % len(self.clients)]
        arguments = {"token_ids": asked.prompt, "id": name, "max_tokens": len(asked.expected), **asked.params}
        request = read_request(arguments, client.served)
        with self._lock:
            self.running[name] = Running(asked, time.monotonic(), request.submits[0].job_id)
        self._send(name, client, request)

    def _send(self, name: str, client: Client, request: Request) -> None:
        """Submit a job; one that is refused before it began, again and again."""

        def hear(event: Event) -> None:
            if isinstance(event, RequestFailed) and event.error.code in REFUSALS and not self.running[name].tokens:
                self.tally.counts["refused"] += 1
                again = threading.Timer(AGAIN_S, self._send, (name, client, request))
                again.daemon = True
                again.start()
            else:
                self._hear(name, event)

        with suppress(JobError):  # the client was closed meanwhile
            client._connection.submit(request, hear)

    def _hear(self, name: str, event: Event) -> None:
        """Take an event, in the client's thread."""
        now = time.monotonic()
        with self._lock:
            job = self.running.get(name)
            if job is None:
                self.tally.counts["doubled"] += 1
                return
            if isinstance(event, NewTokens):
                job.advanced, job.tokens = now, job.tokens + len(event.token_ids)
                self.tally.arrivals.append((now, len(event.token_ids)))
                return
            del self.running[name]
        self._end(job, event)

    def _end(self, job: Running, event: Event) -> None:
        self.tally.counts["jobs"] += 1
        if isinstance(event, RequestFailed):
            self.tally.counts["lost"] += 1
            self.tally.failures.append(str(event.error))
        elif isinstance(event, JobDone):
            self.tally.counts["wrong"] += event.transcript.token_ids != job.asked.expected
        if self._open:
            self._submit()

    def ids(self) -> dict[int, str]:
        """Return the names of the jobs that run, by their ids."""
        with self._lock:
            return {job.job_id: name for name, job in self.running.items()}

    # --- what happens -------------------------------------------------------------------------------------------------

    def since(self, start: float) -> set[str]:
        """Return the jobs that run and have not advanced since then."""
        with self._lock:
            return {name for name, job in self.running.items() if job.advanced < start}

    def recovered(self, start: float, limit_s: float, of: Collection[str] | None = None) -> float | None:
        """Wait until every job that runs, or each of these, has advanced since then; return the seconds it took, None
        if it takes longer."""
        stuck = self.since(start) if of is None else self.since(start) & set(of)
        while stuck:
            if time.monotonic() > start + limit_s:
                return None
            time.sleep(0.005)
            stuck &= self.since(start)
        return time.monotonic() - start

    def finish(self, limit_s: float) -> None:
        """Let what runs end; what has not by then is lost."""
        self._open = False
        wait_for(lambda: not self.running, limit_s)
        with self._lock:
            self.tally.counts["jobs"] += len(self.running)
            self.tally.counts["lost"] += len(self.running)
            self.tally.failures += [f"{name} never ended" for name in self.running]


def wait_for(condition: Callable[[], object], limit_s: float) -> bool:
    """Look until it is so; False if it is not in time."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
