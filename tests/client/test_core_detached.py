"""Jobs that nobody waits for, by the core alone: left to the broker, looked up, stopped, listed."""

import numpy as np

from specq.client.core import LISTING, ClientCore
from specq.client.events import FoundJob, JobAccepted, JobPage, RequestFailed
from specq.protocol.messages import Accepted, Cancel, Failed, Follow, JobInfo, JobList, ListJobs, Submit
from specq.protocol.params import SamplingParams
from specq.testing.fake_broker import STATS, tokens
from tests.client.cores import TEXT, cancels, new_ids
from tests.each import each


def info(*, ended: bool, elapsed_ms: int = 1500) -> JobInfo:
    params = SamplingParams(max_tokens=20)
    return JobInfo(job_id=7, params=params, ended=ended, elapsed_ms=elapsed_ms, prompt_ids=np.array([1], np.int32))


@each("answer", [Accepted(job_id=7), tokens(7, 0, [5])])
def test_a_detached_job_is_left_to_the_broker(answer):
    """It is repeated until the broker has it, and then forgotten; it is never stopped."""
    core = ClientCore("", 10.0)
    job = Submit(job_id=7, params=SamplingParams(), prompt_ids=np.array([1, 2], np.int32))
    core.submit_detached(job, 0.0)
    core.tick(1.0)
    assert core.take_outbox() == [job, job]
    assert core.receive(answer, 1.1) == [JobAccepted(7)]
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
