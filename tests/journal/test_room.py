"""A journal keeps to its limit, with any content: prompts, tokens, results, or unneeded records."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from specq.broker import Broker, Find, Send, Write
from specq.broker.state.rights import REQUEST_BYTES, REQUESTS_S
from specq.journal import JobEnded, JobTaken, Opening, Record, open_journal
from specq.journal.threads import MOST_BYTES, JournalWriter, Keep
from specq.protocol import Failed, Hello, SamplingParams, Submit, decode, encode
from specq.testing import toy_info, wait_until
from specq.testing.fake_journal import added, ended, taken

MIB = 1 << 20
SLACK = 16 * MIB  # the log, and what one group adds before something is forgotten
PROMPT = np.random.default_rng(0).integers(0, 50, 65_536).astype(np.int32)  # 256 KiB
PATIENCE_S = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "broker.journal"


Start = Callable[..., JournalWriter]


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    """Start writers, which are closed at the end."""
    started: list[JournalWriter] = []

    def start(limit: int) -> JournalWriter:
        started.append(
            JournalWriter(open_journal(str(path), Opening(durability="process")), lambda: None, Keep(num_bytes=limit))
        )
        return started[-1]

    yield start
    for writer in started:
        writer.close()


def large(job_id: int) -> JobTaken:
    params = SamplingParams(max_tokens=10)
    return JobTaken(Submit(job_id=job_id, params=params, prompt_ids=PROMPT), "owner", time.time(), 0.0)


def cancelled(job_id: int) -> JobEnded:
    return JobEnded(job_id, "cancelled", "", "", {}, time.time(), b"", b"", b"")


def on_disk(path: Path) -> int:
    """Return the bytes of the journal and its log."""
    return sum(file.stat().st_size for file in path.parent.glob(path.name + "*"))


def test_prompts_of_cancelled_jobs_count(path: Path, start: Start) -> None:
    """200 of them, 50 MiB in all: at no time is the file larger than the limit and the slack, and at rest not than the
    limit."""
    writer = start(MIB)
    for job_id in range(1, 201):
        writer.put(job_id, [large(job_id), cancelled(job_id)])
        wait_until(lambda last=job_id: writer.durable == last)
        assert on_disk(path) <= MIB + SLACK
    wait_until(lambda: on_disk(path) <= 2 * MIB)
    assert writer.full == ""


def test_a_backlog_is_written_in_bounded_groups(path: Path, start: Start) -> None:
    """What has come in while the disk was slow is not one transaction: between two groups, what is too much goes."""
    writer = start(MIB)
    records: list[Record] = [record for i in range(1, 201) for record in (large(i), cancelled(i))]
    writer.put(1, records)
    wait_until(lambda: on_disk(path) > 0 and writer.durable == 1)
    assert writer.num_groups >= 50 * MIB // MOST_BYTES
    wait_until(lambda: on_disk(path) <= 2 * MIB)


def test_tokens_of_ended_jobs_count_for_compaction(path: Path, start: Start) -> None:
    """Rounds of jobs that ended go before they are many, where they are large."""
    writer = start(MIB)
    for job_id in range(1, 101):
        rounds: list[Record] = [added(job_id, 1000 * i, list(range(1000))) for i in range(10)]
        writer.put(2 * job_id - 1, [taken(job_id), *rounds])
        wait_until(lambda last=2 * job_id - 1: writer.durable == last)
        writer.put(2 * job_id, [ended(job_id, list(range(10)))])
    wait_until(lambda: writer.durable == 200)
    wait_until(lambda: on_disk(path) <= 2 * MIB)


def test_unfinished_jobs_are_never_dropped(path: Path, start: Start) -> None:
    """If they alone exceed the limit, the broker is notified. Once they end, it is notified that there is room."""
    writer = start(MIB)
    for job_id in range(1, 21):
        writer.put(job_id, [large(job_id)])
    wait_until(lambda: writer.full and writer.durable == 20)
    assert "have not ended" in writer.full
    reading = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    assert reading.execute("SELECT count(*) FROM active JOIN jobs USING (job_id)").fetchone() == (20,)
    writer.put(21, [cancelled(job_id) for job_id in range(1, 21)])
    wait_until(lambda: not writer.full)
    wait_until(lambda: on_disk(path) <= 2 * MIB)


@pytest.fixture
def broker() -> Broker:
    """One with a verifier."""
    broker = Broker(incarnation=1, has_journal=True)
    hello = Hello(role="target", name="v", incarnation=1, model=toy_info(), endpoint="x", max_sessions=8)
    broker.from_front(b"v", encode(hello), 0.0)
    return broker


def test_a_full_journal_takes_no_new_jobs(broker: Broker) -> None:
    """They are refused with the reason; those that run go on, and so do new ones when there is room again."""
    assert isinstance(submit(broker, 1), int)
    broker.filled("the jobs that have not ended take up all 1 MB of the journal", 0.0)
    refused = submit(broker, 2)
    assert isinstance(refused, Failed)
    assert (refused.code, "take up all 1 MB of the journal; try again" in refused.reason) == ("busy", True)
    assert list(broker.state.jobs.active) == [1]
    broker.filled("", 0.0)
    assert isinstance(submit(broker, 2), int)


def submit(broker: Broker, job_id: int) -> Failed | int:
    """Submit a job; return why it was refused, or the number of what is journaled of it."""
    message = Submit(job_id=job_id, params=SamplingParams(max_tokens=5), prompt_ids=np.array([5], np.int32))
    effects = broker.from_front(b"c", encode(message), 0.0)
    (find,) = [effect for effect in effects if isinstance(effect, Find)]
    effects = broker.found(find.job_id, None, 0.0)
    failed = [decode(e.frames) for e in effects if isinstance(e, Send) and e.to == b"c"]
    return failed[0] if failed else max(effect.sequence for effect in effects if isinstance(effect, Write))


def test_a_file_that_is_too_large_shrinks(path: Path, start: Start) -> None:
    """One that a broker with another limit left, also if it was made without the means to give pages back."""
    raw = sqlite3.connect(path)
    raw.execute("CREATE TABLE x (y)")
    raw.execute("DROP TABLE x")
    raw.close()
    assert sqlite3.connect(path).execute("PRAGMA auto_vacuum").fetchone() == (0,)
    journal = open_journal(str(path), Opening(durability="process"))
    for job_id in range(1, 101):
        journal.write([large(job_id), cancelled(job_id)])
    journal.close()
    assert on_disk(path) > 25 * MIB
    writer = start(MIB)
    writer.put(1, [taken(1000)])
    wait_until(lambda: on_disk(path) <= 2 * MIB)


@pytest.mark.slow
def test_submit_and_cancel_at_the_permitted_rate_keeps_to_the_limit(path: Path, start: Start) -> None:
    """As many bytes a second as the broker takes of one key, for a while; small commits meanwhile are hardly
    delayed."""
    limit, num_jobs = 4 * MIB, 0
    writer, began, most, waited = start(limit), time.monotonic(), 0, [0.0]
    per_s = REQUESTS_S * REQUEST_BYTES / PROMPT.nbytes
    while (elapsed := time.monotonic() - began) < 4.0:
        while num_jobs < per_s * elapsed:
            num_jobs += 1
            writer.put(num_jobs, [large(num_jobs), cancelled(num_jobs)])
        handed_over = time.monotonic()
        wait_until(lambda last=num_jobs: writer.durable >= last)
        waited.append(time.monotonic() - handed_over)
        most = max(most, on_disk(path))
    assert num_jobs > 200
    assert most <= limit + SLACK
    assert float(np.median(waited)) < 0.1


def test_the_broker_lets_no_more_in_than_that(broker: Broker) -> None:
    """What is beyond the rate of one key is dropped, so that no more reaches the journal."""
    message, num_taken = encode(Submit(job_id=1, params=SamplingParams(max_tokens=5), prompt_ids=PROMPT)), 0
    for number in range(4000):
        effects = broker.from_front(b"c", message, number / 400)
        num_taken += any(isinstance(effect, Find) for effect in effects)
        broker.found(1, None, number / 400)
    assert num_taken * PROMPT.nbytes <= 1.05 * (10.0 + 4.0) * REQUESTS_S * REQUEST_BYTES
