"""Grammars in the broker's journal: stored with a job, malformed by now, counted in groups of records."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from specq.broker import Broker
from specq.journal import JobTaken, Opening, StoredJob, open_journal
from specq.journal.threads import _ends
from specq.protocol import (
    CAPABILITIES,
    Open,
    SamplingParams,
    Submit,
)
from specq.protocol.grammars import grammar_text
from tests.broker.desk import Desk
from tests.broker.grammar_jobs import IDS, MASKING, SCHEMA, opened, wait
from tests.each import each

# --- the journal ------------------------------------------------------------------------------------------------------


def journal_of(path: Path, *jobs: Submit) -> list[StoredJob]:
    """Write jobs to a journal, and read them as a broker does that starts again."""
    with_owner = Opening(owner="first")
    journal = open_journal(str(path), with_owner)
    journal.write([JobTaken(job, "", 1.0, 0.0) for job in jobs])
    journal.close()
    journal = open_journal(str(path), with_owner)
    stored = journal.unfinished()
    journal.close()
    return stored


def a_job(job_id: int, grammar: str = SCHEMA) -> Submit:
    params = SamplingParams(max_tokens=9, grammar=grammar)
    return Submit(job_id=job_id, model="toy", params=params, prompt_ids=IDS)


def test_a_stored_job_keeps_its_grammar_and_is_placed_by_the_same_rules(tmp_path: Path) -> None:
    stored = journal_of(tmp_path / "journal", a_job(1))
    assert [one.submit.params.grammar for one in stored] == [SCHEMA]
    desk = Desk(capabilities=CAPABILITIES, has_journal=True)
    desk.broker.restore(stored, desk.now)
    wait(desk, 5)
    assert opened(desk) == []
    desk.hello(b"new", capabilities=MASKING)
    assert opened(desk) == [(b"new", 1)]
    (message,) = desk.received(b"new", Open)
    assert message.params.grammar == SCHEMA


@each("grammar", ['{"ebnf":"x"}', '{"regex":""}', "[", '{"json_schema":{},"strict":1}'])
def test_a_stored_grammar_that_is_malformed_by_now_fails_at_the_start(tmp_path: Path, grammar: str) -> None:
    """With the reason. It never runs without its grammar."""
    path = tmp_path / "journal"
    stored = journal_of(path, replace(a_job(1), params=replace(a_job(1).params, grammar=grammar)))
    broker = Broker(incarnation=1, has_journal=True)
    broker.restore(stored, 0.0)
    job = broker.state.jobs.finished[1]
    assert job.transcript.failure is not None
    assert (job.transcript.finish, job.transcript.failure.code) == ("error", "invalid")
    assert "its values are out of bounds: grammar" in job.transcript.failure.reason


def test_groups_of_records_count_the_grammars() -> None:
    """A group of the journal is at most 4 MiB, whatever its jobs consist of."""
    long = grammar_text({"regex": "a" * 60_000})
    records = [JobTaken(a_job(job_id, long), "", 0.0, 0.0) for job_id in range(100)]
    assert max(end - start for start, end in pairwise([0, *_ends(records)])) < 75
