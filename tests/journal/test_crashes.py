"""The broker dies at each boundary of decide, journal, confirm and send. No token is lost or doubled."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import pytest

from specq.broker.jobs.intake import Delivery, Intake
from specq.broker.state.job import BrokerJob
from specq.broker.state.ledger import Ledger
from specq.broker.state.table import Jobs
from specq.protocol import Follow, encode
from specq.testing import FakeJournal, toy_text
from tests.each import each
from tests.journal.scene import CLIENT, Scene

PROMPTS = {1: [5, 6, 7], 2: [8, 9]}
LENGTHS = {1: 26, 2: 7}


def play(scene: Scene) -> None:
    """Run two jobs to their ends, and check that they are what they are without faults."""
    for job_id, prompt in PROMPTS.items():
        scene.submit(job_id, prompt, LENGTHS[job_id])
    scene.run(lambda: scene.ended(*PROMPTS))
    assert scene.texts() == {i: toy_text(prompt, LENGTHS[i]) for i, prompt in PROMPTS.items()}
    for job_id in PROMPTS:
        stored = scene.journal.find(job_id)
        assert stored is not None
        assert np.frombuffer(stored.token_ids, "<i4").tolist() == scene.texts()[job_id]
        assert (stored.finish, scene.journal.num_ends[job_id]) == ("length", 1)
    assert not scene.verifier.sessions or scene.life > 1


def num_boundaries() -> int:
    """Return the number of boundaries of a run without faults."""
    scene = Scene()
    play(scene)
    return scene.num_boundaries


def play_all_crashes() -> None:
    """Die once, at each boundary, with the records on their way lost, or journaled unheard."""
    for boundary in range(1, num_boundaries() + 1):
        for survives in (False, True):
            scene = Scene([boundary], survives=survives)
            play(scene)
            assert scene.life == 2


def test_a_crash_at_each_boundary() -> None:
    """Wherever the broker dies, the client ends with the fault-free text, and never saw more than the journal had."""
    assert num_boundaries() > 40
    play_all_crashes()


@each("seed", range(100))
def test_many_crashes(seed: int) -> None:
    """A broker that dies time and again gets there all the same."""
    rng = random.Random(seed)
    crashes = accumulate(rng.randrange(2, 15) for _ in range(8))
    scene = Scene(crashes, survives=bool(seed % 2))
    play(scene)
    assert scene.life > 3


def test_what_ended_is_served_from_the_journal() -> None:
    """A broker that starts anew knows nothing of jobs that ended, but the journal does: by content or by id alone."""
    scene = Scene()
    play(scene)
    scene._die()
    assert scene.broker.state.jobs.get(1) is None
    scene.events.clear()
    scene.submit(1, PROMPTS[1], LENGTHS[1])
    scene.run(lambda: scene.ended(1))
    assert scene.texts() == {1: toy_text(PROMPTS[1], LENGTHS[1])}
    assert scene.journal.num_ends[1] == 1
    scene.submit(2, PROMPTS[1], LENGTHS[2])
    scene.run(lambda: scene.ended(1, 2))
    assert "other content" in str(scene.events[-1].error)
    (asked,) = scene.broker.from_front(CLIENT, encode(Follow(job_id=77)), scene.now)
    (refused,) = scene.broker.found(asked.job_id, None, scene.now)
    assert b"unknown" in refused.frames[1]


# --- planted bugs -----------------------------------------------------------------------------------------------------


def send_at_once(patch: pytest.MonkeyPatch) -> None:
    """Send clients their tokens before the journal has them."""
    update, finish = Delivery.update, Intake.finish

    def eager(self: Delivery, jobs: Sequence[BrokerJob]) -> None:
        for job in jobs:
            job.durable.note(job.transcript.num_tokens, ended=bool(job.transcript.finish))
        update(self, jobs)

    def eager_finish(self: Intake, job: BrokerJob) -> None:
        finish(self, job)
        self.delivery.update([job])

    patch.setattr(Delivery, "update", eager)
    patch.setattr(Intake, "finish", eager_finish)


def accept_at_once(patch: pytest.MonkeyPatch) -> None:
    """Say that a job is taken before the journal has it."""
    init = BrokerJob.__init__

    def registered(self: BrokerJob, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)
        self.durable.is_registered = True

    patch.setattr(BrokerJob, "__init__", registered)


def replay_doubled(patch: pytest.MonkeyPatch) -> None:
    """Replay the last group of a job twice."""
    unfinished = FakeJournal.unfinished

    def doubled(self: FakeJournal) -> list[object]:
        jobs = unfinished(self)
        for job in jobs:
            job.token_ids, job.origins = job.token_ids + job.token_ids[-4:], job.origins + job.origins[-1:]
        return jobs

    patch.setattr(FakeJournal, "unfinished", doubled)


def replay_nothing(patch: pytest.MonkeyPatch) -> None:
    """Forget the unfinished jobs at a restart."""
    patch.setattr(FakeJournal, "unfinished", lambda _: [])


def end_unwritten(patch: pytest.MonkeyPatch) -> None:
    """Take a job for ended once its tokens are journaled."""
    settle = Ledger.settle

    def ended_early(self: Ledger, sequence: int) -> list[BrokerJob]:
        jobs = settle(self, sequence)
        for job in jobs:
            job.durable.note(0, ended=bool(job.transcript.finish))
        return jobs

    patch.setattr(Ledger, "settle", ended_early)


def no_dedupe(patch: pytest.MonkeyPatch) -> None:
    """Take a job that is submitted again for a new one."""
    patch.setattr(Jobs, "get", lambda self, job_id: None)


@pytest.mark.parametrize(
    "plant",
    [send_at_once, accept_at_once, replay_doubled, replay_nothing, end_unwritten, no_dedupe],
    ids=lambda plant: plant.__name__,
)
def test_planted_bugs_are_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these would lose or double something; the crashes above show it."""
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        play_all_crashes()
