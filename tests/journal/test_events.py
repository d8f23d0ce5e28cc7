"""What the writer's thread learns of other brokers, and in which order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from specq.journal import JobsGained, JobsLost, JournalWriter, threads
from specq.journal.threads import BrokersListed
from specq.protocol import JournalBusyError
from specq.testing import wait_until
from specq.testing.fake_journal import FakeJournal, added, taken
from tests.journal.stubs import IdleJournal


class Shared(IdleJournal):
    """A journal that loses and takes the jobs it is told to."""

    def __init__(self) -> None:
        self.refused, self.orphans = frozenset[int](), FakeJournal()
        self.written, self.gone = list[Any](), frozenset[int]()
        self.addresses: tuple[str, ...] = ()

    def write(self, records: Any) -> frozenset[int]:
        self.written += [record for record in records if record.job_id not in self.refused]
        return self.refused

    def renew(self) -> tuple[str, ...]:
        return self.addresses

    def lost(self) -> frozenset[int]:
        gone, self.gone = self.gone, frozenset()
        return gone

    def take(self) -> list[Any]:
        jobs, self.orphans = self.orphans.unfinished(), FakeJournal()
        return jobs


@pytest.fixture
def journal() -> Shared:
    return Shared()


@pytest.fixture
def writer(journal: Shared) -> Iterator[JournalWriter]:
    opened = JournalWriter(journal, lambda: None)
    yield opened
    opened.close()


def test_a_lost_job_is_known_before_its_records_count(journal: Shared, writer: JournalWriter) -> None:
    journal.refused = frozenset({2})
    writer.put(2, [added(1, 0, [5]), added(2, 0, [6])])
    wait_until(lambda: writer.durable == 2)
    assert list(writer.events) == [JobsLost(frozenset({2}))]
    assert [record.job_id for record in journal.written] == [1]


def test_records_of_a_taken_job_count_only_if_the_broker_knew_of_the_taking(
    journal: Shared, writer: JournalWriter
) -> None:
    """An earlier one describes a text that another broker has continued."""
    journal.orphans.write([taken(1)])
    wait_until(lambda: writer.events)
    (gained,) = writer.events
    assert isinstance(gained, JobsGained)
    writer.put(1, [added(1, 0, [5]), added(2, 0, [5])], 0)
    writer.put(2, [added(1, 0, [5])], 0)
    wait_until(lambda: writer.durable == 2)
    assert [record.job_id for record in journal.written] == [2]
    writer.put(3, [added(1, 0, [6])], 1)
    writer.put(4, [added(1, 1, [7])], 1)
    wait_until(lambda: writer.durable == 4)
    assert [(record.job_id, record.base_len) for record in journal.written] == [(2, 0), (1, 0), (1, 1)]


def test_a_new_list_of_brokers_is_told_once(journal: Shared, writer: JournalWriter) -> None:
    journal.addresses = ("tcp://a:1", "tcp://b:1")
    wait_until(lambda: writer.events)
    journal.orphans.write([taken(3)])
    wait_until(lambda: len(writer.events) == 2)
    assert writer.events[0] == BrokersListed(("tcp://a:1", "tcp://b:1"))


def test_jobs_lost_before_a_renewal_are_known_before_it_counts(
    journal: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the broker is not sure of any job."""
    monkeypatch.setattr(threads, "RENEW_S", 0.02)
    known: list[tuple[float, list[Any]]] = []
    opened: JournalWriter | None = None
    opened = JournalWriter(journal, lambda: opened and known.append((opened.held_until, list(opened.events))))
    journal.addresses = ("tcp://a:1",)
    wait_until(lambda: known)
    journal.gone = frozenset({3})
    wait_until(lambda: JobsLost(frozenset({3})) in opened.events)
    opened.close()
    first = next(held_until for held_until, events in known if JobsLost(frozenset({3})) in events)
    assert first == max(held_until for held_until, events in known if JobsLost(frozenset({3})) not in events)


def test_after_the_journal_was_away_the_others_get_time_to_renew(
    journal: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first broker that reaches it again would take the jobs of all."""
    monkeypatch.setattr(threads, "RENEW_S", 0.02)
    monkeypatch.setattr(threads, "LEASE_S", 0.2)
    renewals, takings = list[float](), list[float]()

    def renew() -> tuple[str, ...]:
        if time.monotonic() < away_until:
            raise JournalBusyError("it is away")
        renewals.append(time.monotonic())
        return ("tcp://a:1", "tcp://b:2")

    away_until = time.monotonic() + 0.5
    monkeypatch.setattr(journal, "renew", renew)
    monkeypatch.setattr(journal, "take", lambda: takings.append(time.monotonic()) or [])
    opened = JournalWriter(journal, lambda: None)
    wait_until(lambda: takings)
    opened.close()
    assert away_until < renewals[0] < renewals[0] + 0.2 <= takings[0]
    assert len(renewals) > 2


def watched(journal: Shared, monkeypatch: pytest.MonkeyPatch, **constants: float) -> list[str]:
    """Note the calls on a journal with three jobs of a lost broker, which gives one at a time."""
    calls, jobs = list[str](), [taken(1), taken(2), taken(3)]

    def renew() -> tuple[str, ...]:
        calls.append("renew")
        return journal.addresses

    def take() -> list[Any]:
        calls.append("take")
        orphans = FakeJournal()
        orphans.write([jobs.pop()] if jobs else [])
        return orphans.unfinished()

    monkeypatch.setattr(journal, "renew", renew)
    monkeypatch.setattr(journal, "take", take)
    for name, value in constants.items():
        monkeypatch.setattr(threads, name, value)
    return calls


def test_several_brokers_share_the_jobs_of_a_lost_one(journal: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two takings others have time for theirs. A broker that is alone takes all at once."""
    for addresses, expected in (("a", "b"), "renew take " * 4), (("a",), "renew take take take take "):
        journal.addresses = addresses
        with monkeypatch.context() as patch:
            calls = watched(journal, patch, TAKE_S=0.0, RENEW_S=0.05)
            writer = JournalWriter(journal, lambda: None)  # type: ignore[arg-type]
            wait_until(lambda writer=writer: sum(isinstance(event, JobsGained) for event in writer.events) == 3)
            wait_until(lambda calls=calls, expected=expected: len(calls) >= len(expected.split()))
            writer.close()
        assert " ".join(calls).startswith(expected.strip())
