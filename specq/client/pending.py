"""A request that waits for its answer: what to send for it, and when to give it up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from specq.client.brokers import KnownBrokers
from specq.client.events import Event, FoundJob, ReceivedTranscript, RequestFailed
from specq.protocol import Follow, JobError, JobInfo, LogprobRecord, Message, Submit

MOVE_S = 10.0  # time for a job to move from a broker that died to another one, and for the client to find it


@dataclass(slots=True)
class PendingRequest:
    """A request that waits for its answer; `started` and `sent` are infinite until it is sent.

    A request for a job is one of three kinds: submitted (`own_job`), looked up (`search`), or detached. The first has a
    waiting caller. The last has no transcript.
    """

    message: Callable[[], Message]
    patience: float  # silence after which it is sent again
    transcript: ReceivedTranscript | None = None  # of a job whose tokens are wanted
    is_own: bool = False  # a job of this client: it stops when no caller waits for it
    keep_running: bool = False  # the job is left to the broker instead
    until_end: bool = True  # whether a search waits for the end of the job
    info: JobInfo | None = None  # of a job that is looked up, once it is known
    started: float = math.inf
    sent: float = math.inf
    progress: float | None = None  # time of the broker's last answer to it
    broker_until: float = -math.inf  # how long to wait for a silent broker
    verifier_until: float = -math.inf  # how long to wait for a verifier
    holder: str = ""  # the broker that answered for it last
    moved: float | None = None  # time of the first `Moved` since that answer
    hops: int = 0  # how often it followed `Moved` since it was due
    refused: tuple[str, ...] = ()  # the brokers that refused it, while others are tried
    queued_at: tuple[str, ...] = ()  # where it waits for the first answer of any broker
    waits_for: tuple[str, str] = ("", "")  # the last notice to the user, and the broker's reason for it
    doomed: bool = False  # its tokens ended with "error"; the reason may follow

    @property
    def is_search(self) -> bool:
        """Whether this looks up a job by its id."""
        return self.transcript is not None and not self.is_own

    def join(self, job: Submit) -> list[Event]:
        """Return the events so far, for a caller that submits a waiting job again."""
        message = self.message()
        assert isinstance(message, Submit) and self.transcript is not None, "only own jobs are joined"  # noqa: PT018
        is_same = job.digest == message.digest if job.digest else replace(message, have=0) == replace(job, have=0)
        if not is_same:
            return [RequestFailed(job.job_id, JobError(f"job {job.job_id} exists with other content", "conflict"))]
        return [*self.transcript.so_far(job.job_id)]

    def found(self, job_id: int, error: JobError | None = None) -> FoundJob:
        """Return what is known of a job that was looked up. The times are the broker's."""
        assert self.transcript is not None, "only a search finds a job"
        finished = self.info.elapsed_ms / 1e3 if self.info else None
        transcript = replace(self.transcript, started=0.0, first_token=None, finished=finished)
        return FoundJob(job_id, self.info, transcript, error)

    def take_info(self, info: JobInfo) -> None:
        """Store the description of a job that is looked up."""
        if self.info is None and self.transcript is not None:
            self.transcript.logprobs = LogprobRecord(info.params.logprobs)
        self.info = info

    def is_sought(self, place: str) -> bool:
        """Return whether its job is looked for at this broker, which need not know where it is, or answer."""
        return self.moved is not None or self.holder not in ("", place)

    @property
    def due(self) -> float:
        return self.sent + self.patience

    def deadline(self, timeout_s: float, heard: float | None) -> float:
        """Return when to give up: `timeout_s` after the last answer to this request.

        A job that a broker has accepted may wait for long. It is given up `timeout_s` after `heard`, the time of that
        broker's last message. A job that moves has at least MOVE_S.
        """
        answered = self.started if self.progress is None else self.progress
        if self.moved is not None:
            return max(answered + timeout_s, self.moved + max(timeout_s, MOVE_S))
        if self.transcript is not None and self.progress is not None:
            answered = max(answered, heard or answered)
        return max(answered + timeout_s, self.broker_until)

    def silence(self, known: KnownBrokers, address: str, timeout_s: float, now: float) -> tuple[str, str]:
        """Return the code and the reason for a request that is given up. `address` is that of its broker."""
        heard = known.heard_from(address)
        if known.heard is None:
            return "no_broker", no_broker(known.names, max(timeout_s, round(now - self.started, 1)))
        if heard is not None and now < heard + timeout_s:
            return "lost", f"the broker at {address} is there, but has not answered this for {timeout_s:g} s"
        return "lost", f"the broker at {address} has been silent for {timeout_s:g} s"


def own_job(job: Submit, patience: float, now: float, *, keep_running: bool = False) -> PendingRequest:
    """Return the request for a job that is submitted and waited for."""
    transcript = ReceivedTranscript(now, logprobs=LogprobRecord(job.params.logprobs))
    message = lambda: replace(job, have=len(transcript.token_ids))  # noqa: E731 - what it has grows
    return PendingRequest(message, patience, transcript, is_own=True, keep_running=keep_running)


def search(job_id: int, patience: float, now: float, *, until_end: bool) -> PendingRequest:
    """Return the request for a job that is looked up by its id."""
    transcript = ReceivedTranscript(now)
    return PendingRequest(
        lambda: Follow(job_id=job_id, have=len(transcript.token_ids)), patience, transcript, until_end=until_end
    )


def no_broker(address: str, timeout_s: float) -> str:
    """Return the user's message for a broker that does not answer."""
    return (
        f"no broker answered at {address} within {timeout_s:g} s; start one with `make broker` or `specq up`, "
        "or name another with --broker; one with keys answers only to keys that it knows (--keys)"
    )
