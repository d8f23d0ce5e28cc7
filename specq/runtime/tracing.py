"""Record the events of traced jobs, and measure the offset of this process's clock from each broker's.

    tracer = Tracer()
    tracer.open(session_id)                                  # events of other sessions are ignored
    tracer.note(session_id, trace_events.OPENED, now, 12, 128)
    for message in tracer.messages(): ...                    # at each heartbeat: to the broker
    tracer.take_clock(message)                               # the broker's answer to `GetClock`

With several brokers, each receives the events of its own sessions, by its own clock. They go by name.

The clocks are compared by round trips: the broker answers with its time when it received `GetClock`. The shortest of
the last ROUND_TRIPS is used. Half of its duration bounds the error of the times, on any machine.

Rules: while no session is traced, no message is sent and `is_on` is False. A hot path reads only that flag. The size of
a session's ring and the number of rings are bounded. Lost events are counted.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

from specq.protocol import Clock, GetClock, Message, trace_events

MOST_SESSIONS = 256
MOST_EVENTS = 1024  # unsent events of a session: as many as fit in one message
ROUND_TRIPS = 16


class ClockOffset:
    """How far the broker's clock is ahead of this process's clock, from the shortest recent round trip."""

    def __init__(self) -> None:
        self._trips: deque[tuple[int, int]] = deque(maxlen=ROUND_TRIPS)  # duration, offset; microseconds

    def take(self, message: Clock, now_us: int) -> None:
        """Add a round trip that ends now."""
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
    """The events of a session that have not been sent yet."""

    __slots__ = ("broker", "dropped", "events", "has_ended")

    def __init__(self) -> None:
        self.broker = ""
        self.events: deque[trace_events.Noted] = deque(maxlen=MOST_EVENTS)
        self.dropped = 0
        self.has_ended = False


class Tracer:
    """The traced sessions of a process; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.offsets: defaultdict[str, ClockOffset] = defaultdict(ClockOffset)  # by broker
        self._rings: dict[int, _Ring] = {}

    @property
    def is_on(self) -> bool:
        """Whether any session is traced."""
        return bool(self._rings)

    def traces(self, session_id: int) -> bool:
        """Return whether this session is traced."""
        return session_id in self._rings

    def open(self, session_id: int, broker: str = "") -> None:
        """Trace a session from now on, for this broker. A session that is opened again continues."""
        ring = self._rings.setdefault(session_id, _Ring())
        ring.broker, ring.has_ended = broker, False
        if len(self._rings) > MOST_SESSIONS:
            del self._rings[next(iter(self._rings))]

    def note(self, session_id: int, kind: trace_events.Kind, at: float, *values: int) -> None:
        """Record an event of a session, if it is traced."""
        ring = self._rings.get(session_id)
        if ring is not None:
            ring.dropped += len(ring.events) == MOST_EVENTS
            ring.events.append((kind, at, *values))

    def end(self, session_id: int) -> None:
        """Stop tracing a session. Recorded events are still sent."""
        if (ring := self._rings.get(session_id)) is not None:
            ring.has_ended = True

    def forget(self, broker: str) -> None:
        """Forget what is recorded for a broker that will not come back."""
        self._rings = {session_id: ring for session_id, ring in self._rings.items() if ring.broker != broker}
        self.offsets.pop(broker, None)

    def messages(self, broker: str = "") -> Iterator[Message]:
        """Yield the messages for a broker. Call it with each heartbeat.

        Events wait until the clocks have been compared.
        """
        rings = [(session_id, ring) for session_id, ring in self._rings.items() if ring.broker == broker]
        if not rings:
            return
        yield GetClock(sent_us=int(self.clock() * 1e6))
        if self.offsets[broker].is_known:
            for session_id, ring in rings:
                if ring.events:
                    yield self._message(session_id, ring)
                if ring.has_ended:
                    del self._rings[session_id]

    def _message(self, session_id: int, ring: _Ring) -> Message:
        events, ring.events = ring.events, deque(maxlen=MOST_EVENTS)
        offset = self.offsets[ring.broker]
        return trace_events.pack(session_id, events, offset.offset_us, offset.error_us, ring.dropped)

    def take_clock(self, message: Clock, broker: str = "") -> None:
        """Process a broker's answer to `GetClock`."""
        self.offsets[broker].take(message, int(self.clock() * 1e6))
