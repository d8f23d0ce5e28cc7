"""The broker's links: the ROUTER for clients and workers, with the key behind each message, and two threads for the
disk.

The broker's loop does not wait for the disk."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping

import zmq

from specq.broker.core import Broker
from specq.broker.state.memory import Effect, Find, FindFinished, Write
from specq.config import BrokerConfig, broker_address
from specq.journal import (
    JobsGained,
    JobsLost,
    JournalLookup,
    JournalWriter,
    Keep,
    Opening,
    Question,
    Record,
    open_journal,
    take_all,
)
from specq.protocol import JournalLostError
from specq.transport import AllowList, Curve, Grant, Zap, bind_router, directory_of, drain, drain_named, own_keys

AT_ONCE = 64  # messages taken before verdicts get their turn; of each peer one in turn
MOST_QUEUED = 2000  # messages queued for a peer or from it


class Front:
    """The front's sockets and allowed keys.

    Raises ConfigError for keys that cannot be used, and in `bind` for an address that cannot be bound.
    """

    def __init__(self, config: BrokerConfig) -> None:
        self._bind = config.bind
        self._own = own_keys(config.keys, "broker") if config.keys else None
        self._allowed = AllowList(directory_of(config.keys)) if config.keys else None
        self._zap: Zap | None = None

    @property
    def grants(self) -> Mapping[str, Grant] | None:
        """Return the keys that may connect now, by name. None: keys are not in use."""
        return self._allowed.grants if self._allowed is not None else None

    def bind(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller) -> None:
        """Open the sockets."""
        if self._allowed is not None:
            self._zap = Zap(context, self._allowed)
            poller.register(self._zap.socket, zmq.POLLIN)
        self.router, self.address = bind_router(context, self._bind, self._own, most_queued=MOST_QUEUED)
        poller.register(self.router, zmq.POLLIN)

    def messages(self, ready: Mapping[object, int]) -> Iterator[tuple[bytes, list[bytes], str]]:
        """Yield each message that has arrived: identity of the socket, frames, name of the key."""
        if self._zap is not None and self._zap.socket in ready:
            self._zap.answer()
        if self.router not in ready:
            return
        if self._allowed is None:
            for identity, *frames in drain(self.router, AT_ONCE):
                yield identity, frames, ""
        else:  # a key that was removed from the list goes by its mark, which never is a key's name
            for user_id, (identity, *frames) in drain_named(self.router, AT_ONCE):
                yield identity, frames, self._allowed.who(user_id) or user_id

    def tick(self) -> None:
        """Read the list of keys again if it has changed."""
        if self._zap is not None:
            self._zap.refresh()

    def curve_to(self, public_key: bytes) -> Curve | None:
        """Return the keys for a connection to the peer with this key. None: keys are not in use."""
        return Curve(self._own, public_key) if self._own is not None else None


class JournalLink:
    """An open journal and its two threads.

    `fileno` is readable when `notify` has something for the broker.
    Raises ConfigError if the journal cannot be used or belongs to another broker.
    """

    def __init__(self, address: str, config: BrokerConfig) -> None:
        self.journal = open_journal(address, _opening(config))
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._signalled = False
        self._records: list[Record] = []
        self._sequence = 0
        self._trouble = self._full = ""
        self._num_handled = 0
        self.brokers = self.journal.renew()  # at the start, as `taken`
        self.taken = take_all(self.journal)
        keep = Keep(config.keep_hours * 3600, config.keep_mb << 20)
        self.writer = JournalWriter(self.journal, self._wake, keep)
        self.lookup = JournalLookup(self.journal.reader(), self._wake)

    def fileno(self) -> int:
        return self._woken.fileno()

    def _wake(self) -> None:
        """Wake the loop, from any thread. One signal is enough until `notify` is called."""
        if not self._signalled:
            self._signalled = True
            with contextlib.suppress(OSError):
                self._waker.send(b"\0")

    # --- the broker's effects -----------------------------------------------------------------------------------------

    def take(self, effect: Write | Find | FindFinished) -> None:
        """Carry out an effect. Records wait for `flush`."""
        if isinstance(effect, Write):
            self._records.append(effect.record)
            self._sequence = effect.sequence
        else:
            self.lookup.ask(effect, _question(effect))

    def flush(self) -> None:
        """Hand over the records of this turn as one batch."""
        if self._records:
            self.writer.put(self._sequence, self._records, self._num_handled)
            self._records = []

    def notify(self, broker: Broker, now: float) -> list[Effect]:
        """Notify the broker of the threads' results, and return its effects.

        Raises JournalLostError if the broker must stop. The signal is cleared before the results are read. A result
        that arrives in between sets it again.
        """
        with contextlib.suppress(OSError):
            self._woken.recv(4096)
        self._signalled = False
        ledger = broker.state.ledger
        ledger.num_groups, ledger.write_s = self.writer.num_groups, self.writer.write_s
        durable = self.writer.durable  # before the events: those of these records are there already
        ledger.held_until = self.writer.held_until
        effects = self._handle_events(broker, now)
        effects += broker.journaled(durable, now)
        if self.writer.lost:
            raise JournalLostError(self.writer.lost)
        if self.writer.trouble != self._trouble:
            self._trouble = self.writer.trouble
            effects += broker.troubled(self._trouble, now)
        if self.writer.full != self._full:
            self._full = self.writer.full
            effects += broker.filled(self._full, now)
        while self.lookup.answers:
            asked, answer = self.lookup.answers.popleft()
            if isinstance(asked, Find):
                effects += broker.found(asked.job_id, answer, now)
            elif isinstance(asked, FindFinished):
                effects += broker.listed(asked, answer, now)
        return effects

    def _handle_events(self, broker: Broker, now: float) -> list[Effect]:
        effects = list[Effect]()
        while self.writer.events:
            self.flush()  # what the broker recorded before it knew of the event
            event = self.writer.events.popleft()
            self._num_handled += 1
            if isinstance(event, JobsLost):
                effects += broker.lose(event.job_ids, now)
            elif isinstance(event, JobsGained):
                effects += broker.gain(event.jobs, now)
            else:
                effects += broker.list_brokers(event.addresses, now)
        return effects

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Journal all remaining records, and release the journal. Call `notify` once more afterwards."""
        self.flush()
        self.lookup.close()
        self.writer.close()
        self._waker.close()
        self._woken.close()


def _opening(config: BrokerConfig) -> Opening:
    return Opening(
        durability=config.durability,
        owner=f"process {os.getpid()}, listening on {config.bind}",
        address=broker_address(config, config.bind),
        floor=int(time.time()) << 10,  # above the epochs of brokers that kept no journal
        take_over=config.take_over,
    )


def _question(effect: Find | FindFinished) -> Question:
    if isinstance(effect, Find):
        return lambda reader: reader.find(effect.job_id)
    return lambda reader: [
        *(reader.unfinished(effect.limit, effect.owner) if effect.with_unfinished else ()),
        *reader.finished(effect.limit, effect.skip, effect.owner),
    ]
