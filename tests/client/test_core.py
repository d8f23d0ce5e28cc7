"""The client's protocol, a job from submission to end: messages in, events out, time as an argument."""

import random

import numpy as np
import pytest

from specq.client.core import ClientCore
from specq.client.events import JobDone, NewTokens, RequestFailed
from specq.client.inquiries import RETRY_MAX_S
from specq.protocol import DRAFT_WORKER, PLAIN, Accepted, Failed, Submit, origin_names
from specq.testing.fake_broker import STATS, tokens
from tests.client.cores import TEXT, job_of, make_core, new_ids
from tests.each import each


def test_a_job_from_start_to_end():
    """Submit goes out; tokens come in order with their flags; the end brings transcript, times and statistics."""
    core, job = make_core()
    assert core.take_outbox() == [job]
    assert core.receive(Accepted(job_id=7), 0.1) == []
    (first,) = core.receive(tokens(7, 0, [5, 6, 7]), 0.5)
    assert first == NewTokens(7, (5, 6, 7), (DRAFT_WORKER, DRAFT_WORKER, PLAIN))
    last, done = core.receive(tokens(7, 3, [8], "stop"), 0.7)
    assert last == NewTokens(7, (8,), (PLAIN,))
    assert isinstance(done, JobDone)
    transcript = done.transcript
    assert (transcript.token_ids, origin_names(transcript.origins), transcript.finish) == (
        [5, 6, 7, 8],
        (DRAFT_WORKER, DRAFT_WORKER, PLAIN, PLAIN),
        "stop",
    )
    assert (transcript.started, transcript.first_token, transcript.finished) == (0.0, 0.5, 0.7)
    assert transcript.stats == STATS
    assert core.idle


def test_duplicates_and_overlap_are_dropped():
    """What comes twice counts once, whole or in part, also after the end."""
    core, _ = make_core()
    events = core.receive(tokens(7, 0, TEXT[:3]), 0.1)
    events += core.receive(tokens(7, 0, TEXT[:3]), 0.2)
    events += core.receive(tokens(7, 1, TEXT[1:5]), 0.3)
    events += core.receive(tokens(7, 2, TEXT[2:4]), 0.3)
    events += core.receive(tokens(7, 5, [], "length"), 0.4)
    events += core.receive(tokens(7, 5, [], "length"), 0.5)
    assert new_ids(events) == TEXT[:5]
    assert sum(isinstance(event, JobDone) for event in events) == 1


def test_a_gap_is_asked_for():
    """Tokens beyond a gap, the end included, are not taken; the missing ones are asked for soon, by position."""
    core, _ = make_core()
    core.receive(tokens(7, 0, TEXT[:3]), 1.0)
    core.take_outbox()
    assert core.receive(tokens(7, 6, TEXT[6:9], "stop"), 1.05) == []
    core.tick(1.09)
    assert core.take_outbox() == []
    core.tick(1.1)
    (again,) = core.take_outbox()
    assert (again.job_id, again.have) == (7, 3)
    assert new_ids(core.receive(tokens(7, 3, TEXT[3:9], "stop"), 1.2)) == TEXT[3:9]


def test_silence_is_answered_by_asking_again():
    """A silent broker is asked again, less and less often, but not while tokens flow."""
    core, _ = make_core(timeout_s=100.0)
    core.take_outbox()
    asked = []
    for tenth in range(1, 200):
        core.tick(tenth / 10)
        asked += [tenth / 10] * len(core.take_outbox())
    gaps = np.diff([0.0, *asked])
    assert gaps[0] == pytest.approx(1.0)
    assert gaps[-1] == pytest.approx(RETRY_MAX_S)
    assert list(gaps) == sorted(gaps)


def test_flowing_tokens_need_no_retry():
    """While messages arrive in time, the client sends none."""
    core, _ = make_core()
    core.take_outbox()
    for i, token in enumerate(TEXT):
        core.receive(tokens(7, i, [token]), 0.9 * (i + 1))
        core.tick(0.9 * (i + 1))
    assert core.take_outbox() == []


def test_a_broker_that_was_never_there():
    """Without any answer the job fails after the time-out, and the message says what to start and where."""
    core, _ = make_core(timeout_s=3.0)
    assert core.tick(2.9) == []
    (failed,) = core.tick(3.0)
    assert isinstance(failed, RequestFailed)
    assert failed.error.code == "no_broker"
    for hint in ("tcp://somewhere:1", "make broker", "specq up", "3 s"):
        assert hint in str(failed.error)


def test_a_broker_that_went_away():
    """A broker that answered once and then is silent is lost; any message counts as a sign of life."""
    core, _ = make_core(timeout_s=3.0)
    core.receive(Accepted(job_id=7), 2.0)
    core.receive(Accepted(job_id=99), 4.5)
    assert core.tick(7.4) == []
    (failed,) = core.tick(7.5)
    assert (failed.key, failed.error.code) == (7, "lost")


def test_a_healthy_broker_with_a_short_time_out_is_asked_in_time():
    """However short the time-out, a broker is asked at least twice before it is given up."""
    core, _ = make_core(timeout_s=0.8)
    sent = 0
    for hundredth in range(80):
        core.tick(hundredth / 100)
        sent += len(core.take_outbox())
    assert sent >= 3


