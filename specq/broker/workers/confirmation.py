"""Whether sessions arrive at their verifier: what its heartbeats say of the `Open`s that it was sent.

A session that two heartbeats in a row lack was lost on the way, and is sent again. One that was sent `MAX_OPENS` times, to a
verifier that beats all the while, does not get there at all: its message may be too large for the verifier, or no message
reaches it. That counts as a failure of the session there, and another verifier may try.

Rule: ordinary loss fails no job. With 1% of all messages lost, three `Open`s in a row are lost once in a million, and a job
fails only after three such failures. A slow line is no loss: there must be no word of the session for `PATIENCE` times as
long as a verifier may be silent, too.
"""

from __future__ import annotations

from typing import Literal

from specq.broker.jobs.job import Job, Unconfirmed
from specq.broker.workers.registry import Worker

MAX_OPENS = 3  # that a verifier may leave unconfirmed, before the session counts as given back
PATIENCE = 2.0  # times `liveness_ms`: so long it must be missing, too

What = Literal["wait", "open", "give back"]


def confirm(job: Job, worker: Worker) -> None:
    """Note that a verifier's heartbeat lists a job's session."""
    job.unheld, worker.is_deaf = False, False
    if job.unconfirmed.num_opens:
        job.unconfirmed = Unconfirmed()


def judge_missing(job: Job, now: float, patience_s: float) -> What:
    """Note that a heartbeat of a job's verifier lacks its session; return what shall be done about it."""
    if job.unconfirmed.verifier != job.verifier or not job.unconfirmed.num_opens:
        job.unconfirmed = Unconfirmed(job.verifier, 1, now)
    if not job.unheld:  # `Open` may merely be on its way
        job.unheld = True
        return "wait"
    if job.unconfirmed.num_opens >= MAX_OPENS and now - job.unconfirmed.since >= patience_s:
        return "give back"
    job.unconfirmed.num_opens += 1
    return "open"


def give_up_on(job: Job, worker: Worker) -> str:
    """Note that a verifier never confirmed a job's session; return what is said of that."""
    worker.is_deaf = True
    job.avoided |= {worker.identity}
    opens, job.unconfirmed = job.unconfirmed.num_opens, Unconfirmed()
    return (
        f"the verifier {worker.name} was sent the session {opens} times and never confirmed it, though it beats: the message "
        f"is too large for it, or messages to {worker.hello.endpoint} do not arrive"
    )
