"""Several brokers in one PostgreSQL journal: leases, takeovers, fences, epochs, and ids that exist once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from specq.journal import EPOCHS, Crashes, JobBound, JobCrashed, JobDropped, Opening
from specq.journal.postgres import functions, schema, store
from specq.journal.postgres.store import PostgresJournal
from specq.protocol import ConfigError
from specq.testing import wait_until
from specq.testing.fake_journal import added, ended, taken
from tests.journal.cluster import Database, ids, texts

pytestmark = pytest.mark.cluster

Open = Callable[..., store.PostgresJournal]


def before_group(journal: store.PostgresJournal, action: Callable[[], Any]) -> None:
    """Let something happen once, when the journal is about to send a group."""
    send = journal._session.send

    def frozen(statement: str, values: Any) -> None:
        journal._session.send = send
        action()
        send(statement, values)

    journal._session.send = frozen


def take_over_while_frozen(open_it: Open, database: Database, patch: pytest.MonkeyPatch) -> None:
    """Freeze a broker after its decision to write. Meanwhile another one takes two of its three jobs."""
    patch.setattr(store, "MOST_TAKEN", 2)
    first, second = open_it(), open_it()
    first.write([taken(1), taken(3, 2.0), taken(2, 3.0), JobBound(1, "w"), added(1, 0, [1, 2])])

    def take_over() -> None:
        database.expire(first)
        assert ids(second.take()) == [1, 3]
        assert second.write([added(1, 2, [7])]) == frozenset()

    before_group(first, take_over)
    group = [added(1, 2, [3]), JobBound(1, "x"), JobCrashed(1, Crashes(9, 9, 9)), ended(3, [4]), added(2, 0, [5])]
    assert first.write([*group, taken(4)]) == {1, 3}
    assert texts(second) == {1: [1, 2, 7], 2: [5], 3: [], 4: []}
    assert [(job.weights, job.crashes) for job in second.unfinished()[:1]] == [("w", Crashes())]
    assert first.write([JobDropped(3), added(2, 1, [6])]) == {3}
    assert texts(second) == {1: [1, 2, 7], 2: [5, 6], 3: [], 4: []}


def test_a_frozen_broker_loses_its_jobs_and_writes_the_others(
    open_it: Open, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records of the lost jobs are left out, and all others are written."""
    take_over_while_frozen(open_it, database, monkeypatch)


