"""The client's protocol: messages in, events out, time as an argument."""

import random

import numpy as np
import pytest

from specq.client.core import LISTING, RETRY_MAX_S, STATUS, TOKENIZER, VERIFIER_WAIT_S, ClientCore
from specq.client.events import (
    FoundJob,
    JobDone,
    JobPage,
    JobTaken,
    NewTokens,
    RequestFailed,
    StatusReport,
    TokenizerReady,
    Waiting,
)
from specq.client.pending import MAX_UNANSWERED
from specq.client.stops import MAX_TRIES
from specq.protocol.messages import (
    Accepted,
    Cancel,
    Failed,
    FetchTokenizer,
    Follow,
    GetStatus,
    JobInfo,
    JobList,
    ListJobs,
    Status,
    Submit,
    TokenizerChunk,
)
from specq.protocol.params import SamplingParams
from specq.testing.fake_broker import INFO, STATS, tokens

TEXT = list(range(10, 30))


def make_core(timeout_s: float = 10.0) -> tuple[ClientCore, Submit]:
    """Return a core that has submitted job 7 at time 0."""
    core = ClientCore("tcp://somewhere:1", timeout_s)
    job = Submit(job_id=7, params=SamplingParams(max_tokens=20), prompt_ids=np.array([1, 2], np.int32))
    core.submit(job, 0.0)
    return core, job


def new_ids(events: list) -> list[int]:
    return [token for event in events if isinstance(event, NewTokens) for token in event.token_ids]


def test_a_job_from_start_to_end():
    """Submit goes out; tokens come in order with their flags; the end brings transcript, times and statistics."""
    core, job = make_core()
    assert core.take_outbox() == [job]
    assert core.receive(Accepted(job_id=7), 0.1) == []
    (first,) = core.receive(tokens(7, 0, [5, 6, 7]), 0.5)
    assert first == NewTokens(7, (5, 6, 7), (1, 1, 0))
    last, done = core.receive(tokens(7, 3, [8], "stop"), 0.7)
    assert last == NewTokens(7, (8,), (0,))
    assert isinstance(done, JobDone)
    transcript = done.transcript
    assert (transcript.token_ids, transcript.accepted, transcript.finish) == ([5, 6, 7, 8], [1, 1, 0, 0], "stop")
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
    """While something arrives in time nothing is sent."""
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
    """A broker that had taken the job and now knows no verifier is asked again for a while; one that never had is not."""
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
    """A broker that repeats a job with other tokens is not believed: a mixture would be nobody's text."""
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


def cancels(core: ClientCore, start: float, end: float) -> list[float]:
    """Let time pass in steps of 50 ms; return when `Cancel` of job 7 was sent."""
    times = []
    for step in range(1, round((end - start) / 0.05) + 1):
        now = start + step * 0.05
        core.tick(now)
        times += [now] * core.take_outbox().count(Cancel(job_id=7))
    return times


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


def submit_job(core: ClientCore, job_id: int, now: float) -> None:
    core.submit(Submit(job_id=job_id, params=SamplingParams(), prompt_ids=np.array([1], np.int32)), now)


def test_other_traffic_does_not_answer_for_a_job():
    """A Submit that is never answered is given up in time, whatever the broker says of others; one it took waits on."""
    core, _ = make_core(timeout_s=3.0)
    submit_job(core, 8, 0.0)
    failed = []
    for tenth in range(1, 100):
        core.receive(Accepted(job_id=8), tenth / 10)
        failed += [(tenth / 10, event) for event in core.tick(tenth / 10)]
    ((when, event),) = failed
    assert (when, event.key, event.error.code) == (3.0, 7, "lost")
    assert "is there, but has not answered this for 3 s" in str(event.error)


@pytest.mark.parametrize("ask", [ClientCore.get_status, lambda core, now: core.fetch_tokenizer("", now)])
def test_other_traffic_does_not_answer_for_a_question(ask):
    """Neither for the state nor for the tokenizer."""
    core, _ = make_core(timeout_s=3.0)
    ask(core, 0.0)
    events = []
    for tenth in range(1, 40):
        core.receive(Accepted(job_id=7), tenth / 10)
        events += core.tick(tenth / 10)
    assert [(event.key in (STATUS, TOKENIZER), event.error.code) for event in events] == [(True, "lost")]


