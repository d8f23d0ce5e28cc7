"""Jobs that are to stop: `Cancel` is sent again until the broker says that the job has ended.

Rule: for a job that nobody waits for any more it is sent MAX_TRIES times at most; the job may have ended before, and
then the broker does not answer.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from specq.protocol import Cancel, Failed, Message, Tokens

MAX_TRIES = 6
RETRY_S = 0.25  # at first; then twice as long each time


@dataclass(slots=True)
class _Stop:
    due: float
    patience: float
    tries: int = 1


class Stops:
    """The jobs that are to stop, and when `Cancel` is next sent for each; the longest pause is `longest_s`."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._stops: dict[int, _Stop] = {}

    def __len__(self) -> int:
        return len(self._stops)

    def add(self, job_id: int, now: float) -> Cancel:
        """Return the first `Cancel` of a job, or another at once."""
        patience = min(RETRY_S, self._longest_s)
        self._stops.setdefault(job_id, _Stop(now + patience, patience))
        return Cancel(job_id=job_id)

    def forget(self, job_id: int) -> None:
        """Do not stop a job after all: it was submitted again."""
        self._stops.pop(job_id, None)

    def take(self, message: Message) -> None:
        """Note the end of a job; a broker that has no verifier for it has not ended it."""
        match message:
            case Tokens(finish="") | Failed(code="no_verifier"):
                return
            case Tokens() | Failed():
                self._stops.pop(message.job_id, None)

    def due(self, now: float, awaited: Container[int | str]) -> list[Cancel]:
        """Return the messages to send again; `awaited` are the jobs whose end somebody waits for."""
        for job_id in [i for i, stop in self._stops.items() if stop.tries >= MAX_TRIES and i not in awaited]:
            del self._stops[job_id]
        due = [(job_id, stop) for job_id, stop in self._stops.items() if now >= stop.due]
        for _, stop in due:
            stop.tries, stop.patience = stop.tries + 1, min(2 * stop.patience, self._longest_s)
            stop.due = now + stop.patience
        return [Cancel(job_id=job_id) for job_id, _ in due]
