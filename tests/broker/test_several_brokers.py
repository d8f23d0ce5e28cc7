"""Brokers that share a journal: each job is at one of them, and moves when that one is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from specq.broker import Find, FindFinished
from specq.journal import HELD_S, LEASE_S, JobSummary
from specq.protocol.messages import (
    Accepted,
    Assign,
    Brokers,
    Cancel,
    Close,
    Failed,
    Follow,
    JobInfo,
    JobList,
    JobTokens,
    ListJobs,
    Moved,
    Open,
    Release,
    Tokens,
    Verdict,
    Welcome,
)
from specq.protocol.versions import CAPABILITIES, SEVERAL_BROKERS
from specq.testing.fake_journal import SharedJournal
from tests.broker.desk import ANN, BEN, VERIFIER, Desk, token_ids
from tests.broker.shared_journal import FIRST, SECOND, Shared, lapse, submit, two_brokers


def test_the_jobs_of_a_lost_broker_continue_at_another_one_with_their_tokens() -> None:
    journal, first, second = two_brokers()
    first.ask(ANN, submit(1))
    first.say(1, 7, 8)
    assert [job.submit.job_id for job in lapse(first, second)] == [1]
    (opened,) = second.received(VERIFIER, Open)
    assert opened.token_ids.tolist() == [5, 6, 7, 8]
    received = second.ask(ANN, submit(1, have=1))
    assert token_ids(received) == [8]
    assert token_ids(second.say(1, 9, finish="stop")) == [9]
    assert journal.fake.jobs[1].finish == "stop"


def test_no_read_is_older_than_one_before_it_at_another_broker() -> None:
    """The second broker reads a job's end in the journal before the first one knows that it is there."""
    for message in (Follow(job_id=1), submit(1)):
        journal, first, second = two_brokers()
        first.ask(ANN, submit(1))
        first.say(1, 7)
        first.verdict(1, 8, finish="stop")
        written, first.writes = first.writes, []
        journal.write(FIRST, [write.record for write in written])
        assert [one.finish for one in second.ask(BEN, Follow(job_id=1)) if isinstance(one, Tokens)] == ["stop"]
        assert first.front(BEN, message) == []
        first.take(first.broker.journaled(written[-1].sequence, first.now))
        read = [one for one in first.received(BEN) if isinstance(one, Tokens)]
        assert (token_ids(read), read[-1].finish) == ([7, 8], "stop")


def test_a_read_of_an_ending_job_does_not_wait_for_a_journal_that_is_away() -> None:
    _, first, _ = two_brokers()
    first.ask(ANN, submit(1))
    first.say(1, 7)
    first.broker.troubled("away", first.now)
    first.verdict(1, 8, finish="stop")
    assert token_ids(first.front(BEN, Follow(job_id=1))) == [7]


def test_a_read_that_waits_for_the_end_of_a_lost_job_is_sent_on() -> None:
    _, first, second = two_brokers()
    first.ask(ANN, submit(1))
    first.verdict(1, 8, finish="stop")
    assert first.front(BEN, Follow(job_id=1)) == []
    lapse(first, second)
    first.write()
    assert [one.address for one in first.received(BEN) if isinstance(one, Moved)] == [SECOND]


def test_epochs_of_a_taker_are_higher_whichever_broker_is_older() -> None:
    """A broker's own count is not enough: a broker that took jobs last has the highest one."""
    for takes in (1, 2):
        journal, *brokers = two_brokers()
        brokers = brokers if takes == 2 else brokers[::-1]
        former, taker = brokers
        former.ask(ANN, submit(1))
        for job_id in range(2, 5):  # the former broker opens sessions, also after it has lost the job
            former.ask(ANN, submit(job_id))
        epoch = former.job(1).session.epoch
        lapse(former, taker)
        assert taker.job(1).session.epoch > epoch
        journal.take(FIRST, former.now + LEASE_S)  # jobs of yet another broker: another lease
        before = taker.job(1).session.epoch
        former.broker.placement.open_anew(former.job(1))
        assert former.job(1).session.epoch < before


def test_a_broker_that_lost_a_job_drops_it_and_says_where_it_is() -> None:
    """What it committed after the loss is not journaled, and nobody has seen it."""
    journal, first, second = two_brokers()
    first.add_drafter(b"drafter", capabilities=CAPABILITIES)
    first.ask(ANN, submit(1))
    first.ask(ANN, submit(2))
    first.say(1, 7)
    epoch = first.job(1).session.epoch
    lapse(first, second)
    second.say(1, 8)
    received = first.say(1, 8, 9)
    assert received == [Moved(job_id=1, address=SECOND)]
    assert list(first.broker.state.jobs.active) == [2]  # it has not learned yet that this is lost, too
    assert first.received(VERIFIER, Close) == [Close(session_id=1, epoch=epoch)]
    assert first.received(b"drafter", Release) == [Release(session_id=1, epoch=epoch)]
    assert journal.fake.jobs[1].num_tokens == 2
    assert first.broker.state.counts["jobs_lost"] == 1


