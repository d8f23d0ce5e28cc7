"""What becomes of jobs when verifiers die, hang, leave or join; which jobs bring verifiers down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from specq.broker import Broker
from specq.broker.state.job import CLEARED_AFTER, BrokerJob
from specq.journal import Crashes, JobCrashed
from specq.protocol.messages import Failed, Heartbeat, Hello, Open, SessionFailed
from specq.testing.fake_journal import FakeJournal
from specq.testing.toy import toy_info, toy_text
from specq.testing.world import World
from specq.verifier import NO_REPORTS
from tests.broker.desk import ANN, BEN, VERIFIER, Desk, desk_with

POISON = 9
LENGTH = 300


def finished(world: World, *jobs: int) -> bool:
    return all(world.received[job].finish or world.received[job].failed for job in jobs)


class Plague:
    """Verifiers that die where `kills` says of a session's length that it does, and others that take their places."""

    def __init__(self, world: World, kills: Callable[[int], bool], verifiers: int = 1) -> None:
        self.world, self.kills, self.num_crashes, self.num_started = world, kills, 0, 0
        self.most_beside = 0  # sessions beside the poison at its last crash
        for _ in range(verifiers):
            self._start()
        world.at(0.0, self._look)

    def _start(self) -> None:
        self.num_started += 1
        self.world.add_verifier(b"v%d" % self.num_started)

    def _look(self) -> None:
        for identity, verifier in list(self.world.verifiers.items()):
            poison = verifier.sessions.get(POISON)
            if poison is not None and self.kills(poison.length):
                self.most_beside = len(verifier.sessions) - 1
                self.num_crashes += 1
                self.world.kill(identity)
                self.world.at(1.5, self._start)
        self.world.at(0.004, self._look)


@pytest.mark.parametrize("verifiers", [1, 2])
@pytest.mark.parametrize("fatal_length", [0, 40])
def test_a_poison_job_fails_and_the_innocent_do_not(verifiers: int, fatal_length: int) -> None:
    """It brings down two verifiers with others, then two alone; the others end with the right text."""
    world = World()
    plague = Plague(world, lambda length: length >= fatal_length, verifiers)
    world.run(0.1)
    jobs = [1, 2, POISON, 3]
    for i in jobs:
        world.submit(i, [i], max_tokens=LENGTH)
    world.run_until(lambda: finished(world, *jobs), limit_s=120.0)
    failed = world.received[POISON].failed
    assert failed is not None
    assert (failed.code, "4 verifiers crashed because of it, 2 of them" in failed.reason) == ("engine", True)
    assert (plague.num_crashes, plague.most_beside) == (4, 0)
    for i in (1, 2, 3):
        assert world.received[i].token_ids == toy_text([i], LENGTH)
    assert world.broker.state.jobs.isolated() == set()


def test_deaths_by_chance_fail_no_job() -> None:
    """Six crashes of random verifiers at any time: each job ends well, and runs beside others again."""
    world = World(seed=3)
    jobs = list(range(1, 5))
    world.add_verifier(b"v0")
    world.run(0.1)
    for i in jobs:
        world.submit(i, [i], max_tokens=1000)
    for number in range(6):
        world.run(0.4)
        world.kill(b"v%d" % number)
        world.run(3.5)
        world.add_verifier(b"v%d" % (number + 1))
    world.run(1.5)
    assert len(world.verifiers[b"v6"].sessions) == len(jobs)
    world.run_until(lambda: finished(world, *jobs))
    for i in jobs:
        assert world.received[i].token_ids == toy_text([i], 1000)


def test_quarantined_jobs_run_one_at_a_time_and_others_wait_for_them() -> None:
    """While a job in quarantine waits, a verifier that has others takes no more, until it is free for it."""
    desk = Desk()
    for i in (1, 2):
        desk.submit(i)
        desk.job(i).crashes = Crashes(2, 0, 0)
        desk.broker.state.jobs.note_quarantine(desk.job(i))
    desk.submit(3, BEN)
    desk.sent.clear()
    desk.leave()
    desk.hello(b"again")

    def opened() -> list[int]:
        return [one.session_id for one in desk.received(b"", Open)]

    (first,) = opened()
    assert first in (1, 2)
    desk.submit(4, BEN)
    assert opened() == [first]
    desk.verdict(first, *range(1, CLEARED_AFTER))
    assert opened() == [first]
    desk.leave(b"again")
    desk.hello(b"third")
    assert len(opened()) == 2


