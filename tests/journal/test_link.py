"""The threads around a journal: news always arrives, groups are bounded in time, and closing loses no record."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specq.broker import Broker, Find, FindFinished, JournalLink, Write, links
from specq.config.sections import BrokerConfig
from specq.journal import Clocks, MachineClock, Opening, open_journal
from specq.journal.sqlite.reader import SqliteReader
from specq.journal.threads import GROUP_S, JournalWriter, Keep
from specq.processes.broker import BrokerLoop
from specq.protocol.errors import JournalBusyError, JournalLostError
from specq.testing import wait_until
from specq.testing.fake_journal import added, ended, taken
from tests.each import each
from tests.journal.stubs import IdleJournal

PATIENCE_S = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "broker.journal"


@pytest.fixture
def link(path: Path) -> Iterator[JournalLink]:
    opened = JournalLink(str(path), BrokerConfig())
    yield opened
    opened.close()


def is_readable(link: JournalLink, timeout_s: float = PATIENCE_S) -> bool:
    return bool(select.select([link], [], [], timeout_s)[0])


def hear_until(link: JournalLink, broker: Broker, condition: Callable[[], bool]) -> None:
    """Pass the messages of the journal to the broker until the condition holds."""
    while not condition():
        assert is_readable(link)
        link.notify(broker, 0.0)


class Recording(Broker):
    """A broker that only records the journal's messages."""

    def __init__(self) -> None:
        super().__init__(incarnation=1, has_journal=True)
        self.heard, self.answers = list[int](), list[Any]()

    def journaled(self, sequence: int, now: float) -> list[Any]:
        self.heard.append(sequence)
        return []

    def found(self, job_id: int, stored: Any, now: float) -> list[Any]:
        self.answers.append((job_id, stored and stored.finish))
        return []

    def listed(self, asked: FindFinished, found: Any, now: float) -> list[Any]:
        self.answers.append((asked.client, [one.job_id for one in found]))
        return []


def test_delta_and_answers_arrive(link: JournalLink) -> None:
    """Written records are reported. A question is answered after the reports of all earlier writes."""
    broker = Recording()
    for sequence, record in enumerate((taken(1), taken(2), ended(1, [5])), 1):
        link.take(Write(sequence, record))
        link.flush()
        hear_until(link, broker, lambda last=sequence: broker.heard[-1:] == [last])
    link.take(Find(1))
    link.take(Find(3))
    link.take(FindFinished(b"c", 10, 0))
    hear_until(link, broker, lambda: len(broker.answers) == 3)
    assert broker.answers == [(1, "length"), (3, None), (b"c", [1])]


def test_each_request_gets_an_answer(link: JournalLink) -> None:
    """Also after an unexpected error in the lookup."""
    broker = Broker(incarnation=1, has_journal=True)
    told: list[Any] = []
    broker.found = lambda job_id, stored, now: told.append(stored) or []
    link.lookup.ask(Find(1), lambda reader: reader.nonsense)
    hear_until(link, broker, lambda: bool(told))
    assert isinstance(told[0], JournalBusyError)
    assert "cannot be read" in str(told[0])


class WakesWhileHeard:
    """A socket during whose reading the other thread has news, just before the signal of older news is taken."""

    def __init__(self, link: JournalLink) -> None:
        self._link, self._real = link, link._woken

    def fileno(self) -> int:
        return self._real.fileno()

    def recv(self, size: int) -> bytes:
        self._link._wake()
        return self._real.recv(size)

    def close(self) -> None:
        self._real.close()


def test_no_signal_is_lost(link: JournalLink) -> None:
    """News at any time, also during the handling of older news, signals again."""
    link._wake()
    link._woken = WakesWhileHeard(link)
    link.notify(Recording(), 0.0)
    link._wake()
    assert is_readable(link, 0.0)


def test_groups_are_few_and_no_record_waits_long(path: Path) -> None:
    """However many records come one by one, groups do not; one that comes alone is written at once."""
    written = threading.Event()
    writer = JournalWriter(open_journal(str(path), Opening(durability="process")), written.set)
    started, sequence = time.monotonic(), 0
    writer.put(1, [taken(1)])
    while time.monotonic() < started + 0.3:
        sequence += 1
        writer.put(sequence + 1, [added(1, sequence - 1, [sequence])])
        time.sleep(0.0001)
    writer.close(PATIENCE_S)
    assert writer.durable == sequence + 1
    assert 1 < writer.num_groups <= (time.monotonic() - started) / GROUP_S + 1


