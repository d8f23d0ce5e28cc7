"""What a process notes of traced jobs, by its own clock, and how far that is from the broker's.

    tracer = Tracer()
    tracer.open(session_id)                                  # notes of other sessions are ignored
    tracer.note(session_id, trace_events.OPENED, now, 12, 128)
    for message in tracer.messages(): ...                    # at each heartbeat: to the broker
    tracer.take_clock(message)                               # the broker's answer to `GetClock`

The clocks are compared by round trips: the broker says what its clock was when it received `GetClock`. Of the last
ROUND_TRIPS the shortest counts; half of it is how far the times may be off, whatever the machine.

Rules: while nothing is traced, nothing is sent, and `is_on` is False, which is all that a hot path asks. A session's
ring and the number of rings are bounded; what is lost is counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from specq.protocol import Clock, GetClock, Message, trace_events

MOST_SESSIONS = 256
MOST_EVENTS = 1024  # of a session that wait to be sent: as many as go as one message
ROUND_TRIPS = 16


class ClockOffset:
    """How far the broker's clock is ahead of this process's, by the shortest of the last round trips."""

    def __init__(self) -> None:
        self._trips: deque[tuple[int, int]] = deque(maxlen=ROUND_TRIPS)  # duration, offset; microseconds

    def take(self, message: Clock, now_us: int) -> None:
        """Take in a round trip that ends now."""
        took = now_us - message.echo_us
        if took >= 0:
            self._trips.append((took, message.clock_us - (message.echo_us + now_us) // 2))

    @property
    def is_known(self) -> bool:
        return bool(self._trips)

    @property
    def offset_us(self) -> int:
        return min(self._trips)[1]

    @property
    def error_us(self) -> int:
        return (min(self._trips)[0] + 1) // 2


class _Ring:
    """The events of a session that were not sent yet."""

    __slots__ = ("dropped", "events", "has_ended")

    def __init__(self) -> None:
        self.events: deque[trace_events.Noted] = deque(maxlen=MOST_EVENTS)
        self.dropped = 0
        self.has_ended = False


class Tracer:
    """The traced sessions of a process; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.offset = clock, ClockOffset()
        self._rings: dict[int, _Ring] = {}

    @property
    def is_on(self) -> bool:
        """Is anything traced?"""
        return bool(self._rings)

    def traces(self, session_id: int) -> bool:
        """Is this session traced?"""
        return session_id in self._rings

    def open(self, session_id: int) -> None:
        """Trace a session from now on; one that is opened again goes on."""
        ring = self._rings.setdefault(session_id, _Ring())
        ring.has_ended = False
        if len(self._rings) > MOST_SESSIONS:
            del self._rings[next(iter(self._rings))]

    def note(self, session_id: int, kind: trace_events.Kind, at: float, *values: int) -> None:
        """Note an event of a session, if it is traced."""
        ring = self._rings.get(session_id)
        if ring is not None:
            ring.dropped += len(ring.events) == MOST_EVENTS
            ring.events.append((kind, at, *values))

    def end(self, session_id: int) -> None:
        """Trace a session no longer; what was noted is still sent."""
        if (ring := self._rings.get(session_id)) is not None:
            ring.has_ended = True

    def messages(self) -> Iterator[Message]:
        """Yield what the broker shall know: to be called with each heartbeat. Until the clocks were compared, events
        wait."""
        if not self._rings:
            return
        yield GetClock(sent_us=int(self.clock() * 1e6))
        if self.offset.is_known:
            for session_id, ring in list(self._rings.items()):
                if ring.events:
                    yield self._message(session_id, ring)
                if ring.has_ended:
                    del self._rings[session_id]

    def _message(self, session_id: int, ring: _Ring) -> Message:
        events, ring.events = ring.events, deque(maxlen=MOST_EVENTS)
        return trace_events.pack(session_id, events, self.offset.offset_us, self.offset.error_us, ring.dropped)

    def take_clock(self, message: Clock) -> None:
        """Take in the broker's answer to `GetClock`."""
        self.offset.take(message, int(self.clock() * 1e6))
