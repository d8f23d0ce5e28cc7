"""Tokens of several jobs in one message: each job takes its own by position, even if others are wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specq.client.core import ClientCore
from specq.client.events import JobAccepted, JobDone, NewTokens
from specq.protocol.errors import ProtocolError
from specq.protocol.messages import Follow, JobInfo, JobTokens
from specq.protocol.origins import CORRECTED, DRAFT_WORKER, PLAIN
from specq.protocol.params import SamplingParams
from specq.protocol.wire import decode, encode
from specq.testing.fake_broker import tokens
from tests.client.cores import job_of
from tests.each import each


def together(*jobs: tuple[int, int, list[int]], **changes: Any) -> JobTokens:
    """Return a message with (job, position, tokens), as it arrives."""
    ids = [token for _, _, own in jobs for token in own]
    fields: dict[str, Any] = {
        "job_ids": [job_id for job_id, _, _ in jobs],
        "base_lens": [base_len for _, base_len, _ in jobs],
        "num_tokens": [len(own) for _, _, own in jobs],
        "token_ids": ids,
        "origins": [2 + i % 3 for i in range(len(ids))],
    }
    arrays = {name: np.array(value, np.int64) for name, value in (fields | changes).items()}
    found = decode(encode(JobTokens(**arrays)))
    assert isinstance(found, JobTokens)
    return found


def make_core(*job_ids: int) -> ClientCore:
    core = ClientCore("tcp://somewhere:1", 10.0)
    for job_id in job_ids:
        core.submit(job_of(job_id), 0.0)
    core.take_outbox()
    return core


def text(events: list[Any], job_id: int) -> list[int]:
    return [
        token for event in events if isinstance(event, NewTokens) and event.key == job_id for token in event.token_ids
    ]


def test_each_job_takes_its_own() -> None:
    """Tokens and where they come from; the message answers the requests."""
    core = make_core(7, 8)
    events = core.receive(together((7, 0, [5, 6]), (8, 0, [4])), 0.1)
    assert events == [NewTokens(7, (5, 6), (PLAIN, CORRECTED)), NewTokens(8, (4,), (DRAFT_WORKER,))]
    assert core.tick(9.0) == []
    (done,) = core.receive(tokens(8, 1, [], "stop"), 0.2)
    assert isinstance(done, JobDone)
    assert done.transcript.token_ids == [4]


def test_what_is_known_unknown_or_early_harms_no_other() -> None:
    """Overlaps count once, a gap is requested, unknown jobs are ignored, and a repeated job continues."""
    core = make_core(7, 8, 9)
    core.receive(together((7, 0, [5, 6]), (8, 0, [4])), 1.0)
    events = core.receive(
        together((7, 1, [6, 1]), (8, 3, [9]), (77, 0, [1]), (9, 0, [2]), (9, 1, [3]), (7, 1, [6])), 1.01
    )
    assert [text(events, job_id) for job_id in (7, 8, 9, 77)] == [[1], [], [2, 3], []]
    core.tick(1.2)
    assert [(message.job_id, message.have) for message in core.take_outbox()] == [(8, 1)]


def test_two_stories_of_one_job_fail_that_job() -> None:
    """The others go on."""
    core = make_core(7, 8)
    core.receive(together((7, 0, [5, 6]), (8, 0, [4])), 1.0)
    events = core.receive(together((7, 0, [5, 9]), (8, 1, [3])), 1.1)
    assert "two different stories" in str(events[0].error)
    assert text(events, 8) == [3]


def test_jobs_that_are_left_or_looked_up() -> None:
    """Tokens say that the broker has a job that is left to it; those of a job that is looked up wait for what it is."""
    core = make_core()
    core.submit_detached(job_of(5), 0.0)
    core.find(6, 0.0, until_end=True)
    assert core.receive(together((5, 0, [1]), (6, 0, [2])), 0.1) == [JobAccepted(5)]
    core.receive(JobInfo(job_id=6, params=SamplingParams(), prompt_ids=np.array([1], np.int32)), 0.2)
    assert text(core.receive(together((6, 0, [2]), (5, 1, [1])), 0.3), 6) == [2]
    core.tick(1.5)
    assert Follow(job_id=6, have=1) in core.take_outbox()


@each(
    ("changes", "reason"),
    [
        ({"base_lens": [0]}, "base_lens has 1 elements, not 2"),
        ({"num_tokens": [2, 2]}, "token_ids has 3 elements, not 4"),
        ({"num_tokens": [2**31 - 1] * 2}, "token_ids has 3 elements, not 4294967294"),
        ({"origins": [2]}, "origins has 1 elements, not 3"),
        ({"job_ids": [7]}, "base_lens has 2 elements, not 1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_as_a_whole(changes: dict[str, list[int]], reason: str) -> None:
    """With the reason; nothing of the message is taken, and the next one is."""
    core = make_core(7, 8)
    with pytest.raises(ProtocolError, match=f"the arrays of job_tokens do not fit together: {reason}"):
        core.receive(together((7, 0, [5, 6]), (8, 0, [4]), **changes), 0.1)
    assert text(core.receive(together((7, 0, [5, 6]), (8, 0, [4])), 0.2), 7) == [5, 6]


@each("changes", [{"job_ids": [-1]}, {"base_lens": [-1]}, {"token_ids": [-5]}, {"origins": [99]}])
def test_numbers_out_of_bounds_are_refused(changes: dict[str, list[int]]) -> None:
    """By the wire format already."""
    with pytest.raises(ProtocolError, match=f"job_tokens.{next(iter(changes))} must hold"):
        together((7, 0, [5]), **changes)
