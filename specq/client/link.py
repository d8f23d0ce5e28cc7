"""The client's one I/O thread, which owns the sockets and the core.

Rule: only this thread touches the sockets and the core. Other threads use `request` and `call`. The thread answers by
calling the request's sink. A sink must return at once and not raise. The process that uses the context creates it.

`Connection` is a client's connection to a broker, or to several of one journal. It sends requests, and each request
passes its events to a sink. No method waits.

Which of several brokers is the first one is drawn once a process. So clients are spread over the brokers, and those of
one process, such as a gateway's, use the same one: its report then shows their jobs.
"""

from __future__ import annotations

import contextlib
import secrets
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson
import zmq

from specq.client.core import ClientCore
from specq.client.events import LAST, Event, RequestFailed, StatusReport, TokenizerReady, TraceReport, answered
from specq.client.inquiries import STATUS, TOKENIZER, TRACE
from specq.client.request import Request, ServedModel
from specq.client.tokenizer_files import TokenizerCache
from specq.config import check_connect
from specq.protocol import ConfigError, JobError, ProtocolError, Submit, decode, encode, split_addresses
from specq.text import TextCodec
from specq.transport import Curve, connect_again, connect_dealer, drain, try_send, why_unreachable


class Connection:
    """A broker, one of its models, and the cache for that model's tokenizer."""

    def __init__(
        self,
        broker: str,
        model: str,
        timeout_s: float,
        cache_dir: Path | None,
        curve: Curve | None = None,
        wait_s: float | None = None,
    ) -> None:
        self.cache, self.model, self.wait_s = TokenizerCache(cache_dir), model, wait_s
        self.link = Link(ClientCore(spread(broker), timeout_s, self.cache.recall), curve)
        self.served: ServedModel | None = None

    def fetch_tokenizer(self, sink: Sink) -> None:
        """Request the tokenizer.

        `sink` gets one event for `take_tokenizer`, perhaps after some `AwaitedModel` events.
        """
        self.link.request(TOKENIZER, sink, lambda core, now: core.fetch_tokenizer(self.model, now, self.wait_s))

    def take_tokenizer(self, event: Event) -> ServedModel:
        """Return the model; raises JobError if the event is a failure."""
        ready = answered(event, TokenizerReady)
        if "tokenizer.json" not in ready.files:
            reason = "its directory, where the verifier runs, needs the tokenizer.json that belongs to its weights"
            raise JobError(f"{ready.model.name} has no tokenizer: {reason}", "engine")
        self.cache.keep(ready.files)
        self.served = ServedModel(ready.model, TextCodec(ready.files), self.model)
        return self.served

    def fetch_status(self, sink: Sink, num_sessions: int = 0) -> None:
        """Request the broker's report. `sink` gets one event for `take_status`."""
        self.link.request(STATUS, sink, lambda core, now: core.get_status(now, num_sessions))

    def take_status(self, event: Event) -> dict[str, Any]:
        """Return the report; raises JobError if the event is a failure."""
        return answered(event, StatusReport).report

    def fetch_trace(self, job_id: int, sink: Sink) -> None:
        """Request the events of a job; 0 means the last job. `sink` gets one event for `take_trace`."""
        self.link.request(TRACE, sink, lambda core, now: core.get_trace(job_id, now))

    def take_trace(self, event: Event) -> dict[str, Any]:
        """Return the trace; raises JobError if the event is a failure."""
        trace: dict[str, Any] = orjson.loads(answered(event, TraceReport).data)
        return trace

    def submit(self, request: Request, sink: Sink) -> None:
        """Send the jobs of a request. `sink` gets their events."""
        for job in request.submits:
            self.link.request(job.job_id, sink, _submission(job, request))

    def cancel(self, request: Request) -> None:
        """Stop the jobs of a request. Their results hold the tokens so far."""

        def each(core: ClientCore, now: float) -> None:
            for job in request.submits:
                core.cancel(job.job_id, now)

        with contextlib.suppress(JobError):  # the client is closed, so the jobs have been stopped already
            self.link.call(each)

    def abandon(self, request: Request, sink: Sink) -> None:
        """Send no more events of a request to `sink`.

        Its jobs stop when no caller waits for them, unless `keep_running` is set.
        """
        self.link.abandon([job.job_id for job in request.submits], sink)


def spread(brokers: str) -> str:
    """Return the addresses in their order, but beginning with one that this process has drawn."""
    addresses = split_addresses(brokers)
    at = _DRAWN % len(addresses)
    return ",".join(addresses[at:] + addresses[:at])


