"""Which verdicts of a job its drafters receive, and when.

At once and as they are, as a rule. But while the verifier is so busy that it would verify hardly any draft, a drafter
that receives every verdict only takes processor time and memory bandwidth from it. Then verdicts are held back, and
several go as one: less often the longer that lasts, and at once as rarely as can be where drafters are asked to be
silent. A synchronous drafter receives each, since its round waits for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from specq.broker.effects import Send
from specq.broker.jobs.commits import Commit
from specq.broker.jobs.drafters import DrafterLane
from specq.broker.jobs.job import BrokerJob
from specq.protocol import Frames, Verdict, Verdicts, encode

BUSY = 850  # thousandths: a `min_accept_prob` that hardly any node reaches
SILENT = 1000  # above it no node is likely enough
MOST_HELD = 32  # verdicts that go as one


def relay(job: BrokerJob, commit: Commit, frames: Sequence[bytes]) -> list[Send]:
    """Return what is sent of a verdict that came alone and that the job has just taken in; nothing if it is held
    back."""
    lanes = job.drafters.lanes.values()
    if not lanes:
        return []
    job.drafters.held.asked = commit.min_accept_prob
    if _goes_at_once(job, commit):
        return _to_all(lanes, list(frames))
    merged = _held(job, commit)
    return _to_all(lanes, merged) if merged else []


class StepRelay:
    """What is sent of the verdicts of a step: to each drafter one message, with those of its sessions. Those that were
    held back go as verdicts of their own."""

    def __init__(self, step: Verdicts, frames: Sequence[bytes]) -> None:
        """`frames`: the step's, as they came."""
        self._step, self._frames = step, frames
        self._places: defaultdict[bytes, list[int]] = defaultdict(list)
        self._merged: list[Send] = []

    def add(self, place: int, job: BrokerJob, commit: Commit) -> None:
        """Pass on the verdict at this place of the step, which the job has just taken in."""
        lanes = job.drafters.lanes
        if not lanes:
            return
        job.drafters.held.asked = commit.min_accept_prob
        if _goes_at_once(job, commit):
            for lane in lanes.values():
                self._places[lane.drafter].append(place)
        elif merged := _held(job, commit):
            self._merged += _to_all(lanes.values(), merged)

    def sends(self) -> list[Send]:
        """Return what is sent. A drafter of all the sessions receives the message as it came."""
        size = self._step.session_ids.size
        at_once = [
            Send("front", drafter, list(self._frames) if len(places) == size else encode(self._step.take(places)))
            for drafter, places in self._places.items()
        ]
        return self._merged + at_once


def _goes_at_once(job: BrokerJob, commit: Commit) -> bool:
    return job.drafters.held.since < 0 and not _is_busy(job, commit)


def _is_busy(job: BrokerJob, commit: Commit) -> bool:
    return commit.min_accept_prob > BUSY and not job.request.speculation.waits


def _held(job: BrokerJob, commit: Commit) -> Frames | None:
    """Hold a verdict back; return those that are held by now as one if it is time, else None."""
    held, is_busy = job.drafters.held, _is_busy(job, commit)
    if held.since < 0:
        held.since = commit.base_len
    held.count += 1
    if is_busy and held.count < held.most:
        return None
    growth = 2 if commit.min_accept_prob <= SILENT else MOST_HELD
    held.most = min(growth * held.most, MOST_HELD) if is_busy else 1
    merged = Verdict(
        session_id=job.job_id,
        epoch=job.session.epoch,
        base_len=held.since,
        min_accept_prob=commit.min_accept_prob,
        token_ids=job.transcript.since(held.since),
    )
    held.since, held.count = -1, 0
    return encode(merged)


def _to_all(lanes: Iterable[DrafterLane], frames: Frames) -> list[Send]:
    return [Send("front", lane.drafter, frames) for lane in lanes]
