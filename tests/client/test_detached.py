"""Requests by job id that nobody answers, against a small broker over real TCP."""

import numpy as np
import pytest

from specq.client.detached import JobDesk
from specq.protocol.errors import JobError
from specq.protocol.messages import Accepted, Submit
from specq.protocol.params import SamplingParams
from specq.testing.fake_broker import FakeBroker, answer


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
