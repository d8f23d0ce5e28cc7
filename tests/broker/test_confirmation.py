"""Sessions that never arrive at their verifier: another one tries, and in the end the job fails; ordinary loss fails
none."""

from __future__ import annotations

from collections import Counter

import pytest

from specq.protocol.messages import Failed, Open
from specq.testing.toy import toy_text
from specq.testing.world import World
from tests.broker.desk import ANN, VERIFIER, Desk, desk_with

BEAT_S = 0.5
DEAF = b"deaf"


def beat(desk: Desk, *identities: bytes, deaf: bytes = b"") -> None:
    """Let verifiers beat, each with its sessions, but for one that has none of those that it was sent."""
    desk.now += BEAT_S
    for identity in identities:
        desk.beat(identity, is_deaf=identity == deaf)
    desk.take(desk.broker.tick(desk.now))


def opens(desk: Desk) -> Counter[bytes]:
    return Counter(to for to, message in desk.sent if isinstance(message, Open))


def test_a_session_that_never_arrives_fails_its_job() -> None:
    """Ten minutes of heartbeats without it: a few dozen Opens, then the client receives the reason; the slot is free
    again."""
    desk = desk_with(1)
    for _ in range(1200):
        beat(desk, VERIFIER, deaf=VERIFIER)
    (failed,) = desk.received(ANN, Failed)
    assert "gave up after 3 failures" in failed.reason
    assert "never confirmed it" in failed.reason
    assert opens(desk)[VERIFIER] <= 100
    assert desk.broker.state.workers.get(VERIFIER).job_ids == set()


def test_another_verifier_tries() -> None:
    """A verifier that no Open reaches spoils no job, though it always has the most room: each goes to the other."""
    desk = Desk(max_sessions=16)
    desk.hello(DEAF)
    for job_id in range(1, 17):
        desk.submit(job_id)
    for _ in range(100):
        beat(desk, VERIFIER, DEAF, deaf=DEAF)
    assert [job.session.verifier for job in desk.broker.state.jobs.active.values()] == [VERIFIER] * 16
    assert max(job.session.num_failures for job in desk.broker.state.jobs.active.values()) == 1
    assert opens(desk)[DEAF] <= 16 * 12


def test_a_job_waits_for_the_verifier_that_can_be_reached() -> None:
    """While that is full, its jobs are not spoilt on the other one."""
    desk = Desk(max_sessions=1)
    desk.hello(DEAF)
    for job_id in (1, 2, 3):
        desk.submit(job_id, max_tokens=50)
    for _ in range(200):
        beat(desk, VERIFIER, DEAF, deaf=DEAF)
    jobs = list(desk.broker.state.jobs.active.values())
    assert len(jobs) == 3
    assert [job.session.verifier for job in jobs].count(VERIFIER) == 1
    for _ in jobs:
        (held,) = [job for job in desk.broker.state.jobs.active.values() if job.session.verifier == VERIFIER]
        desk.verdict(held.job_id, 7, finish="stop")
        beat(desk, VERIFIER, DEAF, deaf=DEAF)
    assert [job.transcript.finish for job in jobs] == ["stop"] * 3


def test_one_lost_open_is_sent_again() -> None:
    """Two heartbeats later. After its confirmation, it does not count as a failure."""
    desk = desk_with(1)
    for _ in range(50):
        beat(desk, VERIFIER, deaf=VERIFIER)
        beat(desk, VERIFIER, deaf=VERIFIER)
        beat(desk, VERIFIER)
    assert opens(desk)[VERIFIER] == 1 + 50
    assert desk.job(1).session.num_failures == 0


@pytest.mark.parametrize("loss", [0.01, 0.05])
def test_ordinary_loss_fails_no_job(loss: float) -> None:
    """Of a hundred jobs whose messages are lost now and then, all end well."""
    world = World(seed=4, loss=loss, double=loss)
    world.add_verifier(b"v0")
    world.add_verifier(b"v1")
    world.run(2.0)
    jobs = {i: world.submit(i, [1 + i % 40], max_tokens=20) for i in range(1, 101)}
    world.run_until(lambda: all(job.finish or job.failed for job in jobs.values()))
    assert [i for i, job in jobs.items() if job.failed] == []
    assert [job.token_ids for job in jobs.values()] == [toy_text([1 + i % 40], 20) for i in jobs]
