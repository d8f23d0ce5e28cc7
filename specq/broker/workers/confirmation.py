"""Whether sessions arrive at their verifier: what its heartbeats say of the `Open`s that it was sent.

A session that two heartbeats in a row lack was lost on the way, and is sent again. One that was sent `MAX_OPENS` times,
to a verifier that beats all the while, does not get there at all: its message may be too large for the verifier, or no
message reaches it. That counts as a failure of the session there, and another verifier may try.

Rule: ordinary loss fails no job. With 1% of all messages lost, three `Open`s in a row are lost once in a million, and a
job fails only after three such failures. A slow line is no loss: the session must also be missing for `PATIENCE` times
as long as a verifier may be silent.
"""

from __future__ import annotations

from typing import Literal

from specq.broker.jobs.session import JobSession, Unconfirmed
from specq.broker.workers.registry import Worker

MAX_OPENS = 3  # that a verifier may leave unconfirmed, before the session counts as given back
PATIENCE = 2.0  # times `liveness_ms`: so long it must be missing, too

What = Literal["wait", "open", "give back"]


def confirm(session: JobSession, worker: Worker) -> None:
    """Note that a verifier's heartbeat lists a job's session."""
    worker.is_unreachable = False
    if session.unconfirmed.num_opens:
        session.unconfirmed = Unconfirmed()


def judge_missing(session: JobSession, now: float, patience_s: float) -> What:
    """Note that a heartbeat of a job's verifier lacks its session; return what shall be done about it."""
    if session.unconfirmed.verifier != session.verifier or not session.unconfirmed.num_opens:
        session.unconfirmed = Unconfirmed(session.verifier, 1, now)
    if not session.mark.is_missing:  # `Open` may merely be on its way
        session.mark.is_missing = True
        return "wait"
    if session.unconfirmed.num_opens >= MAX_OPENS and now - session.unconfirmed.since >= patience_s:
        return "give back"
    session.unconfirmed.num_opens += 1
    return "open"


def give_up_on(session: JobSession, worker: Worker) -> str:
    """Note that a verifier never confirmed a job's session; return the reason that its client may receive."""
    worker.is_unreachable = True
    session.avoided |= {worker.identity}
    opens, session.unconfirmed = session.unconfirmed.num_opens, Unconfirmed()
    return (
        f"the verifier {worker.name} was sent the session {opens} times and never confirmed it, though it beats: the message "
        f"is too large for it, or messages to {worker.hello.endpoint} do not arrive"
    )