class Failing(IdleJournal):
    """A journal that is busy for a while, or lost."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.groups = list(errors), []

    def write(self, records: Any) -> frozenset[int]:
        if self.errors:
            raise self.errors.pop(0)
        self.groups.append(list(records))
        return frozenset()


def test_what_cannot_be_written_now_is_written_later() -> None:
    """The same group, once. The trouble is reported while it lasts, and new records wait their turn."""
    journal = Failing(JournalBusyError("the disk is full"), JournalBusyError("the disk is full"))
    told: list[str] = []
    writer = JournalWriter(journal, lambda: told.append(writer.trouble))
    writer.put(1, ["a"])
    wait_until(lambda: writer.trouble)
    writer.put(2, ["b"])
    wait_until(lambda: writer.durable == 2)
    assert journal.groups == [["a"], ["b"]]
    assert [trouble for i, trouble in enumerate(told) if i == 0 or told[i - 1] != trouble] == ["the disk is full", ""]
    writer.close()


class Piped(IdleJournal):
    """A journal that asks for a second group before it answers the first one, when `gate` is open."""

    def __init__(self) -> None:
        self.pulled, self.more, self.gate = list[Any](), threading.Event(), threading.Event()

    def write_all(self, groups: Any) -> Iterator[frozenset[int]]:
        given = iter(groups)
        self.pulled.append(list(next(given)))
        assert self.more.wait(PATIENCE_S)
        self.pulled += [list(one) for one in given]
        assert self.gate.wait(PATIENCE_S)
        for _ in range(len(self.pulled)):
            yield frozenset()


@each(("later", "pulled"), [([], [["a"]]), (["b"], [["a"], ["b"]])])
def test_nothing_is_durable_before_its_group_is_written(later: list[str], pulled: list[list[str]]) -> None:
    """What comes while a group is under way waits for its answer, also a sequence number without records."""
    journal = Piped()
    writer = JournalWriter(journal, lambda: None)
    writer.put(1, ["a"])
    wait_until(lambda: journal.pulled)
    writer.put(2, later)
    wait_until(lambda: time.monotonic() > writer._next_group)
    journal.more.set()
    wait_until(writer._queue.empty)
    assert writer.durable == 0
    journal.gate.set()
    wait_until(lambda: writer.durable == 2)
    assert journal.pulled == pulled
    writer.close()


@each("error", [JournalLostError("another has it"), RuntimeError("a bug")])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_lost_journal_is_reported(error: Exception) -> None:
    """From then on no record counts as written. The broker receives the reason why it must stop."""
    woken = threading.Event()
    writer = JournalWriter(Failing(error), woken.set)
    writer.put(1, ["a"])
    assert woken.wait(PATIENCE_S)
    assert (writer.durable, str(error) in writer.lost) == (0, True)
    writer.close()


def test_a_broker_whose_journal_is_lost_stops(link: JournalLink) -> None:
    link.writer.lost = "another has it"
    with pytest.raises(JournalLostError, match="another has it"):
        link.notify(Recording(), 0.0)


def test_closing_writes_all_pending_records(path: Path) -> None:
    """What was handed over is written before the journal is closed."""
    link = JournalLink(str(path), BrokerConfig())
    for sequence in range(1, 200):
        link.take(Write(sequence, taken(sequence)))
    link.close()
    with_again = open_journal(str(path), Opening())
    assert len(with_again.unfinished()) == 199
    with_again.close()


def test_results_expire_by_themselves(path: Path) -> None:
    """The writer looks from time to time."""
    journal = open_journal(str(path), Opening())
    writer = JournalWriter(journal, lambda: None, Keep(seconds=0.0))
    writer.put(1, [taken(1), ended(1, [5], at=journal.offset + time.monotonic() - 5)])
    writer.put(2, [taken(2)])
    reader = SqliteReader(path)
    writer._next_expiry = 0.0
    writer.put(3, [taken(3)])
    wait_until(lambda: writer.durable == 3)
    wait_until(lambda: not reader.finished(10))
    assert reader.find(2) is not None
    reader.close()
    writer.close()


@each("month_s", [30 * 86400.0, -30 * 86400.0])
def test_the_writer_has_the_time_of_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, month_s: float
) -> None:
    """At any wall clock, an old result expires and a young one stays. A writer that ends records the time."""
    path = tmp_path / "broker.journal"
    journal, set_to = open_journal(str(path), Opening()), time.time() + month_s
    monkeypatch.setattr(time, "time", lambda: set_to)
    began = journal.offset + time.monotonic()
    writer = JournalWriter(journal, lambda: None, Keep(seconds=3600.0))
    writer.put(1, [taken(1), ended(1, [5], at=began - 3601.0), taken(2), ended(2, [5], at=began)])
    reader = SqliteReader(path)
    wait_until(lambda: [one.job_id for one in reader.finished(10)] == [2], limit_s=10.0)
    reader.close()
    ended_at = journal.offset + time.monotonic()
    writer.close()
    other_boot = open_journal(str(path), Opening(clocks=Clocks(0.0, 0.0, MachineClock("another boot", 0.0))))
    assert ended_at <= other_boot.offset <= journal.offset + time.monotonic()
    other_boot.close()


class Shared(Failing):
    """A journal of two brokers."""

    address, epoch = "shared", 0

    def renew(self) -> tuple[str, ...]:
        return ("tcp://a:1", "tcp://b:2")

    def reader(self) -> Any:
        return SimpleNamespace(close=lambda: None)


def test_a_broker_that_starts_knows_the_others_before_its_first_client(
    monkeypatch: pytest.MonkeyPatch, free_address: str
) -> None:
    """Else it would tell a client that a job of another broker does not exist."""
    monkeypatch.setattr(links, "open_journal", lambda *_: Shared())
    loop = BrokerLoop(BrokerConfig(bind=free_address, journal="shared"))
    assert loop.broker.state.brokers == ("tcp://a:1", "tcp://b:2")
    loop.close()


def test_a_broker_that_stood_still_knows_it(monkeypatch: pytest.MonkeyPatch, free_address: str) -> None:
    """It says so before it handles anything that came meanwhile."""
    loop = BrokerLoop(BrokerConfig(bind=free_address, journal="none"))
    pauses = list[float]()
    monkeypatch.setattr(loop.broker, "stood_still", lambda seconds, now: pauses.append(seconds))
    loop.turn()
    assert pauses == []
    loop._turned -= 60.0
    loop.turn()
    loop.close()
    assert pauses == [pytest.approx(60.0, abs=5.0)]
