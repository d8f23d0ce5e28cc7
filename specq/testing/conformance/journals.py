"""The conformance suite of journals."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from specq.journal import EPOCHS, Clocks, Crashes, JobCrashed, JobDropped, Journal, MachineClock, Noted, Opening
from specq.protocol import ConfigError, JournalLostError
from specq.testing.fake_journal import FakeJournal, added, ended, groups, history, plain, taken

Open = Callable[..., Journal]


def tokens_of(journal: Journal) -> list[int]:
    """Return the tokens of the only unfinished job."""
    (job,) = journal.unfinished()
    return [*map(int, np.frombuffer(job.token_ids, "<i4"))]


def take_over_and_go_on(open_it: Open) -> None:
    """Freeze a first owner, let a second take over, then let the first write."""
    first = open_it(owner="the first")
    first.write([taken(1)])
    second = open_it(owner="the second", take_over=True)
    second.write([added(1, 0, [1, 2])])
    with pytest.raises(JournalLostError, match="another broker"):
        first.write([added(1, 0, [3])])
    with pytest.raises(JournalLostError):
        first.renew()
    assert tokens_of(second) == [1, 2]
    with pytest.raises(ConfigError, match="the second"):  # the former owner does not hide the new one
        open_it(owner="a third")
    first.close()
    with pytest.raises(ConfigError, match="the second"):
        open_it(owner="a third")
    second.renew()
    second.close()
    open_it().close()


class _Opens:
    """Needs the fixture `make_journal`: from an `Opening`, a journal at an address that is new for the test."""

    @pytest.fixture
    def open_it(self, make_journal: Callable[[Opening], Journal]) -> Iterator[Open]:
        """Open journals, and close them at the end unless the test has done so."""
        opened: list[Journal] = []

        def open_it(**options: Any) -> Journal:
            opened.append(make_journal(Opening(**options)))
            return opened[-1]

        yield open_it
        for journal in opened:
            journal.close()


class JournalConformance(_Opens):
    """What every kind must do."""

    @pytest.mark.parametrize("seed", range(10))
    @pytest.mark.parametrize("durability", ["full", "process"])
    def test_it_holds_what_was_written(self, open_it: Open, seed: int, durability: str) -> None:
        """In groups of any size, it holds the same as the strict test journal, also after reopening."""
        rng, fake = random.Random(seed), FakeJournal()
        journal = open_it(durability=durability)
        for group in groups(rng, history(rng)):
            fake.write(group)
            journal.write(group)
        assert journal.unfinished() == fake.unfinished() != []
        journal.close()
        again = open_it()
        assert again.unfinished() == fake.unfinished()
        reader = again.reader()
        for job_id in range(14):
            assert plain(reader.find(job_id)) == plain(fake.find(job_id))
        summaries = reader.finished(100)
        assert [one.job_id for one in summaries] == [
            job.submit.job_id for job in sorted(fake.jobs.values(), key=lambda job: -job.ended) if job.finish
        ]
        assert [one.num_tokens for one in summaries] == [fake.jobs[one.job_id].num_tokens for one in summaries]
        assert reader.finished(2, 1) == summaries[1:3] == reader.finished(2, 1, "owner")
        assert reader.finished(2, 1, "another") == []
        running = [(job.submit.job_id, job.num_tokens, job.submitted) for job in fake.unfinished()]
        assert [(one.job_id, one.num_tokens, one.submitted) for one in reader.unfinished(100)] == running
        assert [one.job_id for one in reader.unfinished(1)] == [job_id for job_id, *_ in running[:1]]
        assert {one.finish for one in reader.unfinished(100, "owner")} == {""}
        assert reader.unfinished(100, "another") == []
        reader.close()

    def test_an_id_that_comes_again_begins_anew(self, open_it: Open) -> None:
        """An earlier job with the same id leaves no traces, whether it was dropped, or ended and expired."""
        journal = open_it()
        journal.write([taken(1), added(1, 0, [1, 2])])
        journal.write([added(1, 2, [3]), JobDropped(1), taken(1), added(1, 0, [7])])
        assert tokens_of(journal) == [7]
        journal.write([ended(1, [7, 8])])
        assert journal.keep_to(0, 1e9).num_forgotten == 1
        journal.write([taken(1), added(1, 0, [9])])
        assert tokens_of(journal) == [9]

    def test_crashes_of_a_job_are_kept(self, open_it: Open) -> None:
        """The last record counts. A job without a record has no crashes."""
        journal = open_it()
        journal.write([taken(1), taken(2), JobCrashed(1, Crashes(1, 0, 5)), JobCrashed(1, Crashes(2, 1, 9))])
        journal.close()
        assert {job.submit.job_id: job.crashes for job in open_it().unfinished()} == {
            1: Crashes(2, 1, 9),
            2: Crashes(),
        }

    def test_writing_tokens_twice_is_idempotent(self, open_it: Open) -> None:
        """Tokens count by position, also in other groups."""
        journal = open_it()
        journal.write([taken(1), added(1, 0, [1, 2])])
        for base_len, tokens in ((0, [1, 2]), (2, [3]), (0, [1, 2]), (2, [3])):
            journal.write([added(1, base_len, tokens)])
        assert tokens_of(journal) == [1, 2, 3]

    def test_a_failed_group_write_leaves_no_records(self, open_it: Open) -> None:
        """The records before the failed one are not there, and the journal continues."""
        journal = open_it()
        journal.write([taken(1), added(1, 0, [1])])
        with pytest.raises(TypeError):
            journal.write([taken(2), added(1, 1, [2]), ended(1, [1, 2])._replace(stats={"no": object()})])
        assert tokens_of(journal) == [1]
        journal.write([added(1, 1, [5])])
        assert tokens_of(journal) == [1, 5]

    def test_results_are_forgotten_by_age_then_by_size(self, open_it: Open) -> None:
        """The oldest go first. Unfinished jobs stay, and then the journal reports that it is full."""
        journal = open_it()
        journal.write([taken(100)])
        for job_id in range(1, 11):
            journal.write([taken(job_id), ended(job_id, list(range(2000)), at=float(job_id))])
        assert journal.keep_to(1 << 40) == (0, False)
        assert journal.keep_to(1 << 40, 4.0) == (3, False)
        reader = journal.reader()
        assert [one.job_id for one in reader.finished(100)] == list(range(10, 3, -1))
        assert (reader.find(3), reader.find(100) is not None) == (None, True)
        num_forgotten = 0
        while not (kept := journal.keep_to(0)).is_full:
            num_forgotten += kept.num_forgotten
        assert (num_forgotten, reader.finished(100)) == (7, [])
        assert [job.submit.job_id for job in journal.unfinished()] == [100]
        reader.close()

    def test_free_room_is_given_back_until_there_is_none(self, open_it: Open) -> None:
        """It happens step by step, without loss of data."""
        journal = open_it()
        journal.write([taken(100), added(100, 0, [7])])
        for job_id in range(1, 31):
            journal.write([taken(job_id), ended(job_id, list(range(20_000)))])
        while not journal.keep_to(0).is_full:
            pass
        for _ in range(10_000):
            if not journal.give_back(0, idle=True):
                break
        assert not journal.give_back(0, idle=True)
        assert tokens_of(journal) == [7]

    def test_a_reader_sees_what_is_written_while_it_is_open(self, open_it: Open) -> None:
        """It never waits, and an owner that closes the journal does not disturb it."""
        journal = open_it()
        reader = journal.reader()
        assert (reader.find(1), reader.finished(10)) == (None, [])
        journal.write([taken(1)])
        journal.write([added(1, 0, [4]), ended(1, [4])])
        journal.close()
        found = reader.find(1)
        assert found is not None
        assert (found.finish, found.num_tokens) == ("length", 1)
        reader.close()


class OneBrokerConformance(_Opens):
    """What a kind for one broker must do: its time, which the journal notes, and its ownership."""

    def test_its_time_goes_on(self, open_it: Open) -> None:
        """It follows the machine's uptime, or the last note after a reboot, and ignores the wall clock."""
        journal = open_it(clocks=Clocks(100.0, 1e9, MachineClock("a", 200.0)))
        assert journal.offset == 1e9 - 100.0
        journal.note_time(Noted(1e9 + 50.0, MachineClock("a", 250.0)))
        journal.close()
        again = open_it(clocks=Clocks(7.0, 2e9, MachineClock("a", 1000.0)))
        assert again.offset == 1e9 + 50.0 + 750.0 - 7.0
        again.close()
        after = open_it(clocks=Clocks(20.0, 5e8, MachineClock("b", 5000.0)))
        assert after.offset == 1e9 + 800.0 - 20.0

    def test_no_stored_time_is_later_than_its_own(self, open_it: Open) -> None:
        """Such times come from elsewhere. They are corrected, and keep their order."""
        journal = open_it(clocks=Clocks(0.0, 1e9, MachineClock("a", 0.0)))
        journal.write([taken(job_id, 2e9 + job_id) for job_id in (1, 2, 3, 4)])
        journal.write([ended(3, [5], at=3e9), ended(1, [5], at=3e9 + 1)])
        journal.close()
        again = open_it(clocks=Clocks(10.0, 1e9, MachineClock("a", 10.0)))
        second, fourth = again.unfinished()
        assert (second.submit.job_id, fourth.submit.job_id) == (2, 4)
        assert second.submitted <= fourth.submitted <= 1e9 + 10.0
        assert second.deadline == 1e9 + 10.0 + (7.5 - 2e9 - 2)
        reader = again.reader()
        assert [one.job_id for one in reader.finished(9)] == [1, 3]
        assert all(one.ended <= 1e9 + 10.0 for one in reader.finished(9))
        reader.close()

    def test_one_broker_owns_it(self, open_it: Open) -> None:
        """A second broker is refused with the name of the first, and accepted when the first is gone."""
        first = open_it(owner="process 7")
        with pytest.raises(ConfigError, match=r"in use by another broker \(process 7\).*--take-over"):
            open_it()
        first.renew()
        first.close()
        open_it().close()

    def test_a_frozen_owner_is_shut_out(self, open_it: Open) -> None:
        """A broker that takes over raises the fence. The former owner cannot write any more."""
        take_over_and_go_on(open_it)

    def test_epochs_rise_with_each_owner(self, open_it: Open) -> None:
        """They are above all possible epochs of earlier owners, and above the floor."""
        epochs = []
        for floor in (0, 10 * EPOCHS, 0):
            journal = open_it(floor=floor)
            epochs.append(journal.epoch)
            journal.close()
        assert epochs == [0, 10 * EPOCHS, 11 * EPOCHS]
