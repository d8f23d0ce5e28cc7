"""The client's core with the cores of two brokers on one journal: they die, freeze, start anew; messages are lost."""

from __future__ import annotations

import random

import pytest

from specq.client.core import ClientCore
from specq.client.events import JobDone, RequestFailed
from specq.protocol import Cancel
from specq.testing.fake_journal import SharedJournal
from tests.broker.desk import ANN
from tests.broker.test_several_brokers import FIRST, SECOND, Shared, submit
from tests.client.cores import TEXT, new_ids
from tests.each import each

STEP_S, LENGTH = 0.05, 12


class House:
    """Two brokers, their journal, and a client in front of them."""

    def __init__(self, seed: int = 0, *, loss: float = 0.0) -> None:
        self.chance, self.loss, self.now = random.Random(seed), loss, 100.0
        self.journal = SharedJournal()
        self.desks = {address: Shared(self.journal, address, self.now) for address in (FIRST, SECOND)}
        self.seen = dict.fromkeys(self.desks, 0)  # messages of each that the client has got
        self.down: set[str] = set()  # dead or frozen
        self.core, self.events = ClientCore(f"{FIRST},{SECOND}", 30.0), []

    def step(self) -> None:
        """Let 50 ms pass."""
        self.now += STEP_S
        self.events += self.core.tick(self.now)
        for to, message in self.core.take_addressed():
            if to not in self.down and self.chance.random() >= self.loss:
                self.desks[to].now = self.now
                self.desks[to].front(ANN, message)
        for address, desk in self.desks.items():
            if address not in self.down:
                self._live(address, desk)

    def _live(self, address: str, desk: Shared) -> None:
        desk.now = self.now
        if round(self.now / STEP_S) % 20 == 0:
            desk.renew()
        for job in list(desk.broker.state.jobs.active.values()):
            done = job.transcript.num_tokens
            if job.state == "running" and done < LENGTH and self.chance.random() < 0.1:
                desk.verdict(job.job_id, TEXT[done], finish="length" if done + 1 == LENGTH else "")
        desk.write()
        desk.tick(0.0)
        messages, self.seen[address] = desk.received(ANN)[self.seen[address] :], len(desk.received(ANN))
        for message in messages:
            if self.chance.random() >= self.loss:
                self.events += self.core.receive(message, self.now, address)

    def start_anew(self, address: str) -> None:
        """Start a broker that died. By then the other one has its jobs."""
        self.journal.leave(address)
        for desk in self.desks.values():
            desk.now = self.now
            if desk.address != address:
                desk.renew()
        self.desks[address], self.seen[address] = Shared(self.journal, address, self.now), 0
        self.down.discard(address)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.step()

    def ends(self) -> list:
        return [event for event in self.events if isinstance(event, JobDone | RequestFailed)]


def job(job_id: int = 1):
    return submit(job_id, max_tokens=LENGTH)


@pytest.fixture
def house() -> House:
    return House()


def test_a_job_outlives_its_broker(house):
    """It is taken within four seconds, and the client finds it within one more."""
    house.core.submit(job(), house.now)
    house.run(2.0)
    already = len(new_ids(house.events))
    assert 0 < already < LENGTH
    house.down.add(FIRST)
    house.run(5.0)
    assert house.desks[SECOND].job(1).readers.by_client
    house.run(20.0)
    assert new_ids(house.events) == TEXT[:LENGTH]
    assert [type(event) for event in house.ends()] == [JobDone]


def test_a_broker_that_wakes_sends_the_client_on(house):
    """The client may have asked it meanwhile; what it did after the loss does not count."""
    house.core.submit(job(), house.now)
    house.run(1.0)
    house.down.add(FIRST)
    house.run(4.5)
    house.down.discard(FIRST)
    house.run(20.0)
    assert new_ids(house.events) == TEXT[:LENGTH]
    assert house.journal.fake.num_ends[1] == 1


def test_a_cancel_outlives_the_broker(house):
    house.core.submit(job(), house.now)
    house.run(0.5)
    house.down.add(FIRST)
    house.core.cancel(1, house.now)
    house.run(8.0)
    (done,) = house.ends()
    assert done.transcript.finish == "cancelled"
    assert house.core.idle


def test_a_job_at_the_other_broker_is_found_and_stopped(house):
    """A client that knows only its id."""
    house.desks[SECOND].front(b"ben", job())
    house.desks[SECOND].write()
    house.core.find(1, house.now, until_end=True)
    house.core.cancel(1, house.now)
    house.run(3.0)
    assert [event.transcript.finish for event in house.events] == ["cancelled"]
    assert not any(isinstance(message, Cancel) for _, message in house.core.take_addressed())


@each("seed", range(25))
def test_any_faults_give_the_same_texts(seed):
    """Each token once, in order; each job ends once."""
    house, jobs = House(seed, loss=0.1), range(1, 5)
    chance = house.chance
    for job_id in jobs:
        house.core.submit(job(job_id), house.now)
    while len(house.ends()) < len(jobs):
        assert house.now < 400, "a job never ended"
        house.step()
        if chance.random() < 0.02 and not house.down:
            house.down.add(chance.choice((FIRST, SECOND)))
        elif chance.random() < 0.01 and house.down:
            (address,) = house.down
            if chance.random() < 0.5:
                house.start_anew(address)
            house.down.discard(address)
    for job_id in jobs:
        assert new_ids([event for event in house.events if event.key == job_id]) == TEXT[:LENGTH]
    assert {type(event) for event in house.ends()} == {JobDone}
    assert set(house.journal.fake.num_ends.values()) == {1}
