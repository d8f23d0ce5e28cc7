"""What the broker alone promises: fencing by epoch, and sending again what drafters missed."""

import numpy as np
import pytest

from specq.broker import Send
from specq.protocol.messages import Heartbeat, Verdict
from specq.protocol.wire import decode, encode
from specq.testing.toy import toy_text
from specq.testing.world import World

PROMPT = [5, 6, 7]


def running_world() -> World:
    """Return a world with a long job on its way."""
    world = World()
    world.add_verifier()
    world.add_drafter()
    world.run(0.1)
    world.submit(1, PROMPT, max_tokens=1000)
    world.run(0.1)
    return world


def told_behind(world: World) -> list[Verdict]:
    """Let the drafter's heartbeat list the session with its prompt alone; return what it is sent."""
    job = world.broker.state.jobs.active[1]
    behind = Heartbeat(
        incarnation=1, state="ready", load=1, session_ids=np.array([1]), epochs=np.array([job.session.epoch]),
        lengths=np.array([job.transcript.prompt_len]),
    )  # fmt: skip
    effects = world.broker.from_front(b"d0", encode(behind), world.now)
    return [decode(effect.frames) for effect in effects if isinstance(effect, Send) and effect.to == b"d0"]


def test_a_verdict_of_an_earlier_epoch_commits_no_tokens() -> None:
    """The broker counts and ignores verdicts of an earlier epoch, even from the same verifier."""
    world = running_world()
    job = world.broker.state.jobs.active[1]
    before = list(job.transcript.token_ids)
    for epoch, is_current in ((job.session.epoch - 1, False), (job.session.epoch, True)):
        verdict = Verdict(session_id=1, epoch=epoch, base_len=job.transcript.length, token_ids=np.array([49]))
        effects = world.broker.from_back(b"v0", encode(verdict), world.now)
        assert bool(effects) == is_current
        assert job.transcript.token_ids == before + [49] * is_current
    assert world.broker.state.counts["late_verdicts"] == 1


def test_a_malformed_verdict_is_counted_and_dropped() -> None:
    """A header or array that does not fit commits no tokens and does not stop the broker."""
    world = running_world()
    job = world.broker.state.jobs.active[1]
    before = list(job.transcript.token_ids)
    key, header, *arrays = encode(
        Verdict(
            session_id=1, epoch=job.session.epoch, base_len=job.transcript.length, us=(7, 8), token_ids=np.array([49])
        )
    )
    malformed = [
        [key, header.replace(b"[7,8]", b'["7","8"]'), *arrays],
        [key, header.replace(b"[7,8]", b"[7]"), *arrays],
        [key, header.replace(b'"base_len":', b'"base_len":-'), *arrays],
        [key, header, b"abc"],
        [key, header, np.array([-1], "<i4").tobytes()],
        [key, header, *arrays, bytes(8), b"\1"],
    ]
    for frames in malformed:
        assert world.broker.from_back(b"v0", frames, world.now) == []
    assert job.transcript.token_ids == before
    assert world.broker.state.counts["dropped_back"] == len(malformed)


def test_a_drafter_that_missed_verdicts_receives_them_again() -> None:
    """A heartbeat that stays behind what was committed at the one before brings the missing tokens."""
    world = running_world()
    job = world.broker.state.jobs.active[1]
    job.drafters.lane_of(b"d0").mark.length = 0
    assert told_behind(world) == []
    (missing,) = told_behind(world)
    assert isinstance(missing, Verdict)
    assert missing.base_len == job.transcript.prompt_len
    assert missing.token_ids.tolist() == toy_text(PROMPT, len(job.transcript.token_ids))


@pytest.mark.parametrize("asked", [0, 400, 9999])
def test_a_drafter_that_missed_verdicts_is_asked_for_what_the_newest_asked_for(asked: int) -> None:
    """One that shall be silent receives few verdicts, and is behind at each heartbeat."""
    world = running_world()
    job = world.broker.state.jobs.active[1]
    verdict = Verdict(
        session_id=1, epoch=job.session.epoch, base_len=job.transcript.length, min_accept_prob=asked,
        token_ids=np.array([toy_text(PROMPT, len(job.transcript.token_ids) + 1)[-1]], np.int32),
    )  # fmt: skip
    world.broker.from_back(b"v0", encode(verdict), world.now)
    job.drafters.lane_of(b"d0").mark.length = job.transcript.length
    (missing,) = told_behind(world)
    assert (missing.base_len, missing.min_accept_prob) == (job.transcript.prompt_len, asked)