def test_planted_check_before_the_transaction_is_caught(
    open_it: Open, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker asks which jobs it holds, and the transaction believes it."""
    unfenced = functions.FUNCTIONS.replace("a.broker = p_broker", "true").replace("AND broker = p_broker", "")
    assert unfenced.count("p_broker") < functions.FUNCTIONS.count("p_broker") - 4
    monkeypatch.setattr(store, "prepare", partial(schema.prepare, steps=(schema.TABLES + unfenced, *schema.STEPS[1:])))
    write = store.PostgresJournal.write

    def checked(self: store.PostgresJournal, records: list[Any]) -> frozenset[int]:
        held = {job_id for job_id, number in database.holders().items() if number == self._number}
        held |= {record.job_id for record in records if hasattr(record, "submit")}
        lost = frozenset(record.job_id for record in records) - held
        return lost | write(self, [record for record in records if record.job_id in held])

    monkeypatch.setattr(store.PostgresJournal, "write", checked)
    with pytest.raises(AssertionError):
        take_over_while_frozen(open_it, database, monkeypatch)


def test_a_group_waits_for_a_taker_and_sees_what_it_did(open_it: Open, database: Database) -> None:
    """The taker's transaction is open when the group arrives."""
    first, second = open_it(), open_it()
    first.write([taken(1), taken(2)])
    results: list[frozenset[int]] = []
    with database.server.connect(database.name) as other:
        other.execute("BEGIN")
        other.execute(f"SELECT FROM specq.brokers WHERE number = {first._number} FOR UPDATE".encode())
        other.execute(f"UPDATE specq.active SET broker = {second._number} WHERE job_id = 1".encode())
        writer = threading.Thread(target=lambda: results.append(first.write([added(1, 0, [1]), added(2, 0, [2])])))
        writer.start()
        wait_until(lambda: database.run("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'") != [])
        other.execute("COMMIT")
    writer.join(60)
    assert results == [{1}]
    assert texts(second) == {1: [], 2: [2]}


def check_epochs(open_it: Open, database: Database) -> None:
    """A job goes from the older broker to the younger one, and back."""
    older, younger = open_it(floor=5 * EPOCHS), open_it()
    assert younger.epoch >= older.epoch + EPOCHS >= 6 * EPOCHS
    older.write([taken(1)])
    epochs = [older.epoch]
    for loser, taker in ((older, younger), (younger, older), (older, younger)):
        database.expire(loser)
        (job,) = taker.take()
        epochs.append(job.epoch)
    for before, after in pairwise(epochs):
        assert after >= before + EPOCHS
    assert len({*epochs, younger.epoch}) == 5


def test_a_taker_has_the_higher_epoch(open_it: Open, database: Database) -> None:
    """It comes from the journal, so it does not matter which broker is older."""
    check_epochs(open_it, database)


def test_planted_epoch_of_the_broker_is_caught(
    open_it: Open, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each broker would use its own epochs for jobs that it takes."""
    own = functions.FUNCTIONS.replace("epoch = number.number << 32", "epoch = p_broker << 32")
    monkeypatch.setattr(store, "prepare", partial(schema.prepare, steps=(schema.TABLES + own, *schema.STEPS[1:])))
    with pytest.raises(AssertionError):
        check_epochs(open_it, database)


def test_an_id_exists_once(open_it: Open, database: Database) -> None:
    """Over all brokers, from the time when it is taken until its result is forgotten."""
    first, second = open_it(), open_it()
    assert first.write([taken(1), taken(2)]) == frozenset()
    assert second.write([taken(1), added(1, 0, [9]), taken(3)]) == {1}
    assert first.write([ended(1, [5]), JobDropped(2)]) == frozenset()
    assert second.write([taken(1), ended(1, [6]), taken(2)]) == {1}
    assert first.write([taken(1), taken(2), taken(3)]) == {1, 2, 3}
    assert second.keep_to(1 << 40, 1e9).num_forgotten == 1
    assert first.write([taken(1)]) == frozenset()
    assert (texts(first), database.holders()) == (
        {1: [], 2: [], 3: []},
        {1: first._number, 2: second._number, 3: second._number},
    )


def test_two_brokers_take_an_id_at_the_same_time(open_it: Open, database: Database) -> None:
    """The second one waits for the first one's transaction, and is refused."""
    journal = open_it()
    columns = "job_id, owner, tenant, cache_salt, label, model, params, speculation, priority, submitted, deadline"
    refused: list[frozenset[int]] = []
    with database.server.connect(database.name) as other:
        other.execute("BEGIN")
        other.execute(
            f"INSERT INTO specq.jobs ({columns}, prompt_ids) "
            "VALUES (1, '', '', '', '', '', '{}', '{}', 0, 0, 0, '')".encode()
        )
        writer = threading.Thread(target=lambda: refused.append(journal.write([taken(1), taken(2)])))
        writer.start()
        wait_until(lambda: database.run("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'") != [])
        other.execute("COMMIT")
    writer.join(60)
    assert refused == [{1}]
    assert database.holders() == {2: journal._number}


def test_dropped_ids_are_free(open_it: Open) -> None:
    """For the same broker at once, also within a group."""
    journal = open_it()
    journal.write([taken(1), added(1, 0, [1])])
    assert journal.write([JobDropped(1)]) == frozenset()
    assert journal.write([taken(1), JobDropped(1), taken(1), added(1, 0, [2])]) == frozenset()
    assert journal.write([JobDropped(5), taken(5), taken(6), JobDropped(6)]) == frozenset()
    assert texts(journal) == {1: [2], 5: []}


def test_brokers_know_each_other(open_it: Open, database: Database) -> None:
    """By their addresses, while they live. A job that is looked up has its holder's."""
    first, second = open_it(address="tcp://a:1"), open_it(address="tcp://b:2")
    first.write([taken(1)])
    reader = second.reader()
    assert first.renew() == second.renew() == ("tcp://a:1", "tcp://b:2")
    assert reader.find(1).holder == "tcp://a:1"
    database.expire(first)
    assert (reader.find(1).holder, second.renew()) == ("", ("tcp://b:2",))
    assert first.renew() == ("tcp://a:1", "tcp://b:2")  # nobody took its jobs
    assert (first.write([added(1, 0, [1])]), second.take()) == (frozenset(), [])
    first.close()
    assert second.renew() == ("tcp://b:2",)
    assert ids(second.take()) == [1]
    assert reader.find(1).holder == "tcp://b:2"
    reader.close()


def test_jobs_lost_while_the_lease_was_late_are_found(
    open_it: Open, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the broker that wakes, though it writes nothing for them. Each is found once."""
    first, second = open_it(), open_it()
    first.write([taken(1), taken(2), taken(3)])
    first.renew()
    assert first.lost() == frozenset()
    first.write([ended(2, [])])
    database.expire(first)
    assert ids(second.take()) == [1, 3]
    monkeypatch.setattr(first, "_sure_until", 0.0)  # it was frozen
    first.renew()
    assert (first.lost(), first.lost()) == ({1, 3}, frozenset())
    assert first.write([taken(4)]) == frozenset()
    database.run(f"DELETE FROM specq.brokers WHERE number = {first._number}")
    database.run("UPDATE specq.active SET broker = NULL WHERE job_id = 4")
    first.renew()
    assert first.lost() == {4}


def test_a_broker_whose_row_is_gone_goes_on(open_it: Open, database: Database) -> None:
    """It held no jobs any more. It has a new number, and takes new jobs."""
    first, second = open_it(), open_it()
    first.write([taken(1)])
    number = first._number
    database.run(f"UPDATE specq.brokers SET until = now() - interval '2 min' WHERE number = {number}")
    assert ids(second.take()) == [1]
    assert second.take() == []
    assert database.run(f"SELECT 1 FROM specq.brokers WHERE number = {number}") == []
    assert first.write([added(1, 0, [1]), taken(2)]) == {1}
    assert first._number > second._number
    assert database.holders() == {1: second._number, 2: first._number}
    database.run(f"DELETE FROM specq.brokers WHERE number = {first._number}")
    assert first.renew() == ()
    assert first._number > number


def test_a_broker_that_starts_again_takes_its_jobs_at_once(open_it: Open) -> None:
    """Two brokers cannot listen on one address, so the former one is gone, or is fenced."""
    former = open_it(address="tcp://a:1")
    other = open_it()
    former.write([taken(1)])
    other.write([taken(2)])
    again = open_it(address="tcp://a:1")
    assert ids(again.take()) == [1]
    assert former.write([added(1, 0, [1])]) == {1}
    assert ids(open_it().take()) == []


def test_takers_share_the_jobs(open_it: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest jobs come first, with all that is known of them."""
    monkeypatch.setattr(store, "MOST_TAKEN", 2)
    first = open_it()
    first.write([*(taken(job_id, 10.0 - job_id) for job_id in range(1, 6)), JobBound(5, "w", 77), added(5, 0, [1, 2])])
    before = {job.submit.job_id: job for job in first.unfinished()}
    first.close()
    second, third = open_it(), open_it()
    found = [second.take(), third.take(), second.take(), third.take()]
    assert list(map(ids, found)) == [[5, 4], [3, 2], [1], []]
    (fifth, _), *_ = found
    fifth.epoch = 0
    assert fifth == before[5]
    assert texts(third)[5] == [1, 2]


def test_an_unreadable_job_is_left_alone(open_it: Open, database: Database) -> None:
    """A later specq wrote it. Another broker may be able to read it."""
    first = open_it()
    first.write([taken(1), taken(2)])
    first.close()
    database.run("UPDATE specq.jobs SET params = '{\"wishes\": 3}' WHERE job_id = 1")
    second = open_it()
    assert (ids(second.take()), second.take()) == ([2], [])
    assert database.holders() == {1: None, 2: second._number}
    database.run("UPDATE specq.jobs SET params = '{}'")
    assert ids(open_it().take()) == [1]


def test_tokens_behind_a_gap_are_deleted(open_it: Open, database: Database) -> None:
    """A database that lost a group gives the tokens before it, and does not mix later ones in."""
    first = open_it()
    first.write([taken(1)])
    for base_len in (0, 2, 4):
        first.write([added(1, base_len, [base_len, base_len + 1])])
    database.fold()
    database.run("DELETE FROM specq.folded WHERE base_len = 2")
    first.close()
    second = open_it()
    (job,) = second.take()
    assert job.num_tokens == 2
    assert database.run("SELECT base_len FROM specq.commits") == [(0,)]
    second.write([added(1, 2, [7, 8]), added(1, 4, [9])])
    assert texts(second) == {1: [0, 1, 7, 8, 9]}


def test_a_frozen_transaction_does_not_stop_a_taker(open_it: Open, database: Database) -> None:
    """A client of a dead broker holds its row, and sends nothing more."""
    first, second = open_it(), open_it()
    first.write([taken(1)])
    name = first._session.application
    database.expire(first)
    frozen = database.server.connect(database.name, application_name=name)
    frozen.execute("BEGIN")
    frozen.execute(b"UPDATE specq.brokers SET until = until - interval '1 h' WHERE number = %d" % first._number)
    found: list[int] = []
    wait_until(lambda: bool(found.extend(ids(second.take())) or found), 10)
    assert found == [1]
    with pytest.raises(psycopg.Error, match=r"terminat|closed"):
        frozen.execute("COMMIT")
    frozen.close()


def test_two_brokers_keep_to_the_limit(open_it: Open, database: Database) -> None:
    """Together they forget no more than one would."""
    journals = [open_it(), open_it()]
    for job_id in range(1, 41):
        journals[job_id % 2].write([taken(job_id), ended(job_id, list(range(1000)), at=float(job_id))])
    ((size,),) = database.run("SELECT sum(stored)::bigint FROM specq.brokers")
    assert size == database.run("SELECT sum(num_bytes)::bigint FROM specq.results")[0][0]
    threads = [threading.Thread(target=lambda one=one: [one.keep_to(size // 2) for _ in range(50)]) for one in journals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    left = [job_id for (job_id,) in database.run("SELECT job_id FROM specq.results ORDER BY 1")]
    assert left == list(range(21, 41))
    assert database.run("SELECT count(*) FROM specq.jobs") == [(20,)]


def test_a_written_group_renews_the_lease(database: Database) -> None:
    """A server may be so slow that renewals come late."""
    journal = PostgresJournal(database.address, Opening(address="tcp://a:1"))
    journal.write([taken(1)])
    database.run("UPDATE specq.brokers SET until = clock_timestamp() + interval '10 ms'")
    journal.write([added(1, 0, [5])])
    ((left_s,),) = database.run("SELECT extract(epoch FROM until - clock_timestamp())::float8 FROM specq.brokers")
    assert left_s > 2.0
    journal.close()


def test_a_broker_without_a_fixed_port_is_refused(database: Database) -> None:
    with pytest.raises(ConfigError, match=r"broker\.bind has no fixed port"):
        PostgresJournal(database.address, Opening(address="tcp://127.0.0.1:*"))
