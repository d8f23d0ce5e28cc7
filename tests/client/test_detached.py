"""Requests by job id that nobody answers, against a small broker over real TCP."""

import numpy as np
import pytest

from specq.client import Client, PromptLine, detach_lines
from specq.client.detached import JobDesk
from specq.protocol.errors import JobError
from specq.protocol.messages import Accepted, JobList, ListJobs, Submit
from specq.protocol.params import SamplingParams
from specq.testing.fake_broker import FakeBroker, answer
from tests.each import each


def job(job_id: int) -> Submit:
    return Submit(job_id=job_id, params=SamplingParams(), prompt_ids=np.array([5], np.int32))


def test_a_submission_that_is_never_answered_fails_in_time():
    """Though the broker goes on answering another one."""

    def reply(message):
        if isinstance(message, Submit) and message.job_id == 7:
            return [Accepted(job_id=99)]
        return answer(message)

    with FakeBroker(reply) as broker, JobDesk(broker.address, timeout_s=1.5) as desk:
        submitted = desk.submit([job(7), job(8)])
        assert next(submitted) == (8, None)
        with pytest.raises(JobError, match="is there, but has not answered this for") as caught:
            list(submitted)
    assert caught.value.code == "lost"


def test_lines_that_are_left_to_the_broker_name_the_model_that_their_client_asks_for():
    jobs = []

    def reply(message):
        if isinstance(message, Submit):
            jobs.append(message)
            return [Accepted(job_id=message.job_id)]
        return answer(message)

    with FakeBroker(reply) as broker, Client(broker.address, model="toy") as client, JobDesk(broker.address) as desk:
        (detached,) = detach_lines(client, desk, [PromptLine(1, {"token_ids": [5]})], {})
    assert [(detached.job_ids, "toy")] == [((job.job_id,), job.model) for job in jobs]


@each("data", [b"", b"{", b"{}", b"[1]", b'[{"job_id": 1}]', b"\xff"])
def test_a_list_of_jobs_that_is_none_is_said_to_be_so(data):
    def reply(message):
        return [JobList(skip=message.skip, data=np.frombuffer(data, np.uint8))] if isinstance(message, ListJobs) else []

    with (
        FakeBroker(reply) as broker,
        JobDesk(broker.address) as desk,
        pytest.raises(JobError, match="list of jobs cannot be read"),
    ):
        list(desk.list_jobs())
