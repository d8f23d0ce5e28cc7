"""What the pipeline refuses or drops: bad jobs, drafters that do not fit, forged drafts, garbage."""

import numpy as np
import pytest

from specq.protocol import NO_TAP, Draft, EngineError, GetStatus, encode
from specq.testing.toy import ToyEngine, toy_info, toy_text
from specq.testing.toy_drafters import ToyProposer
from specq.testing.world import CLIENT, World
from tests.end_to_end.pipeline import PROMPT, finished, started


def test_a_resubmitted_failed_job_returns_its_reason_again() -> None:
    """A client that lost the reason and submits again receives it, and the committed tokens."""

    class Broken(ToyEngine):
        def step(self, steps, tap=NO_TAP):  # type: ignore[no-untyped-def]
            raise EngineError("out of order")

    world = started(engine=Broken())
    job = world.submit(1, PROMPT, max_tokens=10)
    world.run_until(lambda: finished(world, 1))
    first, job.failed = job.failed, None
    world.submit(1, PROMPT, max_tokens=10)
    world.run(0.1)
    assert first is not None
    assert "out of order" in first.reason
    assert job.failed == first


@pytest.mark.parametrize(
    ("prompt", "params", "code", "reason"),
    [
        ([], {}, "invalid", "empty"),
        ([500], {}, "invalid", "outside the vocabulary"),
        ([1], {"max_tokens": 5000}, "invalid", "exceed the 2000"),
        ([1], {"strategy": "wishful"}, "invalid", "known: deterministic"),
    ],
)
def test_bad_jobs_are_refused(prompt: list[int], params: dict[str, int], code: str, reason: str) -> None:
    """A refusal gives the reason and does not affect other jobs."""
    world = started()
    good = world.submit(2, PROMPT, max_tokens=5)
    bad = world.submit(1, prompt, **params)
    world.run_until(lambda: finished(world, 1, 2))
    assert bad.failed is not None
    assert (bad.failed.code, reason in bad.failed.reason) == (code, True)
    assert good.token_ids == toy_text(PROMPT, 5)


def test_without_a_verifier_jobs_are_refused() -> None:
    """The reason says what to start."""
    world = World()
    job = world.submit(1, PROMPT)
    world.run(0.1)
    assert job.failed is not None
    assert (job.failed.code, "specq worker --role target" in job.failed.reason) == ("no_verifier", True)


@pytest.mark.parametrize("drafter_first", [True, False])
def test_a_drafter_of_another_tokenizer_is_refused(drafter_first: bool) -> None:
    """Whichever comes first, the refusal names both models."""
    world = World()
    alien = ToyProposer(toy_info("alien", tokenizer="another"))
    if drafter_first:
        world.add_drafter(b"d0", alien)
        world.run(0.1)
    world.add_verifier()
    world.run(0.1)
    if not drafter_first:
        world.add_drafter(b"d0", alien)
        world.run(0.1)
    assert "alien" in world.refused[b"d0"]
    assert "toy" in world.refused[b"d0"]


def test_a_forged_draft_is_dropped() -> None:
    """Only the drafter of a lane may draft in it."""
    world = started()
    world.submit(1, PROMPT, max_tokens=1000)
    world.run(0.1)
    session = world.verifiers[b"v0"].sessions[1]
    forged = Draft(
        session_id=1, epoch=session.epoch, lane=0, base_len=3, first_id=0,
        token_ids=np.array([1]), parent_ids=np.array([-1]), scores=np.array([0.0]),
    )  # fmt: skip
    world.send(forged)
    world.run(0.1)
    assert session.stats.drafted == 0
    assert world.broker.state.counts["dropped_front"] == 1


def test_garbage_is_counted_and_dropped() -> None:
    """The broker goes on, and says how much it dropped."""
    world = World()
    world.add_verifier()
    for frames in ([], [b""], [b"x" * 8, b"{}"], [bytes(8), b"\xff"], encode(GetStatus())[:1]):
        world.broker.from_front(CLIENT, frames, world.now)
    world.run(0.1)
    world.send(GetStatus())
    world.run(0.1)
    assert world.status()["counts"] == {"dropped_front": 5, "workers_registered": 1}
