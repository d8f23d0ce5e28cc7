"""Jobs that run without a waiting client: submit, list, fetch and stop them by their ids.

    with JobDesk("tcp://127.0.0.1:5750") as desk:
        for job_id, error in desk.submit(request.submits): ...
        for line in desk.list_jobs(): ...
        for found in desk.fetch([job_id]): ...

The requests use the same core and I/O thread as those of `Client`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import orjson

from specq.client.core import ClientCore
from specq.client.events import LAST, Event, FoundJob, JobPage, RequestFailed, answered
from specq.client.inquiries import LISTING
from specq.client.link import Action, Link, spread
from specq.protocol import BROKER_GONE, JobError, Submit
from specq.transport import CLIENT_ROLES, curve_to_broker

WINDOW = 64  # most requests in progress at a time
PAGE = 1000


class JobDesk:
    """A connection to a broker for requests by job id, or to several (`specq.Client`).

    Raises JobError if the broker is silent or leaves a request unanswered for `timeout_s`.
    """

    def __init__(self, broker: str, timeout_s: float = 10.0, keys: str | Path = "") -> None:
        self._link = Link(ClientCore(spread(broker), timeout_s), curve_to_broker(str(keys), *CLIENT_ROLES))

    def submit(self, jobs: Iterable[Submit]) -> Iterator[tuple[int, JobError | None]]:
        """Submit jobs and leave them to the broker.

        Yields (job id, None) for each accepted job, and (job id, error) for each refused one.
        """
        for event in self._exchange({job.job_id: _leaving(job) for job in jobs}):
            yield int(event.key), event.error if isinstance(event, RequestFailed) else None

    def list_jobs(self, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield all waiting and running jobs, then `limit` ended jobs (None: all), the newest first.

        The field names are those of `specq.broker.jobs.reports.ListedJob`.
        """
        seen: set[int] = set()
        skip, found = 0, True
        while found and (limit is None or skip < limit):
            size = PAGE if limit is None else min(PAGE, limit - skip)
            page = self._page(size, skip)
            new = [line for line in page if line["job_id"] not in seen]
            seen.update(line["job_id"] for line in new)
            found = sum(map(has_ended, page)) == size
            skip += size
            yield from new

    def _page(self, limit: int, skip: int) -> list[dict[str, Any]]:
        (event,) = self._exchange({LISTING: lambda core, now: core.list_jobs(limit, skip, now)})
        return _lines(answered(event, JobPage).data)

    def fetch(self, job_ids: Iterable[int], *, wait: bool = False) -> Iterator[FoundJob]:
        """Yield each job as the broker answers. With `wait`, yield a running job when it has ended."""
        return self._find({job_id: _finding(job_id, wait=wait) for job_id in job_ids})

    def cancel(self, job_ids: Iterable[int]) -> Iterator[FoundJob]:
        """Stop jobs; yield each with its tokens so far when it has ended."""
        return self._find({job_id: _stopping(job_id) for job_id in job_ids})

    def _find(self, actions: Mapping[int, Action]) -> Iterator[FoundJob]:
        for event in self._exchange(actions):
            yield answered(event, FoundJob)

    def _exchange(self, actions: Mapping[Any, Action]) -> Iterator[Event]:
        """Start requests, at most WINDOW at a time, and yield the last event of each.

        Raises JobError if the broker is gone.
        """
        inbox, under_way, waiting = SimpleQueue[Event](), set[int | str](), iter(actions.items())
        try:
            while True:
                for key, action in list(islice(waiting, WINDOW - len(under_way))):
                    under_way.add(key)
                    self._link.request(key, inbox.put, action)
                if not under_way:
                    return
                event = inbox.get()
                if isinstance(event, RequestFailed) and event.error.code in BROKER_GONE:
                    raise event.error
                if isinstance(event, LAST):
                    under_way.discard(event.key)
                    yield event
        finally:
            self._link.abandon(under_way, inbox.put)

    def close(self) -> None:
        """Close the connection; the jobs keep running."""
        self._link.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lines(data: bytes) -> list[dict[str, Any]]:
    """Return the lines of a list of jobs.

    Raises JobError if the data is not such a list.
    """
    try:
        page = orjson.loads(data)
    except orjson.JSONDecodeError:
        page = None
    if not isinstance(page, list) or not all(
        isinstance(line, dict) and {"job_id", "state"} <= set(line) for line in page
    ):
        raise JobError("the broker's list of jobs cannot be read; is it another version of specq?", "lost")
    return page


def has_ended(line: dict[str, Any]) -> bool:
    """Return whether a line of `JobDesk.list_jobs` describes an ended job."""
    return line["state"] not in ("waiting", "running")


def _leaving(job: Submit) -> Action:
    return lambda core, now: core.submit_detached(job, now)


def _finding(job_id: int, *, wait: bool) -> Action:
    return lambda core, now: core.find(job_id, now, until_end=wait)


def _stopping(job_id: int) -> Action:
    def stop(core: ClientCore, now: float) -> None:
        core.find(job_id, now, until_end=True)
        core.cancel(job_id, now)

    return stop