def test_only_the_records_of_lost_jobs_are_left_out() -> None:
    journal, first, second = two_brokers()
    first.ask(ANN, submit(1))
    lapse(first, second)
    first.renew()
    first.ask(ANN, submit(2))
    first.verdict(1, 7)
    first.verdict(2, 8)
    first.write()
    assert {job_id: journal.fake.jobs[job_id].num_tokens for job_id in (1, 2)} == {1: 0, 2: 1}
    assert token_ids(first.received(ANN)) == [8]


def test_a_job_that_ended_elsewhere_before_the_loss_was_known_is_read_from_the_journal() -> None:
    _, first, second = two_brokers()
    first.ask(ANN, submit(1))
    first.say(1, 7)
    lapse(first, second)
    second.say(1, 8, finish="stop")
    received = first.say(1, 8, 9, finish="length")
    assert [type(message) for message in received] == [JobInfo, Tokens]
    assert (received[-1].base_len, received[-1].token_ids.tolist(), received[-1].finish) == (1, [8], "stop")


def test_clients_are_sent_to_the_broker_of_their_job() -> None:
    _, first, second = two_brokers()
    first.ask(ANN, submit(1))
    moved = [Moved(job_id=1, address=FIRST)]
    assert second.ask(ANN, submit(1)) == moved
    assert second.ask(ANN, Follow(job_id=1)) == moved
    assert second.ask(ANN, Cancel(job_id=1)) == moved
    assert not second.broker.state.jobs.active
    assert [type(message) for message in second.ask(ANN, Follow(job_id=9))] == [Failed]
    assert second.ask(ANN, Cancel(job_id=9)) == []


def test_a_broker_whose_lease_may_have_run_out_shows_no_running_job() -> None:
    """One that was frozen has an old text, and its clients may have seen a newer one at the next holder."""
    _, first, second = two_brokers()
    for job_id in (1, 2):
        first.ask(ANN, submit(job_id))
    first.say(1, 7)
    first.say(2, 7, finish="stop")
    lapse(first, second)
    second.say(1, 8)
    assert first.ask(BEN, Follow(job_id=1)) == [Moved(job_id=1, address=SECOND)]
    assert [type(message) for message in first.ask(BEN, Follow(job_id=2))] == [JobInfo, Tokens]
    second.say(1, 9, finish="stop")
    assert first.ask(BEN, Follow(job_id=1)) == []
    first.renew()
    first.take(first.broker.lose([1], first.now))  # what the journal's thread finds after a late renewal
    assert token_ids(first.ask(BEN, Follow(job_id=1))) == [7, 8, 9]


def test_a_broker_that_may_have_lost_its_lease_shows_its_jobs_after_the_renewal() -> None:
    """Nobody has taken them. The client asks again meanwhile."""
    _, first, _ = two_brokers()
    first.ask(ANN, submit(1))
    first.say(1, 7)
    first.now += HELD_S
    assert first.ask(BEN, Follow(job_id=1)) == []
    first.renew()
    assert token_ids(first.ask(BEN, Follow(job_id=1))) == [7]


def test_nobody_is_sent_to_a_lost_broker() -> None:
    """The client asks again, and then the job is somewhere."""
    journal, first, second = two_brokers()
    first.ask(ANN, submit(1))
    second.now += LEASE_S
    journal.renew(SECOND, second.now)
    assert second.ask(ANN, submit(1)) == []
    second.renew()
    assert second.ask(ANN, submit(1)) == [Accepted(job_id=1)]


def test_one_of_two_brokers_that_take_the_same_job_at_once_gets_it() -> None:
    journal, first, second = two_brokers()
    for broker in (first, second):
        broker.front(ANN, submit(1))
        (asked,) = broker._asked()
        broker.take(broker.broker.found(asked.job_id, journal.find(1, broker.now), broker.now))
    first.write()
    second.write()
    assert first.received(ANN) == [Accepted(job_id=1)]
    assert second.received(ANN) == [Moved(job_id=1, address=FIRST)]
    assert not second.broker.state.jobs.active
    assert journal.fake.jobs[1].finish == ""


def test_a_job_that_comes_back_before_its_loss_was_known_is_taken_anew() -> None:
    """The former state is dropped, and its readers stay."""
    journal, first, second = two_brokers()
    first.ask(ANN, submit(1))
    first.say(1, 7)
    former = first.job(1)
    lapse(first, second)
    second.say(1, 8)
    journal.leave(SECOND)
    first.renew()
    first.write()
    assert first.job(1) is not former
    assert first.job(1).session.epoch > former.session.epoch
    assert token_ids(first.received(ANN)) == [7, 8]
    assert token_ids(first.say(1, 9)) == [9]