def test_jobs_wait_their_turn():
    """Only so many are unanswered at a time, and none of the others is given up meanwhile."""
    core, count = ClientCore("", 3.0), 3 * MAX_UNANSWERED
    for job_id in range(1, count + 1):
        submit_job(core, job_id, 0.0)
    sent, now = [message.job_id for message in core.take_outbox()], 0.0
    assert sent == list(range(1, MAX_UNANSWERED + 1))
    for job_id in range(1, count + 1):
        now += 0.01
        assert core.receive(Accepted(job_id=job_id), now) == core.tick(now) == []
        new = {message.job_id for message in core.take_outbox() if isinstance(message, Submit)} - set(sent)
        sent += sorted(new)
        assert len(new) <= 1
    assert sent == list(range(1, count + 1))
    assert now > 2 * core.timeout_s


def test_a_job_that_waits_its_turn_can_be_stopped():
    """Given up it was never sent; cancelled it is sent and stopped, so that its end is known."""
    core = ClientCore("", 3.0)
    for job_id in range(1, MAX_UNANSWERED + 3):
        submit_job(core, job_id, 0.0)
    core.take_outbox()
    core.abandon(MAX_UNANSWERED + 1, 0.1)
    assert core.take_outbox() == []
    core.cancel(MAX_UNANSWERED + 2, 0.1)
    assert [type(message) for message in core.take_outbox()] == [Submit, Cancel]


# --- waiting for broker and verifier --------------------------------------------------------------------------------

NO_VERIFIER = Failed(job_id=0, code="no_verifier", reason="none is registered")


def test_a_verifier_is_waited_for():
    """The question is repeated every second; it is said once what for."""
    core = ClientCore("tcp://there:1", 10.0)
    core.fetch_tokenizer("", 0.0)
    events, asked = [], 0
    for tenth in range(1, int(VERIFIER_WAIT_S - 5) * 10):
        now = tenth / 10
        events += core.tick(now)
        questions = core.take_outbox().count(FetchTokenizer())
        asked += questions
        events += core.receive(NO_VERIFIER, now) if questions else []
    assert events == [Waiting(TOKENIZER, "a verifier to register with the broker at tcp://there:1")]
    assert 40 <= asked <= 60
    assert [type(event) for event in core.receive(chunks(b'{"a":"b"}')[0], 55.0)] == [TokenizerReady]


def test_the_wait_for_a_verifier_is_bounded():
    """Then the broker's reason is the error."""
    core = ClientCore("", 10.0)
    core.fetch_tokenizer("", 0.0, wait_s=5.0)
    assert [type(event) for event in core.receive(NO_VERIFIER, 4.9)] == [Waiting]
    (failed,) = core.receive(NO_VERIFIER, 5.0)
    assert (failed.error.code, str(failed.error)) == ("no_verifier", "none is registered")


def test_a_broker_is_waited_for():
    """As long as was asked for; what is sent meanwhile is small, since all of it waits for the broker to come."""
    core = ClientCore("tcp://there:1", 10.0)
    core.fetch_tokenizer("", 0.0, wait_s=30.0)
    events, sent = [], core.take_outbox()
    for tenth in range(1, 300):
        events += core.tick(tenth / 10)
        sent += core.take_outbox()
    assert events == [Waiting(TOKENIZER, "a broker at tcp://there:1")]
    assert sent.count(FetchTokenizer()) == 1
    assert sent.count(GetStatus()) == len(sent) - 1 > 5
    (failed,) = core.tick(30.0)
    assert (failed.error.code, "within 30 s" in str(failed.error)) == ("no_broker", True)


def test_a_broker_that_comes():
    """Is asked for the tokenizer again, in case the first question was lost with another one."""
    core = ClientCore("", 10.0)
    core.fetch_tokenizer("", 0.0, wait_s=30.0)
    core.tick(20.0)
    core.take_outbox()
    core.receive(Status(report={}), 20.5)
    core.tick(25.0)
    assert core.take_outbox() == [FetchTokenizer()]


# --- tokenizer and status -----------------------------------------------------------------------------------------


def chunks(*texts: bytes, name: str = "fake") -> list[TokenizerChunk]:
    """Return pieces of a tokenizer."""
    model = INFO.__class__(**{f: getattr(INFO, f) for f in INFO.__slots__} | {"name": name})
    pieces = [np.frombuffer(text, np.uint8) for text in texts]
    return [TokenizerChunk(model=model, index=i, count=len(texts), data=p) for i, p in enumerate(pieces)]