def _submission(job: Submit, request: Request) -> Action:
    return lambda core, now: core.submit(job, now, keep_running=request.keep_running)


Sink = Callable[[Event], None]
Action = Callable[[ClientCore, float], Sequence[Event] | None]

_DRAWN = secrets.randbelow(1 << 30)
_JOIN_S = 5.0
PART_S = 0.5  # time for the broker to confirm stopped jobs when the client closes
TICK_MS = 50
AGAIN_S = 2.0  # between attempts to connect a socket that takes no messages
STARVED_S = 0.001  # longest time from waking the I/O thread to its look, while another thread submits actions
# After that, the other thread waits. A thread that releases the interpreter lock briefly, as tokenizers do, takes it
# again before others wake.
GIVE_WAY_S = 0.0002
IDLE_MS = 1000  # the thread looks for actions at least this often: Ctrl-C may have prevented a wake-up


class Link:
    """A connection to a broker, or to several; each has a socket of its own, made when it is first needed.

    All use the same keys. Raises ConfigError if one of the core's addresses is not an address.
    """

    def __init__(self, core: ClientCore, curve: Curve | None = None) -> None:
        self._core = core
        self._curve, self._sockets = curve, dict[str, zmq.Socket[bytes] | None]()  # None: it cannot be connected
        self._connected = dict[str, float]()  # when each socket was last told to
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            for address in core.brokers.given if core.brokers.several else ():
                check_connect("broker", address)
            self._poller = zmq.Poller()
            self._open(core.brokers.current)
        except BaseException:
            self._context.term()
            raise
        self._waker, self._woken = sockets.socketpair()
        self._woken.setblocking(False)
        self._actions: deque[Action] = deque()
        self._is_woken = False  # whether the thread was woken and has not looked at the actions since
        self._woken_at = 0.0
        self._sinks: dict[int | str, list[Sink]] = {}
        self._closed = self._leaving = False
        self._thread = threading.Thread(target=self._run, name="specq-client", daemon=True)
        self._thread.start()

    # --- from any thread --------------------------------------------------------------------------------------------

    def request(self, key: int | str, sink: Sink, action: Action) -> None:
        """Run `action` on the core; send its events with this `key` to `sink`.

        The events that the action returns come first. The last event ends the request.
        """

        def start(core: ClientCore, now: float) -> None:
            missed = action(core, now) or ()
            for event in missed:
                sink(event)
            if not any(isinstance(event, LAST) for event in missed):
                self._sinks.setdefault(key, []).append(sink)

        self.call(start)

    def call(self, action: Action) -> None:
        """Run `action` on the core, soon, in the I/O thread.

        A caller that submits many actions waits for the I/O thread. Raises JobError if the client was closed.
        """
        if self._closed:
            raise _closed()
        self._actions.append(action)
        if self._was_in_vain(action):
            raise _closed()
        if not self._is_woken:
            self._is_woken, self._woken_at = True, time.monotonic()
            with contextlib.suppress(OSError):
                self._waker.send(b"\0")
        elif time.monotonic() > self._woken_at + STARVED_S and threading.current_thread() is not self._thread:
            time.sleep(GIVE_WAY_S)
            self._woken_at = time.monotonic()

    def _was_in_vain(self, action: Action) -> bool:
        """Return whether the client was closed before an action ran, and take the action back.

        The I/O thread may have looked for the last time before the action came.
        """
        if not self._closed:
            return False
        try:
            self._actions.remove(action)
        except ValueError:
            return False
        return True

    def abandon(self, keys: Iterable[int | str], sink: Sink) -> None:
        """Stop sending events of some requests to `sink`.

        Requests without another waiting caller are forgotten. Jobs that this client submitted stop.
        """

        def forget(core: ClientCore, now: float) -> None:
            for key in keys:
                others = [other for other in self._sinks.pop(key, []) if other != sink]
                if others:
                    self._sinks[key] = others
                else:
                    core.abandon(key, now)

        with contextlib.suppress(JobError):  # the client is closed, so the jobs have been stopped already
            self.call(forget)

    @property
    def num_awaited(self) -> int:
        """The number of requests with a waiting caller."""
        return len(self._sinks)

    def leave(self) -> None:
        """Close the connection, but let the jobs run. `find` gets them by their ids."""
        self._leaving = True
        self.close()

    def close(self) -> None:
        """Stop all jobs and the thread. Waiting requests fail. Sent messages get a moment to leave the socket."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    # --- the I/O thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error = _closed()
        try:
            self._loop()
        except BaseException as reason:  # waiting callers receive the error
            error = JobError(f"the client's I/O thread died: {reason!r}", "lost")
            raise
        finally:
            self._closed = True
            self._fail_all(error)
            silent = self._core.brokers.silent(time.monotonic())
            for address, socket in self._sockets.items():
                if socket is not None:
                    socket.close(0 if address in silent else None)
            self._context.term()
            self._waker.close()
            self._woken.close()

    def _loop(self) -> None:
        self._poller.register(self._woken, zmq.POLLIN)
        next_tick = 0.0
        while not self._closed:
            ready = dict(self._poller.poll(IDLE_MS if self._core.idle else TICK_MS))
            self._act()
            self._receive(ready)
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_MS / 1e3
                self._deliver([self._explained(event) for event in self._core.tick(now)])
            self._flush()
        self._act()
        self._fail_all(_closed())
        if not self._leaving:
            self._core.abandon_all(time.monotonic())
            self._part()
        self._flush()

    def _part(self) -> None:
        """Wait at most PART_S for the broker to confirm the end of the jobs.

        Lost messages are repeated.
        """
        end = time.monotonic() + PART_S
        self._poller.unregister(self._woken)
        self._flush()
        while not self._core.idle and time.monotonic() < end:
            self._receive(dict(self._poller.poll(TICK_MS)))
            self._core.tick(time.monotonic())
            self._flush()

    def _act(self) -> None:
        """Run the actions that other threads have submitted so far.

        Later actions run after these messages have been sent. Otherwise a thread with many jobs would delay the first
        messages until the last job.
        """
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        self._is_woken = False  # reset first, so that no action is overlooked
        for _ in range(len(self._actions)):
            try:
                action = self._actions.popleft()
            except IndexError:  # the action was taken back
                return
            action(self._core, time.monotonic())

    def _receive(self, ready: Container[object]) -> None:
        for address, socket in self._sockets.items():
            for frames in drain(socket) if socket is not None and socket in ready else ():
                with contextlib.suppress(ProtocolError):  # drop it; the core repeats the request
                    self._deliver(self._core.receive(decode(frames), time.monotonic(), address))

    def _flush(self) -> None:
        for address, message in self._core.take_addressed():
            socket = self._sockets[address] if address in self._sockets else self._try_open(address)
            if socket is not None and not try_send(socket, encode(message)):  # the core sends it again later
                self._connect_again(address, socket)

    def _connect_again(self, address: str, socket: zmq.Socket[bytes]) -> None:
        """Connect a socket that takes no messages, unless its broker answered or it was connected a short time ago."""
        now, last = time.monotonic(), self._core.brokers.heard_from(address) or 0.0
        if now > max(last, self._connected[address]) + AGAIN_S:
            self._connected[address] = now
            connect_again(socket, address)

    def _open(self, address: str) -> zmq.Socket[bytes]:
        socket = connect_dealer(self._context, address, queue=True, curve=self._curve)
        self._poller.register(socket, zmq.POLLIN)
        self._sockets[address], self._connected[address] = socket, time.monotonic()
        return socket

    def _try_open(self, address: str) -> zmq.Socket[bytes] | None:
        """Connect to a further broker. Close the connections to forgotten ones."""
        for gone in [other for other in self._sockets if other not in self._core.brokers]:
            if (socket := self._sockets.pop(gone)) is not None:
                self._poller.unregister(socket)
                socket.close()
        try:
            return self._open(address)
        except ConfigError:  # to the core it is a silent broker
            self._sockets[address] = None
            return None

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            last = isinstance(event, LAST)
            sinks = self._sinks.pop(event.key, []) if last else self._sinks.get(event.key, [])
            for sink in sinks:
                sink(event)

    def _explained(self, event: Event) -> Event:
        """Add the present problem of each broker's address to a failure, if none ever answered."""
        if not isinstance(event, RequestFailed) or event.error.code != "no_broker":
            return event
        known = self._core.brokers
        found = [(address, why) for address in known.given if (why := why_unreachable(address))]
        reason = ", ".join(f"{address}: {why}" if known.several else why for address, why in found)
        told = str(event.error).replace(";", f": {reason};", 1)
        return RequestFailed(event.key, JobError(told, "no_broker")) if reason else event

    def _fail_all(self, error: JobError) -> None:
        self._deliver([RequestFailed(key, error) for key in list(self._sinks)])


def _closed() -> JobError:
    return JobError("the client was closed", "lost")