def test_the_end_of_a_lost_job_is_forgotten() -> None:
    _, first, second = two_brokers()
    first.ask(ANN, submit(1))
    lapse(first, second)
    first.verdict(1, 7, finish="stop")
    assert 1 in first.broker.state.jobs.finished
    first.write()
    assert 1 not in first.broker.state.jobs.finished
    assert first.received(ANN, Tokens, JobTokens) == []


def test_a_job_whose_verifier_is_here_continues_at_once() -> None:
    """Another one waits first for its verifier to come, as after a restart."""
    _, first, second = two_brokers()
    first.ask(ANN, submit(1))
    lapse(first, second)
    assert second.job(1).state == "running"
    journal = SharedJournal()
    first, third = Shared(journal, FIRST), Shared(journal, SECOND)
    third.leave()
    first.ask(ANN, submit(1))
    lapse(first, third)
    assert third.job(1).state == "absent"
    third.hello(VERIFIER)
    assert third.job(1).state == "running"
    assert third.job(1).crashes.total == 0


def test_a_taken_job_continues_at_the_verifier_that_has_its_text() -> None:
    """Although that one has more jobs."""
    _, first, second = two_brokers()
    first.ask(ANN, submit(1))
    first.say(1, 7)
    second.hello(b"other")
    other = second.broker.state.workers.get(b"other")
    other.hello = replace(other.hello, incarnation=2)
    second.broker.state.workers.get(VERIFIER).num_others = 20
    lapse(first, second)
    assert second.job(1).session.verifier == VERIFIER


def test_a_lost_job_that_waits_for_its_verifier_stays_lost() -> None:
    journal = SharedJournal()
    first, second = Shared(journal, FIRST), Shared(journal, SECOND)
    second.leave()
    first.ask(ANN, submit(1))
    lapse(first, second)
    second.take(second.broker.lose([1], second.now))
    second.hello(VERIFIER)
    assert not second.broker.state.jobs.active


def test_workers_are_told_of_all_brokers_if_they_can_register_with_several() -> None:
    journal, first, _ = two_brokers()
    assert first.received(VERIFIER, Brokers)[-1] == Brokers(addresses=(FIRST, SECOND), own=FIRST)
    newer = first.add_drafter(b"new", capabilities=CAPABILITIES)
    assert [type(message) for message in newer if not isinstance(message, Assign)] == [Welcome, Brokers]
    older = first.add_drafter(b"old", capabilities=tuple({*CAPABILITIES} - {SEVERAL_BROKERS}))
    assert [type(message) for message in older] == [Welcome]
    journal.leave(SECOND)
    first.renew()
    assert first.received(VERIFIER, Brokers)[-1] == Brokers(addresses=(FIRST,), own=FIRST)
    assert first.received(b"old", Brokers) == []
    alone = Desk()
    assert alone.received(VERIFIER, Brokers) == [Brokers()]


def test_a_stranger_learns_nothing_of_a_job_of_another_broker() -> None:
    journal, _, second = two_brokers()
    second.front(BEN, Follow(job_id=1))
    (asked,) = second._asked()
    assert asked == Find(1)
    stored = replace(stored_at(journal), owner="ann")
    second.broker.state.roles.owns = lambda client, owner: client == ANN
    second.take(second.broker.found(1, stored, second.now))
    (refused,) = second.received(BEN, Failed, Moved)
    assert (refused.code, FIRST in refused.reason) == ("unknown", False)


def stored_at(journal: SharedJournal) -> Any:
    """Return a job that the first broker holds."""
    Shared(journal, FIRST).ask(ANN, submit(1))
    return journal.find(1, 100.0)


def test_a_verdict_of_a_former_session_changes_nothing_at_the_taker() -> None:
    _, first, second = two_brokers()
    first.ask(ANN, submit(1))
    epoch = first.job(1).session.epoch
    lapse(first, second)
    second.back(Verdict(session_id=1, epoch=epoch, base_len=2, token_ids=np.array([7])))
    assert second.job(1).transcript.num_tokens == 0


def test_a_list_of_jobs_has_those_of_all_brokers_once() -> None:
    _, first, second = two_brokers()
    first.ask(ANN, submit(1))
    second.ask(ANN, submit(2))
    second.front(ANN, ListJobs(limit=10))
    (asked,) = [one for one in second.asked if isinstance(one, FindFinished)]
    assert (asked.limit, asked.with_unfinished) == (10, True)
    summary = JobSummary(1, "", "toy", "", 0, "", 3, 100.0, 0.0)
    found = [summary, summary._replace(job_id=2), summary._replace(job_id=3, finish="stop")]
    second.take(second.broker.listed(asked, found, second.now))
    (listed,) = second.received(ANN, JobList)
    lines = orjson.loads(listed.data.tobytes())
    assert [(line["job_id"], line["state"]) for line in lines] == [(2, "running"), (1, "running"), (3, "finished")]
    second.asked.clear()
    second.front(ANN, ListJobs(limit=10, skip=10))
    assert [one.with_unfinished for one in second.asked] == [False]