def test_tokenizer_in_pieces():
    """Pieces are joined in any order, doubles ignored."""
    core = ClientCore("", 10.0)
    core.fetch_tokenizer("m", 0.0)
    assert core.take_outbox() == [FetchTokenizer(model="m")]
    a, b, c = chunks(b'{"tokenizer', b'.json"', b':"x"}')
    assert [core.receive(piece, 0.1) for piece in (c, a, c)] == [[], [], []]
    (ready,) = core.receive(b, 0.2)
    assert ready == TokenizerReady(TOKENIZER, INFO, {"tokenizer.json": "x"})
    assert core.receive(b, 0.3) == []


def test_tokenizer_of_another_model_in_between():
    """Pieces of two models are not mixed."""
    core = ClientCore("", 10.0)
    core.fetch_tokenizer("", 0.0)
    old, new = chunks(b'{"old', b'":"1"}', name="old"), chunks(b'{"new', b'":"2"}')
    assert [core.receive(piece, 0.1) for piece in (old[0], new[1], new[0])][-1][0].files == {"new": "2"}


def test_tokenizer_that_is_known():
    """With the first piece a known tokenizer is ready; later pieces are ignored."""
    core = ClientCore("", 10.0, recall=lambda first: {"known": "yes"} if first.count == 2 else None)
    core.fetch_tokenizer("", 0.0)
    first, second = chunks(b"{", b"}")
    (ready,) = core.receive(first, 0.1)
    assert ready.files == {"known": "yes"}
    assert core.receive(second, 0.2) == []


def test_tokenizer_that_is_broken():
    """Pieces that make no JSON object of texts end the request with an error."""
    core = ClientCore("", 10.0)
    core.fetch_tokenizer("", 0.0)
    (failed,) = core.receive(chunks(b"[]")[0], 0.1)
    assert (failed.key, failed.error.code) == (TOKENIZER, "lost")


def test_no_verifier():
    """A failure without a job is the tokenizer's, at once where nobody wants to wait."""
    core = ClientCore("", 10.0)
    core.fetch_tokenizer("", 0.0, wait_s=0.0)
    (failed,) = core.receive(Failed(job_id=0, code="no_verifier", reason="start one"), 0.1)
    assert (failed.key, failed.error.code) == (TOKENIZER, "no_verifier")


def test_status():
    """A status is asked for, again if need be, and answered once."""
    core = ClientCore("", 10.0)
    core.get_status(0.0)
    core.tick(1.0)
    assert core.take_outbox() == [GetStatus(), GetStatus()]
    assert core.receive(Status(report={"models": []}), 1.1) == [StatusReport(STATUS, {"models": []})]
    assert core.receive(Status(report={"models": []}), 1.2) == []


# --- jobs that nobody waits for -----------------------------------------------------------------------------------


def info(*, ended: bool, elapsed_ms: int = 1500) -> JobInfo:
    params = SamplingParams(max_tokens=20)
    return JobInfo(job_id=7, params=params, ended=ended, elapsed_ms=elapsed_ms, prompt_ids=np.array([1], np.int32))


@pytest.mark.parametrize("answer", [Accepted(job_id=7), tokens(7, 0, [5])])
def test_a_detached_job_is_left_to_the_broker(answer):
    """It is repeated until the broker has it, and then forgotten; it is never stopped."""
    core = ClientCore("", 10.0)
    job = Submit(job_id=7, params=SamplingParams(), prompt_ids=np.array([1, 2], np.int32))
    core.submit_detached(job, 0.0)
    core.tick(1.0)
    assert core.take_outbox() == [job, job]
    assert core.receive(answer, 1.1) == [JobTaken(7)]
    assert core.receive(answer, 1.2) == []
    core.submit_detached(job, 2.0)
    core.take_outbox()
    core.abandon_all(2.1)
    assert (core.take_outbox(), core.idle) == ([], True)


def test_a_detached_job_that_is_refused():
    core = ClientCore("", 10.0)
    core.submit_detached(Submit(job_id=7, params=SamplingParams(), prompt_ids=np.array([1], np.int32)), 0.0)
    (failed,) = core.receive(Failed(job_id=7, code="no_verifier", reason="none"), 0.1)
    assert (type(failed), failed.error.code) == (RequestFailed, "no_verifier")


