"""Requests of which no job of one's own comes, by the core alone: the tokenizer, who is waited for before it comes, the
status; and jobs that nobody waits for, left to the broker, looked up, stopped, listed."""

import numpy as np
import pytest

from specq.client.core import ClientCore
from specq.client.events import (
    AwaitedModel,
    FoundJob,
    JobAccepted,
    JobPage,
    RequestFailed,
    StatusReport,
    TokenizerReady,
)
from specq.client.inquiries import LISTING, STATUS, TOKENIZER, VERIFIER_WAIT_S
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
    TokenizerChunk,
)
from specq.protocol.params import SamplingParams
from specq.testing.fake_broker import INFO, STATS, tokens
from tests.client.cores import TEXT, cancels, job_of, new_ids
from tests.each import each


@pytest.fixture
def core():
    return ClientCore("tcp://there:1", 10.0)


NO_VERIFIER = Failed(job_id=0, code="no_verifier", reason="none is registered")


def test_a_verifier_is_waited_for(core):
    """The question is repeated every second; it is said once what for."""
    core.fetch_tokenizer("", 0.0)
    events, asked = [], 0
    for tenth in range(1, int(VERIFIER_WAIT_S - 5) * 10):
        now = tenth / 10
        events += core.tick(now)
        questions = core.take_outbox().count(FetchTokenizer())
        asked += questions
        events += core.receive(NO_VERIFIER, now) if questions else []
    assert events == [AwaitedModel(TOKENIZER, "a verifier to register with the broker at tcp://there:1")]
    assert 40 <= asked <= 60
    assert [type(event) for event in core.receive(chunks(b'{"a":"b"}')[0], 55.0)] == [TokenizerReady]


def test_the_wait_for_a_verifier_is_bounded(core):
    """Then the broker's reason is the error."""
    core.fetch_tokenizer("", 0.0, wait_s=5.0)
    assert [type(event) for event in core.receive(NO_VERIFIER, 4.9)] == [AwaitedModel]
    (failed,) = core.receive(NO_VERIFIER, 5.0)
    assert (failed.error.code, str(failed.error)) == ("no_verifier", "none is registered")


def test_a_broker_is_waited_for(core):
    """As long as was asked for; what is sent meanwhile is small, since all of it waits for the broker to come."""
    core.fetch_tokenizer("", 0.0, wait_s=30.0)
    events, sent = [], core.take_outbox()
    for tenth in range(1, 300):
        events += core.tick(tenth / 10)
        sent += core.take_outbox()
    assert events == [AwaitedModel(TOKENIZER, "a broker at tcp://there:1")]
    assert sent.count(FetchTokenizer()) == 1
    assert sent.count(GetStatus()) == len(sent) - 1 > 5
    (failed,) = core.tick(30.0)
    assert (failed.error.code, "within 30 s" in str(failed.error)) == ("no_broker", True)


def test_a_broker_that_comes(core):
    """Is asked for the tokenizer again, in case the first question was lost with another one."""
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


def test_tokenizer_in_pieces(core):
    """Pieces are joined in any order, doubles ignored."""
    core.fetch_tokenizer("m", 0.0)
    assert core.take_outbox() == [FetchTokenizer(model="m")]
    a, b, c = chunks(b'{"tokenizer', b'.json"', b':"x"}')
    assert [core.receive(piece, 0.1) for piece in (c, a, c)] == [[], [], []]
    (ready,) = core.receive(b, 0.2)
    assert ready == TokenizerReady(TOKENIZER, INFO, {"tokenizer.json": "x"})
    assert core.receive(b, 0.3) == []


def test_tokenizer_of_another_model_in_between(core):
    """Pieces of two models are not mixed."""
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


def test_tokenizer_that_is_broken(core):
    """Pieces that make no JSON object of texts end the request with an error."""
    core.fetch_tokenizer("", 0.0)
    (failed,) = core.receive(chunks(b"[]")[0], 0.1)
    assert (failed.key, failed.error.code) == (TOKENIZER, "lost")


