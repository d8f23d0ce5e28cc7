"""A client that notes in its I/O thread when tokens arrive and jobs end, so that many jobs cost almost nothing.

One thread requests all jobs. One thread for each job would compete with the reading thread, in turns of milliseconds.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable, Mapping
from typing import Any

from bench.end_to_end.streams import Stream
from specq.client import Client, Event, Job, NewTokens, Request, Result, ServedModel


class _ListeningJob(Job):
    """A job that notes when it was submitted and when its tokens arrived, and reports its end."""

    def __init__(self, client: ListeningClient, request: Request, served: ServedModel) -> None:
        self.started, self.arrivals, self._all_ended = time.perf_counter(), list[float](), client.ended
        super().__init__(client, request, served)

    def _take(self, event: Event) -> None:
        if isinstance(event, NewTokens):
            self.arrivals.append(time.perf_counter())
        super()._take(event)
        if self.done:
            self._all_ended.put(self)


class ListeningClient(Client):
    """A client whose jobs note when their tokens arrive. `ended`: the ended jobs, in that order."""

    def __init__(self, broker: str) -> None:
        self.ended: queue.SimpleQueue[_ListeningJob] = queue.SimpleQueue()
        super().__init__(broker)

    def complete(
        self, requests: Iterable[Mapping[str, Any]], num_at_once: int, patience_s: float
    ) -> list[tuple[Stream, Result]]:
        """Complete prompts, `num_at_once` at a time, and return the results in order; request arguments as in `submit`.

        Raises JobError if a job failed, and TimeoutError if none ended for `patience_s` seconds.
        """
        running, found = dict[int | str, int](), dict[int, tuple[Stream, Result]]()
        for place, arguments in enumerate(requests):
            job = self.submit(**arguments)
            running[job.id] = place
            while len(running) == num_at_once:
                self._take_ended(running, found, patience_s)
        while running:
            self._take_ended(running, found, patience_s)
        return [found[place] for place in sorted(found)]

    def _take_ended(
        self, running: dict[int | str, int], found: dict[int, tuple[Stream, Result]], patience_s: float
    ) -> None:
        """Wait for the end of a job, and store its result if it is one of these."""
        try:
            job = self.ended.get(timeout=patience_s)
        except queue.Empty:
            raise TimeoutError(f"none of {len(running)} jobs ended in {patience_s:g} s") from None
        if (place := running.pop(job.id, None)) is not None:
            result = job.result()
            found[place] = Stream(result.token_ids, job.started, job.arrivals), result

    def _job(self, request: Request, served: ServedModel) -> Job:
        return _ListeningJob(self, request, served)