def test_a_job_is_looked_up():
    """What it is comes first, then its tokens; those without it are asked for again. The times are the broker's."""
    core = ClientCore("", 10.0)
    core.find(7, 50.0, until_end=True)
    assert core.take_outbox() == [Follow(job_id=7, have=0)]
    assert core.receive(tokens(7, 0, TEXT[:3]), 50.1) == []
    core.receive(info(ended=False), 50.2)
    assert new_ids(core.receive(tokens(7, 0, TEXT[:3]), 50.3)) == TEXT[:3]
    core.tick(52.0)
    assert core.take_outbox() == [Follow(job_id=7, have=3)]
    core.receive(info(ended=True, elapsed_ms=2500), 52.1)
    *_, found = core.receive(tokens(7, 3, TEXT[3:5], "stop"), 52.2)
    assert isinstance(found, FoundJob)
    assert (found.ended, found.error, found.info.elapsed_ms) == (True, None, 2500)
    transcript = found.transcript
    assert (transcript.token_ids, transcript.finish, transcript.stats) == (TEXT[:5], "stop", STATS)
    assert (transcript.started, transcript.first_token, transcript.finished) == (0.0, None, 2.5)
    assert core.idle


def test_a_job_that_runs_is_found_as_it_is():
    """Unless its end is waited for."""
    core = ClientCore("", 10.0)
    core.find(7, 0.0, until_end=False)
    (found,) = core.receive(info(ended=False), 0.1)
    assert (found.ended, found.info.ended, core.idle) == (False, False, True)


def test_a_job_that_failed_is_found_with_its_error():
    """With its tokens too; and so is one that the broker does not know."""
    core = ClientCore("", 10.0)
    core.find(7, 0.0, until_end=True)
    core.receive(info(ended=True), 0.1)
    core.receive(tokens(7, 0, TEXT[:2], "error"), 0.2)
    (found,) = core.receive(Failed(job_id=7, code="deadline", reason="too late"), 0.3)
    assert (found.error.code, found.transcript.token_ids, found.ended) == ("deadline", TEXT[:2], True)
    core.find(8, 1.0, until_end=True)
    (found,) = core.receive(Failed(job_id=8, code="unknown", reason="there is no job 8"), 1.1)
    assert (found.error.code, found.info) == ("unknown", None)


def test_a_search_is_given_up_in_time():
    """Then nothing is known of the job: the request failed, and the job is not stopped."""
    core = ClientCore("", 3.0)
    core.find(7, 0.0, until_end=True)
    core.receive(Accepted(job_id=99), 2.9)
    (failed,) = core.tick(3.0)
    assert (type(failed), failed.error.code) == (RequestFailed, "lost")
    core.find(7, 4.0, until_end=True)
    core.take_outbox()
    core.abandon(7, 4.1)
    assert (core.take_outbox(), core.idle) == ([], True)


def test_a_job_that_is_looked_up_is_stopped():
    """Cancel is repeated until its end is known."""
    core = ClientCore("", 10.0)
    core.find(7, 0.0, until_end=True)
    core.cancel(7, 0.0)
    assert core.take_outbox() == [Follow(job_id=7, have=0), Cancel(job_id=7)]
    assert cancels(core, 0.0, 3.0)
    core.receive(info(ended=True), 3.1)
    (found,) = core.receive(tokens(7, 0, [], "cancelled"), 3.2)
    assert (found.transcript.finish, core.idle) == ("cancelled", True)


def test_jobs_are_listed():
    """A page of another request is dropped; a refusal without a job id is that of the list."""
    core, data = ClientCore("", 10.0), np.frombuffer(b"[]", np.uint8)
    core.list_jobs(5, 10, 0.0)
    assert core.take_outbox() == [ListJobs(limit=5, skip=10)]
    assert core.receive(JobList(skip=0, data=data), 0.1) == []
    assert core.receive(JobList(skip=10, data=data), 0.2) == [JobPage(LISTING, b"[]")]
    core.list_jobs(5, 10, 1.0)
    (failed,) = core.receive(Failed(job_id=0, code="forbidden", reason="no"), 1.1)
    assert (failed.key, failed.error.code) == (LISTING, "forbidden")


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


@pytest.mark.parametrize("seed", range(60))
def test_any_network_gives_the_same_text(seed):
    """Whatever is lost, doubled, reordered or forgotten, the client gets each token once, in order, and the end."""
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
