"""The store: files, quotas, leases, ages; each call on a real file."""

from __future__ import annotations

import stat
from dataclasses import replace

import pytest

from specq.batches import BatchStoreError, LineResult, SqliteBatches
from specq.batches import interface as limits_of
from specq.batches.lines import LineReason
from specq.batches.sqlite_files import PART
from specq.batches.threads import open_store
from specq.protocol import ConfigError
from tests.batches.scene import LIMITS, new
from tests.each import each


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "b.batches"


@pytest.fixture
def places(path):
    """Where the stores of a test are, by kind."""

    def place(kind):
        if kind == "sqlite":
            return path
        from tests.journal.cluster import running  # imports psycopg

        return running().new_database().address

    return place


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.cluster)])
def place(request, places):
    return places(request.param)


@pytest.fixture
def store(place):
    one = open_store(place, LIMITS)
    yield one
    one.close()


@pytest.fixture
def file_store(path):
    one = SqliteBatches(path, LIMITS)
    yield one
    one.close()


def upload(store, data=b"abc", owner="alice", keep_s=100.0, name="x"):
    number = store.new_file(owner, name, 60)
    for place, start in enumerate(range(0, len(data), 1 << 16)):
        store.append(number, place, data[start : start + (1 << 16)])
    return store.finish_file(number, name, keep_s)


def content(store, number):
    found, place = b"", -1
    while chunk := store.chunk(number, place):
        place, data = chunk
        found += data
    return found


def advance(store, seconds):
    store._clock._offset += seconds


def tidy(store):
    for _ in range(100):
        if not store.tidy():
            return
    raise AssertionError("it never ends")


def refused(code, call, *arguments):
    with pytest.raises(BatchStoreError) as caught:
        call(*arguments)
    assert caught.value.code == code


def started(store, owner="alice", holder="h", total=3):
    batch = store.new_batch(new(owner), upload(store, owner=owner))
    store.claim(holder)
    return store.begin_batch(batch.number, holder, total)


def result(number, outcome="completed"):
    return LineResult(number, outcome, f"{outcome} {number}\n".encode())