def test_no_verifier(core):
    """A failure without a job belongs to the tokenizer request. Without a wait it is raised at once."""
    core.fetch_tokenizer("", 0.0, wait_s=0.0)
    (failed,) = core.receive(Failed(job_id=0, code="no_verifier", reason="start one"), 0.1)
    assert (failed.key, failed.error.code) == (TOKENIZER, "no_verifier")


def test_status(core):
    """A status is asked for, again if need be, and answered once."""
    core.get_status(0.0)
    core.tick(1.0)
    assert core.take_outbox() == [GetStatus(), GetStatus()]
    assert core.receive(Status(report={"models": []}), 1.1) == [StatusReport(STATUS, {"models": []})]
    assert core.receive(Status(report={"models": []}), 1.2) == []


def test_a_verifier_of_a_model_is_waited_for_by_name(core):
    """Again where the broker's reason has changed, since it may serve other models by then."""
    said = []
    core.fetch_tokenizer("m", 0.0)
    for now, reason in enumerate(("none", "none", "served are n", "served are n")):
        said += core.receive(Failed(job_id=0, code="no_verifier", reason=reason), float(now))
    assert said == [AwaitedModel(TOKENIZER, "a verifier of model 'm' to register with the broker at tcp://there:1")] * 2


def info(*, ended: bool, elapsed_ms: int = 1500) -> JobInfo:
    params = SamplingParams(max_tokens=20)
    return JobInfo(job_id=7, params=params, ended=ended, elapsed_ms=elapsed_ms, prompt_ids=np.array([1], np.int32))


@each("answer", [Accepted(job_id=7), tokens(7, 0, [5])])
def test_a_detached_job_is_left_to_the_broker(core, answer):
    """It is repeated until the broker has it, and then forgotten; it is never stopped."""
    job = job_of(7)
    core.submit_detached(job, 0.0)
    core.tick(1.0)
    assert core.take_outbox() == [job, job]
    assert core.receive(answer, 1.1) == [JobAccepted(7)]
    assert core.receive(answer, 1.2) == []
    core.submit_detached(job, 2.0)
    core.take_outbox()
    core.abandon_all(2.1)
    assert (core.take_outbox(), core.idle) == ([], True)


def test_a_detached_job_that_is_refused(core):
    core.submit_detached(job_of(7), 0.0)
    (failed,) = core.receive(Failed(job_id=7, code="no_verifier", reason="none"), 0.1)
    assert (type(failed), failed.error.code) == (RequestFailed, "no_verifier")


def test_a_job_is_looked_up(core):
    """What it is comes first, then its tokens; those without it are asked for again. The times are the broker's."""
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


def test_a_job_that_runs_is_found_as_it_is(core):
    """Unless its end is waited for."""
    core.find(7, 0.0, until_end=False)
    (found,) = core.receive(info(ended=False), 0.1)
    assert (found.ended, found.info.ended, core.idle) == (False, False, True)


def test_a_job_that_failed_is_found_with_its_error(core):
    """With its tokens too; and so is one that the broker does not know."""
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


def test_a_job_that_is_looked_up_is_stopped(core):
    """Cancel is repeated until its end is known."""
    core.find(7, 0.0, until_end=True)
    core.cancel(7, 0.0)
    assert core.take_outbox() == [Follow(job_id=7, have=0), Cancel(job_id=7)]
    assert cancels(core, 0.0, 3.0)
    core.receive(info(ended=True), 3.1)
    (found,) = core.receive(tokens(7, 0, [], "cancelled"), 3.2)
    assert (found.transcript.finish, core.idle) == ("cancelled", True)


def test_jobs_are_listed(core):
    """A page of another request is dropped; a refusal without a job id is that of the list."""
    data = np.frombuffer(b"[]", np.uint8)
    core.list_jobs(5, 10, 0.0)
    assert core.take_outbox() == [ListJobs(limit=5, skip=10)]
    assert core.receive(JobList(skip=0, data=data), 0.1) == []
    assert core.receive(JobList(skip=10, data=data), 0.2) == [JobPage(LISTING, b"[]")]
    core.list_jobs(5, 10, 1.0)
    (failed,) = core.receive(Failed(job_id=0, code="forbidden", reason="no"), 1.1)
    assert (failed.key, failed.error.code) == (LISTING, "forbidden")
