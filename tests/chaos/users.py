"""The users of the chaos world: clients that may die, and begin again with the ids of their jobs."""

from __future__ import annotations

from specq.client.core import ClientCore
from specq.client.events import Event, JobDone, RequestFailed
from specq.protocol.messages import Submit


class Client:
    """A client's process: a core, the current socket, and the received messages."""

    def __init__(self, name: bytes, jobs: list[Submit]) -> None:
        self.name, self.jobs, self.life = name, jobs, 0
        self.texts: dict[int, list[int]] = {}
        self.failures: dict[int, str] = {}
        self.start(0.0)

    def start(self, now: float) -> None:
        """Begin anew: submit again, under the same ids, what had not ended."""
        self.life += 1
        self.identity = b"%s %d" % (self.name, self.life)
        self.core = ClientCore("nowhere", timeout_s=1000.0)
        self.ended: set[int] = set()  # in this life
        for job in self.jobs:
            if job.job_id not in self.texts:
                self.core.submit(job, now)

    def take(self, events: list[Event], now: float) -> None:
        """Note the ends of jobs; each comes once. What was never taken, since there was no verifier, is submitted
        again."""
        for event in events:
            if isinstance(event, RequestFailed) and event.error.code == "no_verifier":
                self.core.submit(next(job for job in self.jobs if job.job_id == event.key), now)
                continue
            if not isinstance(event, JobDone | RequestFailed):
                continue
            assert event.key not in self.ended, "a job ended twice"
            self.ended.add(int(event.key))
            if isinstance(event, JobDone):
                self.texts[int(event.key)] = event.transcript.token_ids
            else:
                self.failures[int(event.key)] = str(event.error)
