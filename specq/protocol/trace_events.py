"""Events of a traced job in a worker or client, as numbers: a kind, a time, and the kind's values.

Rules: an event is WIDTH + 2 numbers. So it is cheap to note. No text of a worker has to be trusted. A kind never
changes its number or the meaning of a value. A receiver leaves out unknown kinds. Times are microseconds of the
broker's monotonic clock. Each process converts its own clock to it (`specq.runtime.Tracer`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from specq.protocol.bounds import MAX_INT32
from specq.protocol.errors import ProtocolError
from specq.protocol.messages import TraceEvents

WIDTH, MOST = 8, MAX_INT32  # values of an event; the maximum of each


class Kind(NamedTuple):
    """A kind of event: its number on the wire, its name, and the names of its values."""

    number: int
    name: str
    values: tuple[str, ...]


# Of a verifier. The time of `prefill` and `round` is the start of the step.
OPENED = Kind(1, "opened", ("context_tokens", "tokens_left"))
PREFILL = Kind(2, "prefill", ("us", "tokens"))
DRAFT_ARRIVED = Kind(3, "draft_arrived", ("lane", "nodes", "base_len"))
ROUND = Kind(
    4, "round", ("base_len", "tokens", "verified", "accepted", "wait_us", "plan_us", "forward_us", "commit_us")
)
JUDGED = Kind(5, "judged", ("lane", "verified", "accepted", "base_len"))  # those of a round in one lane
CLOSED = Kind(6, "closed", ("length",))
# How a verifier's steps draft. A choice of sources is a number: the sum of 1 << code of their origins, and UNREAD.
DECIDED = Kind(7, "decided", ("reason", "sessions", "used", "tokens_in_1000_s", "other", "other_in_1000_s"))
UNREAD = 1 << 30
# The reasons. A code is an index. A choice is tried, or its probe has won or lost. Or the used choice is worse than a
# part of itself.
DECISIONS = "probe", "probe_won", "probe_lost", "drafts_fell"
# Of a drafter.
ASSIGNED = Kind(10, "assigned", ("lane", "context_tokens"))
DRAFT_SENT = Kind(11, "draft_sent", ("lane", "nodes", "base_len"))
VERDICT_ARRIVED = Kind(12, "verdict_arrived", ("base_len", "tokens"))
RELEASED = Kind(13, "released", ("length",))
# Of a client.
SUBMITTED = Kind(20, "submitted", ("prompt_tokens",))
ACCEPTED = Kind(21, "accepted", ())
RECEIVED = Kind(22, "received", ("base_len", "tokens"))
ENDED = Kind(23, "ended", ("tokens",))

KINDS = {
    kind.number: kind
    for kind in (
        *(OPENED, PREFILL, DRAFT_ARRIVED, ROUND, JUDGED, CLOSED, DECIDED),
        *(ASSIGNED, DRAFT_SENT, VERDICT_ARRIVED, RELEASED),
        *(SUBMITTED, ACCEPTED, RECEIVED, ENDED),
    )
}
LAST = (CLOSED.number, RELEASED.number, ENDED.number)  # the last event that a process notes of a session

Noted = tuple[Any, ...]  # kind, time in seconds of the process's clock, values


def pack(job_id: int, noted: Iterable[Noted], offset_us: int, error_us: int, num_dropped: int) -> TraceEvents:
    """Return the message of events. `offset_us`: how far the broker's clock is ahead."""
    events = list(noted)
    values = np.zeros((len(events), WIDTH), np.int64)
    for row, (_, _, *own) in zip(values, events, strict=True):
        row[: len(own)] = own
    times = np.array([int(at * 1e6) + offset_us for _, at, *_ in events], np.int64)
    return TraceEvents(
        job_id=job_id,
        error_us=min(error_us, MAX_INT32),
        dropped=min(num_dropped, MAX_INT32),
        kinds=np.array([kind.number for kind, *_ in events], np.uint8),
        times_us=np.maximum(times, 0),
        values=np.clip(values, 0, MOST).astype(np.int32).reshape(-1),
    )


def check(message: TraceEvents) -> None:
    """Check that the arrays fit together.

    Raises ProtocolError if they do not.
    """
    count = len(message.kinds)
    if (len(message.times_us), len(message.values)) != (count, count * WIDTH):
        raise ProtocolError(f"{count} events with {len(message.times_us)} times and {len(message.values)} values")


def unpack(message: TraceEvents) -> list[dict[str, Any]]:
    """Return the events of a message as JSON-able values, without unknown kinds."""
    rows = message.values[: len(message.kinds) * WIDTH].reshape(-1, WIDTH).tolist()
    found = zip(message.kinds.tolist(), message.times_us.tolist(), rows, strict=False)
    return [
        {"at_us": at, "event": kind.name} | dict(zip(kind.values, row, strict=False))
        for number, at, row in found
        if (kind := KINDS.get(number)) is not None
    ]