def test_a_file_is_private_to_the_user(file_store, path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0


def test_files(store):
    data = bytes(range(256)) * 600
    file = upload(store, data, name="../a")
    assert (file.num_bytes, file.name, file.purpose) == (len(data), "../a", "batch")
    assert content(store, file.number) == data
    assert store.find_file("alice", file.id) == file
    assert store.find_file("bob", file.id) is None
    assert file.expires_at == file.created + 100


def test_an_upload_is_hidden_until_its_end(store):
    number = store.new_file("alice", "x", 60)
    store.append(number, 0, b"abc")
    assert store.list_files("alice", 10) == []
    assert store.finish_file(number, "x", 10).number == number


def test_lists(store):
    files = [upload(store, owner=owner) for owner in ("alice", "bob", "alice", "alice")]
    mine = [files[0], files[2], files[3]]
    assert store.list_files("alice", 10) == mine[::-1]
    assert store.list_files("alice", 1, files[3].number) == [files[2]]
    assert store.list_files("alice", 10, files[0].number, newest_first=False) == mine[1:]
    assert store.list_files("alice", 10, 0, "batch_output") == []

    batches = [store.new_batch(new(), files[0]) for _ in range(3)]
    assert [one.number for one in store.list_batches("alice", 2)] == [batches[2].number, batches[1].number]
    assert [one.id for one in store.list_batches("alice", 5, batches[1].number)] == [batches[0].id]
    assert store.list_batches("bob", 5) == []


def test_limits_of_bytes(store):
    """Of a file, of an owner, and of all, who leave a quarter for results."""
    part = bytes(LIMITS.file_bytes)
    number = store.new_file("alice", "x", 60)
    refused("too_large", store.append, number, 0, part + b"x")
    assert content(store, number) == b""
    upload(store, part)
    upload(store, part)
    refused("full", store.append, store.new_file("alice", "x", 60), 0, b"x")
    upload(store, part, "bob")
    refused("full", store.append, store.new_file("carol", "x", 60), 0, b"x")
    assert not store.is_full()


def test_deleted_files_leave_room(store):
    part = bytes(LIMITS.file_bytes)
    files = [upload(store, part) for _ in range(2)]
    assert store.hide(files[0].number)
    assert store.find_file("alice", files[0].id) is None
    while store.drop_part(files[0].number):
        pass
    assert store._used_bytes() == len(part)
    assert upload(store, part).num_bytes == len(part)


def test_a_file_of_many_chunks_is_dropped_in_parts(store):
    number = store.new_file("alice", "x", 60)
    for place in range(2 * PART + 1):
        store.append(number, place, b"x")
    assert [store.drop_part(number) for _ in range(4)] == [True, True, True, False]


def test_numbers_are_limited(store, monkeypatch):
    monkeypatch.setattr("specq.batches.sqlite_files.MOST_FILES", 2)
    monkeypatch.setattr("specq.batches.store.MOST_OPEN", 2)
    file, _ = upload(store), upload(store)
    refused("full", store.new_file, "alice", "x", 60)
    assert store.new_file("bob", "x", 60)
    for _ in range(2):
        store.new_batch(new(), file)
    refused("full", store.new_batch, new(), file)
    assert limits_of.MOST_OPEN == 100


def test_a_file_that_a_batch_reads_stays(store):
    file = upload(store)
    batch = store.new_batch(new(), file)
    assert not store.hide(file.number)
    advance(store, 1e6)
    tidy(store)
    assert content(store, file.number) == b"abc"
    store.claim("h")
    store.fail_batch(batch.number, "h", [LineReason("empty_file", "no lines")])
    tidy(store)
    assert content(store, file.number) == b""


def test_a_deleted_file_begins_no_batch(store):
    file = upload(store)
    store.hide(file.number)
    refused("full", store.new_batch, new(), file)


def test_old_files_and_broken_uploads_are_forgotten(store):
    old, new_one = upload(store, keep_s=10), upload(store, keep_s=100)
    broken = store.new_file("alice", "x", 60)
    store.append(broken, 0, b"abc")
    advance(store, 61)
    tidy(store)
    assert [content(store, number) for number in (old.number, broken, new_one.number)] == [b"", b"", b"abc"]
    refused("full", store.append, broken, 1, b"x")
    refused("full", store.finish_file, broken, "x", 10)


def test_a_batch(store):
    batch = store.new_batch(new(metadata={"a": "b"}), upload(store))
    assert (batch.status, batch.total, batch.asked.metadata) == ("validating", 0, {"a": "b"})
    assert batch.times["expires_at"] == batch.times["created_at"] + 3600
    assert store.claim("h") == [batch]
    batch = store.begin_batch(batch.number, "h", 3)
    assert (batch.status, batch.total) == ("in_progress", 3)
    store.add_results(batch.number, "h", [result(2), result(3, "failed")])
    store.add_results(batch.number, "h", [result(1)])
    assert store.list_files("alice", 10, 0, "batch_output") == []
    assert store.finalize(batch.number, "h").status == "finalizing"
    batch = store.end_batch(batch.number, "h", "completed")
    assert (batch.completed, batch.failed, batch.has_ended) == (2, 1, True)
    output, errors = (store.find_file("alice", one) for one in (batch.output_id, batch.error_id))
    assert content(store, output.number) == b"completed 1\ncompleted 2\n"
    assert content(store, errors.number) == b"failed 3\n"
    assert output.purpose == "batch_output"
    assert store.claim("h") == []


def test_a_result_is_written_once(store):
    """Also if the second one has another outcome."""
    batch = started(store)
    store.add_results(batch.number, "h", [result(1)])
    store.add_results(batch.number, "h", [result(1, "failed"), result(1), result(2)])
    assert store.done_lines(batch) == {1, 2}
    batch = store.find_batch("alice", batch.id)
    assert (batch.completed, batch.failed) == (2, 0)


def test_files_without_results_do_not_appear(store):
    batch = started(store)
    batch = store.end_batch(batch.number, "h", "expired")
    assert (batch.output_id, batch.error_id) == ("", "")
    assert [file.purpose for file in store.list_files("alice", 10)] == ["batch"]


def test_leases(store):
    """One gateway runs a batch. Another one takes it over when the first is silent, and writes of the first fail."""
    batch = started(store, holder="one")
    assert store.claim("two") == []
    advance(store, limits_of.LEASE_S - 1)
    assert [one.number for one in store.claim("one")] == [batch.number]
    advance(store, limits_of.LEASE_S - 1)
    assert store.claim("two") == []
    advance(store, 2)
    assert [one.number for one in store.claim("two")] == [batch.number]
    for call in (
        lambda: store.add_results(batch.number, "one", [result(1)]),
        lambda: store.finalize(batch.number, "one"),
        lambda: store.end_batch(batch.number, "one", "completed"),
    ):
        refused("lost", call)
    assert store.claim("one") == []
    store.add_results(batch.number, "two", [result(1)])


def test_a_holder_that_stops_leaves_its_batches(store):
    batch = started(store, holder="one")
    store.release("one")
    assert [one.number for one in store.claim("two")] == [batch.number]


@each(("status", "after"), [("validating", "cancelling"), ("in_progress", "cancelling"), ("finalizing", "finalizing")])
def test_cancelling(store, status, after):
    batch = store.new_batch(new(), upload(store))
    store.claim("h")
    if status != "validating":
        store.begin_batch(batch.number, "h", 1)
    if status == "finalizing":
        store.finalize(batch.number, "h")
    assert store.cancel_batch("bob", batch.id) is None
    assert store.cancel_batch("alice", batch.id).status == after
    assert store.finalize(batch.number, "h").status == after
    store.end_batch(batch.number, "h", "cancelled")
    assert store.cancel_batch("alice", batch.id).status == "cancelled"


def test_results_may_fill_the_store(place):
    """No result is lost to a limit. Where there is no room, no more lines begin."""
    store = open_store(place, replace(LIMITS, num_bytes=1000))
    batch = started(store)
    store.add_results(batch.number, "h", [LineResult(1, "completed", bytes(2000))])
    assert store.is_full()
    refused("full", store.append, store.new_file("bob", "x", 9), 0, b"x")
    store.close()


def test_old_batches_are_forgotten(store, monkeypatch):
    monkeypatch.setattr("specq.batches.store.MOST_ENDED", 2)
    batches = [started(store) for _ in range(4)]
    for batch in batches[:3]:
        store.end_batch(batch.number, "h", "completed")
    tidy(store)
    assert [one.number for one in store.list_batches("alice", 9)] == [one.number for one in batches[:0:-1]]
    advance(store, LIMITS.keep_s + 1)
    tidy(store)
    assert [one.number for one in store.list_batches("alice", 9)] == [batches[3].number]


def test_space_is_returned(file_store):
    store = file_store
    file = upload(store, bytes(LIMITS.file_bytes))
    other = upload(store, bytes(LIMITS.file_bytes), "bob")
    for one in (file, other):
        store.hide(one.number)
    tidy(store)
    pages, free = (store._number(f"PRAGMA {name}") for name in ("page_count", "freelist_count"))
    assert pages < 700
    assert free <= 1024


def test_opened_again(place):
    """Everything is there, and time has not gone back."""
    store = open_store(place, LIMITS)
    batch = started(store)
    store.add_results(batch.number, "h", [result(1)])
    before = store.now()
    store.close()
    again = open_store(place, LIMITS)
    assert again.find_batch("alice", batch.id).completed == 1
    assert again.done_lines(batch) == {1}
    assert -0.02 < again.now() - before < 60  # the machine's uptime counts hundredths
    again.close()


@each("data", [b"no database", b"x" * 5000])
def test_other_files_are_refused(tmp_path, data):
    path = tmp_path / "other"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"serve\.batches"):
        SqliteBatches(path, LIMITS)
    assert path.read_bytes() == data


