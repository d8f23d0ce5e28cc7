"""The broker's link to its journal: two threads use the disk, so that the broker's loop does not wait for it."""

from __future__ import annotations

import contextlib
import os
import socket
import time

from specq.broker.core import Broker
from specq.broker.state.memory import Effect, Find, FindFinished, Write
from specq.config import BrokerConfig
from specq.journal import JournalLookup, JournalWriter, Keep, Opening, Question, Record, open_journal
from specq.protocol import JournalLostError


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
            self.writer.put(self._sequence, self._records)
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
        effects = broker.journaled(self.writer.durable, now)
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
        floor=int(time.time()) << 10,  # above the epochs of brokers that kept no journal
        take_over=config.take_over,
    )


def _question(effect: Find | FindFinished) -> Question:
    if isinstance(effect, Find):
        return lambda reader: reader.find(effect.job_id)
    return lambda reader: reader.finished(effect.limit, effect.skip, effect.owner)
