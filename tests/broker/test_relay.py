"""Drafters receive verdicts at once, unless the verifier is too busy for drafts: then several as one."""

from functools import partial

import numpy as np
import pytest

from specq.broker.jobs.verdicts import MOST_HELD, read_commit, relay
from specq.broker.state.job import BrokerJob, JobRequest
from specq.protocol.messages import Submit, Verdict
from specq.protocol.params import SamplingParams, Speculation
from specq.protocol.wire import decode, encode

PROMPT_LEN = 3


def make_job(mode: str = "async") -> BrokerJob:
    """Return a job with a prompt of three tokens and two drafters."""
    prompt = np.arange(PROMPT_LEN, dtype=np.int32)
    submit = Submit(
        job_id=9, params=SamplingParams(max_tokens=1000), speculation=Speculation(mode=mode), prompt_ids=prompt
    )
    job = BrokerJob(JobRequest(submit))
    for drafter in (b"d0", b"d1"):
        job.drafters.add(drafter, PROMPT_LEN)
    return job


def relayed(job: BrokerJob, min_accept_probs: list[int]) -> list[Verdict]:
    """Commit one token a verdict, with these `min_accept_prob`; return what the first drafter receives, the second the
    same."""
    found: list[Verdict] = []
    for min_accept_prob in min_accept_probs:
        verdict = Verdict(
            session_id=9, epoch=job.session.epoch, base_len=job.transcript.length, min_accept_prob=min_accept_prob,
            token_ids=np.array([job.transcript.length % 7], np.int32),
        )  # fmt: skip
        frames = encode(verdict)
        commit = read_commit(frames)
        job.transcript.commit(commit)
        sends = relay(job, commit, partial(list, frames))
        assert [send.to for send in sends] in ([], [b"d0", b"d1"])
        found += [message for send in sends[:1] if isinstance(message := decode(send.frames), Verdict)]
    return found


@pytest.mark.parametrize(("mode", "asked"), [("async", [0, 500, 850]), ("sync", [900] * 3), ("jit", [900] * 3)])
def test_verdicts_pass_at_once_where_drafts_are_of_use_or_waited_for(mode: str, asked: list[int]) -> None:
    """Each as it is."""
    assert [v.base_len for v in relayed(make_job(mode), asked)] == [3, 4, 5]


def test_a_busy_verifiers_verdicts_go_together() -> None:
    """Less and less often. None is left out, and the last one has the current `min_accept_prob`."""
    job = make_job()
    found = relayed(job, [900] * 100)
    received = [(v.base_len, len(v.token_ids)) for v in found]
    assert [start for start, _ in received] == [
        PROMPT_LEN + sum(n for _, n in received[:i]) for i in range(len(received))
    ]
    assert [n for _, n in received][:6] == [1, 2, 4, 8, 16, MOST_HELD]
    assert [t for v in found for t in v.token_ids.tolist()] == job.transcript.token_ids[: sum(n for _, n in received)]


def test_where_drafters_shall_be_silent_they_receive_one_verdict_that_says_so() -> None:
    """And then as few as can be; a verdict that asks for drafts goes at once, with all that was held."""
    job = make_job()
    assert [len(v.token_ids) for v in relayed(job, [9999] * 70)] == [1, MOST_HELD, MOST_HELD]
    assert [len(v.token_ids) for v in relayed(job, [100])] == [6]


def test_when_drafts_are_of_use_again_all_is_sent_at_once() -> None:
    """What was held goes out with the first verdict that is not busy; from then on each passes as before."""
    job = make_job()
    relayed(job, [900, 900, 900, 900])
    first, second = relayed(job, [300, 300])
    assert (first.base_len + len(first.token_ids), first.min_accept_prob) == (8, 300)
    assert (second.base_len, len(second.token_ids)) == (8, 1)
    assert [len(v.token_ids) for v in relayed(job, [900, 900, 900])] == [1, 2]
