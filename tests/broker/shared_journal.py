"""Brokers that share a journal in memory, spoken to directly."""

from __future__ import annotations

from typing import Any

import numpy as np

from specq.journal import HELD_S, LEASE_S
from specq.protocol.messages import Submit
from specq.protocol.params import SamplingParams
from specq.testing.fake_journal import SharedJournal
from tests.broker.desk import ANN, Desk

FIRST, SECOND = "tcp://first:5555", "tcp://second:5555"


class Shared(Desk):
    """A broker of a journal that others use, too."""

    def __init__(self, journal: SharedJournal, address: str, now: float = 100.0, **options: Any) -> None:
        self.journal, self.address = journal, address
        super().__init__(has_journal=True, epoch=journal.join(address, now), **options)
        self.broker.state.address = address
        self.now = now
        self.renew()

    def renew(self) -> list[Any]:
        """Do what the journal's thread does each second."""
        addresses = self.journal.renew(self.address, self.now)
        if addresses != self.broker.state.brokers:
            self.take(self.broker.list_brokers(addresses, self.now))
        self.broker.state.ledger.held_until = self.now + HELD_S
        jobs = self.journal.take(self.address, self.now)
        self.take(self.broker.gain(jobs, self.now))
        return jobs

    def write(self) -> None:
        """Let the journal have what it takes, and answer what it is asked."""
        while self.writes or self.asked:
            writes, self.writes = self.writes, []
            lost = self.journal.write(self.address, [write.record for write in writes])
            if lost:
                self.take(self.broker.lose(lost, self.now))
            if writes:
                self.take(self.broker.journaled(writes[-1].sequence, self.now))
            for asked in self._asked():
                self.take(self.broker.found(asked.job_id, self.journal.find(asked.job_id, self.now), self.now))

    def ask(self, client: bytes, message: Any) -> list[Any]:
        """Send a client's message; return what the client receives."""
        already = len(self.received(client))
        self.front(client, message)
        self.write()
        return self.received(client)[already:]

    def say(self, job_id: int, *tokens: int, finish: str = "") -> list[Any]:
        """Commit tokens of a job, and journal them; return what Ann receives."""
        already = len(self.received(ANN))
        self.verdict(job_id, *tokens, finish=finish)
        self.write()
        return self.received(ANN)[already:]


def submit(job_id: int, have: int = 0, max_tokens: int = 10) -> Submit:
    params = SamplingParams(max_tokens=max_tokens)
    return Submit(job_id=job_id, params=params, prompt_ids=np.array([5, 6]), have=have)


def two_brokers(**options: Any) -> tuple[SharedJournal, Shared, Shared]:
    journal = SharedJournal()
    first, second = Shared(journal, FIRST, **options), Shared(journal, SECOND, **options)
    first.renew()
    return journal, first, second


def lapse(first: Shared, second: Shared) -> list[Any]:
    """Let the first broker's lease run out; return the jobs that the second takes."""
    first.now = second.now = first.now + LEASE_S
    return second.renew()