def test_a_refused_job():
    """Failed ends the job with the broker's code and reason."""
    core, _ = make_core()
    (failed,) = core.receive(Failed(job_id=7, code="busy", reason="the queue is full"), 0.1)
    assert (failed.error.code, str(failed.error)) == ("busy", "the queue is full")
    assert core.receive(tokens(7, 0, [1], "stop"), 0.2) == []


def test_a_broker_that_is_older_than_what_was_asked_for():
    """The reason names what it is; one that refuses something else is quoted as it is."""
    reason = "the broker cannot read this submit: protocol version 6; this side speaks 5"
    for salt, expected in (("pepper", f"the broker at nowhere is older than cache_salt: {reason}"), ("", reason)):
        core = ClientCore("nowhere", 10.0)
        core.submit(job_of(7, cache_salt=salt), 0.0)
        (failed,) = core.receive(Failed(job_id=7, code="invalid", reason=reason), 0.1)
        assert (failed.error.code, str(failed.error)) == ("invalid", expected)


def test_a_failed_job():
    """Tokens that end with "error" wait for the reason, which follows; if it was lost, the job fails without."""
    core, _ = make_core()
    assert new_ids(core.receive(tokens(7, 0, [1], "error"), 0.1)) == [1]
    (failed,) = core.receive(Failed(job_id=7, code="deadline", reason="too late"), 0.2)
    assert (failed.error.code, str(failed.error)) == ("deadline", "too late")

    core, _ = make_core()
    core.receive(tokens(7, 0, [1], "error"), 0.1)
    assert core.tick(1.0) == []
    (failed,) = core.tick(1.1)
    assert (failed.key, failed.error.code) == (7, "engine")


def test_a_restarted_broker_without_verifiers():
    """A broker that had taken the job and now knows no verifier is asked again for a while; one that never had is
    not."""
    gone = Failed(job_id=7, code="no_verifier", reason="none")
    core, _ = make_core(timeout_s=3.0)
    core.receive(Accepted(job_id=7), 0.1)
    assert core.receive(gone, 1.0) == []
    core.take_outbox()
    core.tick(1.1)
    assert [message.job_id for message in core.take_outbox()] == [7]
    assert core.receive(gone, 3.0) == []
    (failed,) = core.receive(gone, 3.2)
    assert failed.error.code == "no_verifier"

    core, _ = make_core()
    (failed,) = core.receive(gone, 0.1)
    assert failed.error.code == "no_verifier"


def test_two_stories():
    """A broker that repeats a job with other tokens is not trusted. A mixture would not be a valid text."""
    core, _ = make_core()
    core.receive(tokens(7, 0, TEXT[:4]), 0.1)
    (failed,) = core.receive(tokens(7, 2, [TEXT[2], 99, 98]), 0.2)
    assert failed.error.code == "lost"


def test_a_broker_that_restarts_without_memory():
    """After a restart the same job, sent again from its start, goes on where the client stands."""
    core, _ = make_core()
    events = core.receive(tokens(7, 0, TEXT[:5]), 0.1)
    core.take_outbox()
    core.tick(1.2)
    assert [message.have for message in core.take_outbox()] == [5]
    for start in range(0, 20, 4):
        finish = "length" if start == 16 else ""
        events += core.receive(tokens(7, start, TEXT[start : start + 4], finish), 2.0)
    assert new_ids(events) == TEXT
    assert isinstance(events[-1], JobDone)


# --- a bad network ------------------------------------------------------------------------------------------------


class Flaky:
    """A broker behind a network that loses, doubles and reorders, and that restarts now and then without memory."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.length, self.sent, self.attached = 0, 0, False

    def step(self, submits: list) -> list:
        """Take what arrived, produce up to three tokens, return what the client receives."""
        for submit in submits:
            if self.random.random() < 0.7:
                self.attached, self.sent = True, min(submit.have, self.length)
        if self.random.random() < 0.05:
            self.length, self.sent, self.attached = 0, 0, False
        if not self.attached:
            return []
        self.length = min(len(TEXT), self.length + self.random.randrange(4))
        if self.length == self.sent:
            return []
        finish = "length" if self.length == len(TEXT) else ""
        delta = [tokens(7, self.sent, TEXT[self.sent : self.length], finish)]
        self.sent = self.length
        return [m for m in delta for _ in range(self.random.choice([0, 1, 1, 2]))]


@each("seed", range(60))
def test_any_network_gives_the_same_text(seed):
    """Messages may be lost, doubled, reordered or forgotten. The client gets each token once, in order, and the end."""
    core, _ = make_core(timeout_s=1000.0)
    broker, delayed, events, now = Flaky(seed), [], [], 0.0
    while not any(isinstance(event, JobDone) for event in events):
        now += 0.05
        assert now < 300, "the job never ended"
        events += core.tick(now)
        delayed += broker.step([m for m in core.take_outbox() if isinstance(m, Submit)])
        broker.random.shuffle(delayed)
        while delayed and broker.random.random() < 0.7:
            events += core.receive(delayed.pop(), now)
    assert new_ids(events) == TEXT
    assert not any(isinstance(event, RequestFailed) for event in events)
