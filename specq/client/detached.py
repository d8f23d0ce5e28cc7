"""Jobs that nobody waits for: submitted and left, listed, fetched and stopped by their ids.

    with JobDesk("tcp://127.0.0.1:5750") as desk:
        for answer in desk.submit(request.submits): ...
        for line in desk.list_jobs(): ...
        for found in desk.fetch([job_id]): ...

Rule: every request is repeated until it is answered; all of it is harmless when it is done twice. One that is not answered
in time is given up, whatever else the broker says.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
import zmq

from specq.client.events import Transcript
from specq.client.pending import no_broker
from specq.protocol import (
    Accepted,
    Cancel,
    Failed,
    Follow,
    JobError,
    JobInfo,
    JobList,
    ListJobs,
    LogprobRecord,
    Message,
    ProtocolError,
    Submit,
    Tokens,
    decode,
    encode,
)
from specq.transport import CLIENT_ROLES, connect_dealer, curve_to_broker, drain, try_send

RETRY_S = 1.0
WINDOW = 64  # requests that are under way at a time
PAGE = 1000
_POLL_MS = 50

Requests = dict[int, Callable[[], list[Message]]]  # key -> what to send for it
Hear = Callable[[Message], int | None]  # takes a message, returns the key that it answers, if any


@dataclass(slots=True)
class FoundJob:
    """A job as the broker tells it: what it is, its tokens so far, and why it failed or is unknown, if so."""

    job_id: int
    info: JobInfo | None = None
    transcript: Transcript = field(default_factory=lambda: Transcript(0.0))
    error: JobError | None = None

    @property
    def ended(self) -> bool:
        return bool(self.transcript.finish) or self.error is not None

    def take(self, message: Message) -> None:
        """Take in what the broker says of the job; what comes twice is dropped."""
        transcript = self.transcript
        if isinstance(message, JobInfo):
            self.info = message
            transcript.finished = message.elapsed_ms / 1000
            if transcript.logprobs.num_top != message.params.logprobs:
                transcript.logprobs = LogprobRecord(message.params.logprobs)
        elif isinstance(message, Failed):
            self.error = JobError(message.reason, message.code)
        elif isinstance(message, Tokens):
            known = len(transcript.token_ids) - message.base_len
            if known >= 0:
                transcript.token_ids += message.token_ids.tolist()[known:]
                transcript.accepted += message.accepted.tolist()[known:]
                transcript.logprobs.extend(message, known)
                transcript.finish, transcript.stats = message.finish or transcript.finish, message.stats


class JobDesk:
    """A connection to a broker for requests by job id. Raises JobError if the broker is silent for `timeout_s`."""

    def __init__(self, broker: str, timeout_s: float = 10.0, keys: str | Path = "") -> None:
        self._broker, self._timeout_s = broker, timeout_s
        curve = curve_to_broker(str(keys), *CLIENT_ROLES)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = connect_dealer(self._context, broker, queue=True, curve=curve)
        except BaseException:
            self._context.term()
            raise

    def submit(self, jobs: Iterable[Submit]) -> Iterator[tuple[int, JobError | None]]:
        """Submit jobs and leave them to the broker; yield (job id, why it was refused or None) as they are taken."""
        refused: dict[int, JobError] = {}

        def hear(message: Message) -> int | None:
            if isinstance(message, Failed):
                refused[message.job_id] = JobError(message.reason, message.code)
            return message.job_id if isinstance(message, Accepted | Failed | Tokens) else None

        requests: Requests = {job.job_id: _sending(job) for job in jobs}
        for job_id in self._exchange(requests, hear):
            yield job_id, refused.get(job_id)

    def list_jobs(self, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield all jobs that wait and run, then so many that ended (None: all), the last one first.

        The names are those of `specq.broker.jobs.listing.Line`.
        """
        seen: set[int] = set()
        skip, found = 0, True
        while found and (limit is None or skip < limit):
            size = PAGE if limit is None else min(PAGE, limit - skip)
            page = self._page(size, skip)
            new = [line for line in page if line["job_id"] not in seen]
            seen.update(line["job_id"] for line in new)
            found = len([line for line in page if line["state"] not in ("waiting", "running")]) == size
            skip += size
            yield from new

    def _page(self, limit: int, skip: int) -> list[dict[str, Any]]:
        pages: list[list[dict[str, Any]]] = []

        def hear(message: Message) -> int | None:
            if isinstance(message, Failed) and not message.job_id:
                raise JobError(message.reason, message.code)
            if isinstance(message, JobList) and message.skip == skip:
                pages.append(orjson.loads(message.data.tobytes()))
                return 0
            return None

        for _ in self._exchange({0: lambda: [ListJobs(limit=limit, skip=skip)]}, hear):
            pass
        return pages[0]

    def fetch(self, job_ids: Iterable[int], *, wait: bool = False) -> Iterator[FoundJob]:
        """Yield jobs as their ends are told; with `wait` those that still run, too, when they have ended."""
        return self._follow(job_ids, patient=wait, stop=False)

    def cancel(self, job_ids: Iterable[int]) -> Iterator[FoundJob]:
        """Stop jobs; yield each with what it has, when it has ended."""
        return self._follow(job_ids, patient=True, stop=True)

    def _follow(self, job_ids: Iterable[int], *, patient: bool, stop: bool) -> Iterator[FoundJob]:
        jobs = {job_id: FoundJob(job_id) for job_id in job_ids}

        def hear(message: Message) -> int | None:
            job = jobs.get(getattr(message, "job_id", -1))
            if job is None:
                return None
            job.take(message)
            running = job.info is not None and not job.info.ended
            return job.job_id if job.ended or (running and not patient) else None

        requests: Requests = {job_id: _asking(job, stop=stop) for job_id, job in jobs.items()}
        for job_id in self._exchange(requests, hear):
            yield jobs.pop(job_id)

    # --- the line -----------------------------------------------------------------------------------------------------

    def _exchange(self, requests: Requests, hear: Hear) -> Iterator[int]:
        """Send requests, again until each is answered; yield the keys of those that are."""
        waiting, due = dict(requests), dict[int, float]()
        unanswered: dict[int, float] = {}  # key -> when it was first sent
        heard = time.monotonic()
        while waiting:
            now = time.monotonic()
            self._send(waiting, due, unanswered, now)
            if self._socket.poll(_POLL_MS):
                heard = time.monotonic()
            for message in self._received():
                unanswered[getattr(message, "job_id", 0)] = math.inf
                key = hear(message)
                if key in waiting:
                    del waiting[key], unanswered[key]
                    yield key
            self._check(heard, min(unanswered.values(), default=math.inf), now)

    def _check(self, heard: float, oldest: float, now: float) -> None:
        """Raise JobError if the broker is silent, or has not answered the request that was first sent at `oldest`."""
        late = now - self._timeout_s
        if heard < late:
            raise JobError(no_broker(self._broker, self._timeout_s), "no_broker")
        if oldest < late:
            what = f"the broker at {self._broker} is there, but has not answered a request for {self._timeout_s:g} s"
            raise JobError(what, "lost")

    def _send(self, waiting: Requests, due: dict[int, float], unanswered: dict[int, float], now: float) -> None:
        for key in list(islice(waiting, WINDOW)):
            if now >= due.get(key, -1.0):
                due[key] = now + RETRY_S
                unanswered.setdefault(key, now)
                for message in waiting[key]():
                    try_send(self._socket, encode(message))

    def _received(self) -> Iterator[Message]:
        for frames in drain(self._socket):
            with contextlib.suppress(ProtocolError):
                yield decode(frames)

    def close(self) -> None:
        """Close the connection; the jobs stay."""
        self._context.destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _sending(job: Submit) -> Callable[[], list[Message]]:
    return lambda: [job]


def _asking(job: FoundJob, *, stop: bool) -> Callable[[], list[Message]]:
    def ask() -> list[Message]:
        follow = Follow(job_id=job.job_id, have=len(job.transcript.token_ids))
        return [follow, Cancel(job_id=job.job_id)] if stop else [follow]

    return ask
