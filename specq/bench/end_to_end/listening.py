"""A client that notes when tokens arrive, in its I/O thread, so that noting costs the jobs next to nothing."""

from __future__ import annotations

import time
from typing import Any

from specq.bench.end_to_end.streams import Stream
from specq.client import Client, Event, Job, NewTokens, Request, Result, Served


class _ListeningJob(Job):
    """A job that knows when it was submitted and when tokens of it arrived."""

    def __init__(self, client: Client, request: Request, served: Served) -> None:
        self.started, self.arrivals = time.perf_counter(), list[float]()
        super().__init__(client, request, served)

    def _take(self, event: Event) -> None:
        if isinstance(event, NewTokens):
            self.arrivals.append(time.perf_counter())
        super()._take(event)


class ListeningClient(Client):
    """A client whose jobs note when their tokens arrive."""

    def complete(self, patience_s: float, **arguments: Any) -> tuple[Stream, Result]:
        """Wait for the completion of one prompt; arguments as of `submit`."""
        job = self.submit(**arguments)
        assert isinstance(job, _ListeningJob), "it was made below"
        result = job.result(patience_s)
        return Stream(result.token_ids, job.started, job.arrivals), result

    def _job(self, request: Request, served: Served) -> Job:
        return _ListeningJob(self, request, served)