def test_a_quarantined_job_that_goes_on_well_is_one_no_more() -> None:
    """Once it is well past where it was at the last crash, others run beside it; and the journal knows."""
    desk = Desk(has_journal=True)
    for i in (1, 2):
        desk.submit(i, max_tokens=200)
        desk.journaled()
    for number in range(2):
        desk.now += 10
        desk.take(desk.broker.tick(desk.now))
        desk.hello(b"v%d" % number)
    job = running(desk)
    assert [one.session.verifier for one in desk.broker.state.jobs.active.values()].count(b"") == 1
    desk.verdict(job.job_id, *range(1, CLEARED_AFTER + 1))
    assert job.crashes == Crashes()
    other = desk.job(3 - job.job_id)
    assert (other.session.verifier, job.session.verifier) == (
        b"v1",
        b"",
    )  # in quarantine itself: the first waits until it has been alone
    desk.verdict(other.job_id, *range(1, CLEARED_AFTER + 1))
    assert (other.session.verifier, job.session.verifier) == (b"v1", b"v1")
    received = [write.record for write in desk.writes if isinstance(write.record, JobCrashed)]
    assert [record.crashes.total for record in received if record.job_id == job.job_id] == [1, 2, 0]


def running(desk: Desk) -> BrokerJob:
    (job,) = [job for job in desk.broker.state.jobs.active.values() if job.session.verifier]
    return job


def test_a_worker_that_stands_still_counts_as_dead() -> None:
    """It beats, and has work to do, but its step counter stands still: its sessions go to another, and it may not
    return."""
    world = World()
    verifier = world.add_verifier(b"v0")
    verifier.step = lambda clock: NO_REPORTS  # type: ignore[method-assign]
    world.run(0.1)
    job = world.submit(1, [5], max_tokens=30)
    world.run(2.5)
    world.add_verifier(b"v1")
    world.run_until(lambda: finished(world, 1), limit_s=10.0)
    assert job.token_ids == toy_text([5], 30)
    world.run(2.0)
    assert "made no progress" in world.refused[b"v0"]


