"""Jobs that are stopped or given up: `Cancel` is sent until the end is known."""

import numpy as np

from specq.client.pending import MAX_TRIES
from specq.protocol.messages import Accepted, Cancel, Failed
from specq.testing.fake_broker import tokens
from tests.client.cores import TEXT, cancels, make_core


def test_cancel():
    """Cancelling asks the broker; the job ends with what it has. Of unknown jobs nothing is sent."""
    core, job = make_core()
    core.cancel(8, 0.2)
    core.cancel(7, 0.2)
    assert core.take_outbox() == [job, Cancel(job_id=7)]
    *_, done = core.receive(tokens(7, 0, TEXT[:2], "cancelled"), 0.3)
    assert (done.transcript.finish, done.transcript.token_ids) == ("cancelled", TEXT[:2])


def test_abandon():
    """A job that nobody waits for is cancelled and forgotten."""
    core, job = make_core()
    core.abandon(7, 0.2)
    assert core.take_outbox() == [job, Cancel(job_id=7)]
    assert core.receive(tokens(7, 0, TEXT[:2], "cancelled"), 0.3) == []
    assert core.idle


def test_cancel_is_repeated_until_the_end():
    """A Cancel that is lost is sent again, ever more rarely, as long as somebody waits; then no more."""
    core, _ = make_core(timeout_s=100.0)
    core.receive(Accepted(job_id=7), 0.1)
    core.cancel(7, 0.2)
    core.take_outbox()
    gaps = np.diff([0.2, *cancels(core, 0.2, 40.0)])
    assert len(gaps) > MAX_TRIES
    assert list(gaps.round(3)) == sorted(gaps.round(3))
    core.receive(Failed(job_id=7, code="no_verifier", reason="a restarted broker"), 40.1)
    assert cancels(core, 40.1, 50.0)
    (done,) = core.receive(tokens(7, 0, [], "cancelled"), 50.1)
    assert done.transcript.finish == "cancelled"
    assert core.idle
    assert cancels(core, 50.1, 60.0) == []


def test_cancel_of_an_abandoned_job_is_repeated_for_a_while():
    """Nobody waits for its end, which may never come; if it comes, nothing more is sent."""
    core, _ = make_core()
    core.abandon(7, 0.2)
    core.take_outbox()
    assert not core.idle
    assert len(cancels(core, 0.2, 30.0)) == MAX_TRIES - 1
    assert core.idle
    core, _ = make_core()
    core.abandon(7, 0.2)
    assert core.receive(tokens(7, 0, TEXT[:2], "cancelled"), 0.3) == []
    core.take_outbox()
    assert cancels(core, 0.3, 30.0) == []


def test_a_job_that_is_wanted_again_is_not_stopped():
    """Who abandoned it submits it again under its id: its Cancel may have been lost, and is not repeated."""
    core, job = make_core(timeout_s=100.0)
    core.abandon(7, 0.2)
    core.submit(job, 0.3)
    core.take_outbox()
    assert cancels(core, 0.3, 20.0) == []