@pytest.mark.cluster
def test_a_database_that_fails_is_busy(places):
    """The next call connects again. A call that failed in the middle has no effect."""
    place = places("postgresql")
    store = open_store(place, LIMITS)
    file = store.new_file("alice", "x", 60)
    ((process,),) = store._connection.execute("SELECT pg_backend_pid()").fetchall()
    store._connection.execute("BEGIN IMMEDIATE")
    other = open_store(place, LIMITS)
    refused("busy", other.new_file, "alice", "x", 60)
    other._connection.execute("SELECT pg_terminate_backend(?)", (process,))
    refused("busy", store.append, file, 0, b"abc")
    store.append(file, 0, b"abc")
    assert content(other, file) == b"abc"
    for one in (store, other):
        one.close()


@pytest.mark.cluster
@each(
    ("place", "reason"),
    [
        ("postgresql://u:hidden@localhost/x", "has a password"),
        ("postgresql://u@localhost:1/x", r"cannot use the store of batches postgresql://u@localhost:1/x"),
    ],
)
def test_a_database_that_cannot_be_used(place, reason):
    with pytest.raises(ConfigError, match=reason) as raised:
        open_store(place, LIMITS)
    assert "serve.batches" in str(raised.value)
    assert "hidden" not in str(raised.value)