BEATS = {  # seconds since the one before, steps, whether there is work
    "idle or slow": [(0.5, number // 5, number % 20 > 1) for number in range(40)],
    "frozen": [(0.5, 1, True), (0.5, 2, True), (5.0, 2, True), (0.5, 3, True)],
}


@pytest.mark.parametrize("kind", BEATS)
def test_a_worker_that_is_idle_or_slow_or_was_frozen_does_not_hang(kind: str) -> None:
    """Beats without a step are no sign where there is nothing to do, where steps come now and then, or after a long
    pause."""
    desk = desk_with(1)
    for seconds, steps, pending in BEATS[kind]:
        desk.now += seconds
        desk.front(VERIFIER, Heartbeat(incarnation=1, state="ready", steps=steps, pending=int(pending)))
        desk.take(desk.broker.tick(desk.now))
    assert desk.broker.state.counts["workers_lost"] == 0


def test_a_worker_may_be_silent_for_as_long_as_its_step_takes() -> None:
    """It says how long that may be; only what is beyond that and liveness counts as a crash."""
    desk = Desk()
    desk.front(VERIFIER, Heartbeat(incarnation=1, state="ready", steps=1, pending=1, step_ms=5000))
    desk.take(desk.broker.tick(desk.now + 7.9))
    assert desk.broker.state.counts["workers_lost"] == 0
    desk.take(desk.broker.tick(desk.now + 8.1))
    assert desk.broker.state.counts["workers_lost"] == 1


def test_a_draining_verifier_hands_its_sessions_over() -> None:
    """At its next heartbeat another goes on with them; where there is none, they end with it."""
    world = World()
    first = world.add_verifier(b"v0")
    world.run(0.1)
    jobs = {i: world.submit(i, [i], max_tokens=400) for i in (1, 2, 3)}
    world.run(0.2)
    first.state = "draining"
    world.run(0.6)
    assert len(first.sessions) == 3
    world.add_verifier(b"v1")
    world.run(0.7)
    assert first.sessions == {}
    world.kill(b"v0")
    world.run_until(lambda: finished(world, *jobs))
    assert [jobs[i].token_ids for i in jobs] == [toy_text([i], 400) for i in jobs]
    assert all(job.crashes == Crashes() for job in world.broker.state.jobs.finished.values())


def test_a_verifier_that_joins_shares_the_work() -> None:
    """Sessions move to it under a new epoch, and their texts stay what they are."""
    world = World()
    world.add_verifier(b"v0")
    world.run(0.1)
    jobs = {i: world.submit(i, [i], max_tokens=300) for i in range(1, 9)}
    world.run(0.3)
    joined = world.add_verifier(b"v1")
    world.run(1.0)
    assert len(joined.sessions) == 4
    moved = world.broker.state.counts["moved"]
    world.run_until(lambda: finished(world, *jobs))
    assert [jobs[i].token_ids for i in jobs] == [toy_text([i], 300) for i in jobs]
    assert world.broker.state.counts["moved"] == moved == 4


def test_a_drafter_that_is_refused_later_leaves_its_lanes() -> None:
    """Its verifier left, and one with another tokenizer came: the job receives another drafter where it goes on."""
    desk = Desk(drafters_per_job=1)
    draft = replace(toy_info(), fingerprint="draft")
    desk.front(b"refused", Hello(role="draft", name="d", incarnation=2, model=draft))
    desk.submit(1)
    job = running(desk)
    assert job.drafters.identities() == [b"refused"]
    desk.leave()
    other = replace(toy_info(), name="other", tokenizer_hash="another")
    desk.front(b"other", Hello(role="target", name="o", incarnation=3, model=other, endpoint="o"))
    desk.hello(b"back")
    desk.front(b"second", Hello(role="draft", name="d", incarnation=4, model=draft))
    assert (job.session.verifier, job.drafters.identities()) == (b"back", [b"second"])


def test_a_lost_welcome_is_said_again() -> None:
    """A worker that says hello again is welcomed again, and stays."""
    desk = Desk()
    desk.now += 2.9
    hello = Hello(role="target", name="v", incarnation=1, model=toy_info(), endpoint="toy", max_sessions=8)
    assert [received.TYPE for received in desk.front(VERIFIER, hello)] == ["welcome", "brokers"]
    desk.take(desk.broker.tick(desk.now + 1))
    assert desk.broker.state.workers.get(VERIFIER) is not None


def test_a_refused_grammar_is_the_jobs_mistake() -> None:
    """So its client receives the code of a wrong argument. Other failures at a verifier are the engine's."""
    codes = {
        "grammar: (a is no pattern": "invalid",
        "the grammar is too complex here": "invalid",
        "a grammar": "engine",
    }
    for reason, code in codes.items():
        desk = desk_with(1)
        desk.back(SessionFailed(session_id=1, epoch=desk.job(1).session.epoch, reason=reason))
        (failed,) = desk.received(ANN, Failed)
        assert (failed.code, failed.reason) == (code, reason)


def test_a_draining_broker_takes_no_new_jobs() -> None:
    """It says so; what runs goes on, and what is left when it stops without a journal fails with the reason."""
    desk = desk_with(1)
    desk.broker.drain(desk.now)
    (refused,) = desk.submit(2, BEN)
    assert "is stopping" in refused.reason
    assert [message.token_ids.tolist() for message in desk.verdict(1, 7)] == [[7]]
    assert not desk.broker.is_idle
    (failed,) = desk.take(desk.broker.give_up(desk.now), ANN)
    assert (failed.job_id, failed.code) == (1, "lost")
    assert desk.broker.is_idle


def test_suspicion_survives_the_broker() -> None:
    """What is held against a job is in the journal, and is what the next broker begins with."""
    journal, desk = FakeJournal(), Desk(has_journal=True)
    desk.submit(1)
    for number in range(2):
        desk.now += 10
        desk.take(desk.broker.tick(desk.now))
        desk.hello(b"v%d" % number)
    journal.write([write.record for write in desk.writes])
    (stored,) = journal.unfinished()
    assert stored.crashes == Crashes(2, 0, 0)
    again = Broker(incarnation=2, has_journal=True)
    again.restore([stored], desk.now)
    assert again.state.jobs.active[1].is_quarantined
    assert not again.state.jobs.queue.quarantined()  # its verifier may come back
    again.tick(desk.now + 10)
    assert [requirements.alone for requirements in again.state.jobs.queue.quarantined()] == [True]


def test_no_client_is_refused_while_a_verifier_that_crashed_may_come_back() -> None:
    """Not answered at first: clients ask again. After three seconds there is no verifier; and at once, where it took
    leave."""
    for state, expected in (("failed", 0), ("leaving", 1)):
        desk = Desk()
        beat = Heartbeat(incarnation=1, state=state)
        desk.front(VERIFIER, beat)
        assert len(desk.submit(1)) == expected
        desk.now += 4.0
        (refused,) = desk.submit(2)
        assert isinstance(refused, Failed)
        assert refused.code == "no_verifier"


def test_a_broker_that_stood_still_loses_no_worker_for_that() -> None:
    """It read no heartbeats meanwhile. A verifier that is silent afterwards is lost."""
    desk = desk_with()
    desk.submit(1)
    desk.now += 60.0
    desk.broker.stood_still(60.0, desk.now)
    desk.broker.tick(desk.now)
    assert (desk.job(1).state, desk.job(1).crashes.total) == ("running", 0)
    desk.broker.tick(desk.now + desk.broker.state.settings.liveness_s + 1.0)
    assert (desk.job(1).state, desk.job(1).crashes.total) == ("waiting", 1)
